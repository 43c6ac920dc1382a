// How the ranks of a mesh find each other: each listens and says where in the store, connects two
// lanes to every lower rank, and believes who says hello with the group's secret. Strangers are
// turned away and logged.
#pragma once

#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include <weft/base/loop_flag.h>
#include <weft/transport/mesh/core.h>
#include <weft/transport/transport.h>

namespace weft::transport::mesh {

class Meeting final : public std::enable_shared_from_this<Meeting> {
 public:
  Meeting(Connector& connector, const JoinOptions& options, std::shared_ptr<Core> core);

  // Blocks until both lanes to every other rank stand; gives them to the core. Throws as join().
  void hold(Deadline deadline);
  // Ends what was not a rank's.
  void close();
  // Takes what this group has left in the store away; all must have met.
  void tidy() noexcept;

 private:
  // Whoever is at the other end of a connection.
  struct Guest {
    std::shared_ptr<Connection> connection;  // until it is greeted: the core's then
    int peer = -1;                           // whom we have connected to; whoever has said hello
    Lane lane = Lane::Collectives;
    bool is_ours = false;  // we have connected
    bool greeted = false;
    EventLoop::Registration patience;  // with one that has connected to us, until it says hello
  };
  using GuestPointer = std::shared_ptr<Guest>;

  void publish(const std::string& address, Deadline deadline);
  void connect(int peer, Deadline deadline);
  // One that has connected to us. Strangers get neither more time nor more room than ranks need.
  void admit(std::shared_ptr<Connection> connection);
  void receive(const GuestPointer& guest);
  void greet(const GuestPointer& guest, const Arrival& arrival) noexcept;
  // Why that is nobody of ours.
  std::optional<std::string> why_stranger(const Guest& guest, const Hello& hello) const;
  void say_hello(Connection& connection, Lane lane);
  void turn_away(const GuestPointer& guest, const std::string& why);
  void gone(const GuestPointer& guest, const Error& why) noexcept;
  void cannot_take_in(const Error& why) noexcept;
  // Under the mutex: the guest is nobody to wait for any more. Returns its connection, if it had
  // one.
  bool is_connecting();
  std::shared_ptr<Connection> forget(const GuestPointer& guest);
  Error why_late();

  Connector& connector_;
  const JoinOptions options_;
  const std::shared_ptr<Core> core_;
  const std::string place_;
  const std::shared_ptr<LoopFlag> over_;

  std::mutex mutex_;  // of what follows
  Secret secret_{};
  std::vector<GuestPointer> guests_;  // not greeted
  std::vector<bool> lanes_;           // that stand, by peer and lane
  std::size_t missing_;
  std::optional<Error> failure_;
  std::string late_;  // why a connection of ours did not stand in time
};

}  // namespace weft::transport::mesh
