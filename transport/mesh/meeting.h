// SPDX-License-Identifier: Apache-2.0
// How the ranks of a mesh find each other. Each rank listens, publishes its address in the store,
// and opens two connections to every lower rank. It trusts a peer that sends a hello with the
// group's secret; other connections are closed, with a warning in the log.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include <weft/base/loop_flag.h>
#include <weft/base/mutex.h>
#include <weft/transport/mesh/core.h>
#include <weft/transport/transport.h>

namespace weft::transport::mesh {

class Meeting final : public std::enable_shared_from_this<Meeting> {
 public:
  Meeting(Connector& connector, const JoinOptions& options, std::shared_ptr<Core> core);

  // Blocks until both connections to every other rank are established, and hands them to the core.
  // Throws the errors of join().
  void hold(Deadline deadline);
  // Closes the connections that have not become a rank's.
  void close();
  // Erases this group's keys from the store. All ranks must have met before.
  void tidy() noexcept;

 private:
  // The other end of a connection.
  struct Guest {
    std::shared_ptr<Connection> connection;  // until greeted; then the core owns it
    int peer = -1;  // the rank that we connected to, or that has sent its hello
    Traffic traffic = Traffic::Collectives;
    bool is_ours = false;  // this rank has connected
    bool greeted = false;
    EventLoop::Registration patience;  // time limit for the hello of a rank that has connected
  };
  using GuestPointer = std::shared_ptr<Guest>;

  void publish(const std::string& address, Deadline deadline);
  void connect(int peer, Deadline deadline);
  // Takes in a connection that was accepted. Limits the time for its hello and the number of
  // connections that have sent none.
  void admit(std::shared_ptr<Connection> connection);
  void receive(const GuestPointer& guest);
  void greet(const GuestPointer& guest, const Arrival& arrival) noexcept;
  // Why the sender of `hello` is not the expected rank; empty if it is.
  std::optional<std::string> why_stranger(const Guest& guest, const Hello& hello) const
      WEFT_REQUIRES(mutex_);
  void say_hello(Connection& connection, Traffic traffic);
  void turn_away(const GuestPointer& guest, const std::string& why);
  void gone(const GuestPointer& guest, const Error& why) noexcept;
  void cannot_take_in(const Error& why) noexcept;
  bool is_connecting();
  // Stops waiting for the guest and returns its connection, if it still has one.
  std::shared_ptr<Connection> forget(const GuestPointer& guest) WEFT_REQUIRES(mutex_);
  Error why_late();

  Connector& connector_;
  const JoinOptions options_;
  const std::shared_ptr<Core> core_;
  const std::string place_;
  const std::shared_ptr<LoopFlag> over_;

  Mutex mutex_;
  Secret secret_ WEFT_GUARDED_BY(mutex_){};
  std::vector<GuestPointer> guests_ WEFT_GUARDED_BY(mutex_);  // not greeted yet
  // Established connections, by peer and Traffic.
  std::vector<bool> established_ WEFT_GUARDED_BY(mutex_);
  std::size_t missing_ WEFT_GUARDED_BY(mutex_);
  std::optional<Error> failure_ WEFT_GUARDED_BY(mutex_);
  // Why one of our connections was not established in time.
  std::string late_ WEFT_GUARDED_BY(mutex_);
};

}  // namespace weft::transport::mesh
