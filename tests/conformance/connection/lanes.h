// Two ends of one lane of any backend, each on a loop of its own, for the claims that every backend
// must keep.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include <weft/base/event_loop.h>
#include <weft/tests/harness/mail.h>
#include <weft/transport/registry.h>

namespace weft::conformance {

using harness::bytes_of;
using harness::expect_good;
using harness::failure_of;
using harness::Letter;
using harness::Mailbox;
using harness::patience;
using harness::pattern;
using harness::slice_of;
using transport::Arrival;
using transport::Capabilities;
using transport::Connection;

// The backends of this build that have a connector here.
std::vector<std::string> connecting_backends();
// Those of this build that cannot be opened here, each with the reason.
std::vector<std::pair<std::string, std::string>> unusable_backends();

// Opens a backend as this program tests it: as it is, or with lanes that carry device memory over
// it.
std::shared_ptr<transport::Transport> open_for_claims(const std::string& backend);
// What its lanes are called then.
std::string name_for_claims(const std::string& backend);
// Memory as those lanes carry it: of the host, or of a fake GPU, which the host may read and write
// where it lies.
struct ClaimsMemory {
  Slice slice;
  Pin pin;
};
ClaimsMemory memory_for_claims(transport::Transport& on, std::size_t bytes);
// What a fake GPU has recorded of a long run is thrown away.
void forget_for_claims(transport::Transport& on);

// An end for as long as a test needs both: `near` connected, `far` was accepted.
struct Lane {
  std::shared_ptr<EventLoop> near_loop;
  std::shared_ptr<EventLoop> far_loop;
  std::shared_ptr<Connection> near;
  std::shared_ptr<Connection> far;
};

// A listener that keeps the connections it accepts.
class Harbour {
 public:
  Harbour(transport::Connector& connector, std::shared_ptr<EventLoop> loop);
  std::string address() const { return listener_->address(); }
  // The next connection that was accepted; fails the test and returns null when none comes.
  std::shared_ptr<Connection> next();
  void end() { listener_.reset(); }

 private:
  struct Kept;
  std::shared_ptr<EventLoop> loop_;
  std::shared_ptr<Kept> kept_;
  std::unique_ptr<transport::Listener> listener_;
};

Lane open_lane(transport::Connector& connector);

class ConnectionClaims : public testing::TestWithParam<std::string> {
 protected:
  ConnectionClaims()
      : transport_(open_for_claims(GetParam())), connector_(*transport_->connector()) {}

  // What is sent without waiting for its Op must outlive the lane: declare it first.
  Lane open() { return open_lane(connector_); }
  std::shared_ptr<Connection> connect(const std::string& address,
                                      const std::shared_ptr<EventLoop>& loop,
                                      Deadline deadline = patience()) {
    return connector_.connect(address, {loop, deadline});
  }

  std::shared_ptr<transport::Transport> transport_;
  transport::Connector& connector_;
};

// A lane that carries traffic already: what is sent on it from now on may go at once.
void warm_up(const Lane& lane, Mailbox& near_mail, Mailbox& far_mail);
// Everything posted to the loop before has run.
void flush(EventLoop& loop);
// Equal contents; does not print megabytes.
bool same(const std::vector<std::byte>& a, const std::vector<std::byte>& b);

}  // namespace weft::conformance
