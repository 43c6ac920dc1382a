// SPDX-License-Identifier: Apache-2.0
// Both ends of a connection of any backend, each on its own loop, for the claims that every backend
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

// The backends of this build that have a connector on this machine.
std::vector<std::string> connecting_backends();
// The backends of this build that cannot be opened on this machine, each with the reason.
std::vector<std::pair<std::string, std::string>> unusable_backends();

// Opens a backend as this program tests it: as it is, or with connections over it that carry device
// memory.
std::shared_ptr<transport::Transport> open_for_claims(const std::string& backend);
// The transport name of those connections.
std::string name_for_claims(const std::string& backend);
// Memory that those connections carry: of the host, or of a fake GPU, which the host may read and
// write in place.
struct ClaimsMemory {
  Slice slice;
  Pin pin;
};
ClaimsMemory memory_for_claims(transport::Transport& on, std::size_t bytes);
// Clears the calls that a fake GPU has recorded in a long run.
void forget_for_claims(transport::Transport& on);

// Both ends of a connection: `near` connected, `far` was accepted.
struct ConnectionPair {
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
  // Returns the next accepted connection; fails the test and returns null if there is none in time.
  std::shared_ptr<Connection> next();
  void end() { listener_.reset(); }

 private:
  struct Kept;
  std::shared_ptr<EventLoop> loop_;
  std::shared_ptr<Kept> kept_;
  std::unique_ptr<transport::Listener> listener_;
};

ConnectionPair open_pair(transport::Connector& connector);

class ConnectionClaims : public testing::TestWithParam<std::string> {
 protected:
  ConnectionClaims()
      : transport_(open_for_claims(GetParam())), connector_(*transport_->connector()) {}

  // Memory sent without waiting for its Op must outlive the connection: declare it first.
  ConnectionPair open() { return open_pair(connector_); }
  std::shared_ptr<Connection> connect(const std::string& address,
                                      const std::shared_ptr<EventLoop>& loop,
                                      Deadline deadline = patience()) {
    return connector_.connect(address, {loop, deadline});
  }

  std::shared_ptr<transport::Transport> transport_;
  transport::Connector& connector_;
};

// Exchanges a message each way, after which sends on the connection may start at once.
void warm_up(const ConnectionPair& pair, Mailbox& near_mail, Mailbox& far_mail);
// Returns once everything posted to the loop before this call has run.
void flush(EventLoop& loop);
// Compares contents; a failure does not print megabytes.
bool same(const std::vector<std::byte>& a, const std::vector<std::byte>& b);

}  // namespace weft::conformance
