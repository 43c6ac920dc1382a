// SPDX-License-Identifier: Apache-2.0
// The opening of a mesh's connections. A pair of ranks connects when one of them first needs the
// other, so joining opens few connections, and ranks that never talk to each other have none.
//
// Either rank may connect. If both do at once, they use the connection of the higher rank: it
// refuses the lower rank's by an answer (Answer::Crossed), and the lower rank, which takes in the
// higher rank's, drops its own. Nothing is sent on a connection before both sides have greeted each
// other, so no message is lost with one that is dropped.
//
// A connection that cannot be made over one transport is made over the next, if the connector has
// several.
//
// Connections that end by agreement (closings.h) are opened again in the same way.
//
// The Door accepts the connections that other ranks make.
//
// The group's Core owns it. Thread-safe; nothing blocks.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include <weft/base/mutex.h>
#include <weft/transport/mesh/door.h>
#include <weft/transport/mesh/guest.h>
#include <weft/transport/mesh/mesh.h>
#include <weft/transport/mesh/table.h>
#include <weft/transport/transport.h>

namespace weft::transport::mesh {

class Core;

class Openings final : public std::enable_shared_from_this<Openings> {
 public:
  // When a connection is opened that this rank needs.
  enum class When {
    Now,
    // The peer is likely to connect: this rank does so only if the peer has not done it in a
    // moment. So two ranks that need each other at once seldom both connect.
    Later,
  };

  // The connections of a group whose ranks connect through this door. `group` names it in a hello;
  // `members`: its ranks as ranks of the first group of that door. `place` begins the log's lines.
  Openings(std::shared_ptr<Door> door, const Token& group, std::vector<int> members,
           const JoinOptions& options, const std::string& place);
  ~Openings();

  // Takes connections in, and hands them to `core`. Until joined() is called, `joining` limits
  // connecting; afterwards the group's timeout does.
  void begin(Table table, const std::shared_ptr<Core>& core, Deadline joining);
  void joined();
  // Opens the connection to a peer unless that has been done or is under way. Core then gets an
  // event::Adopted or event::Unreachable.
  void open(int peer, Traffic traffic, When when) noexcept;
  // A peer's open connection is about to end by agreement (closings.h): one that replaces it waits
  // until left(). stay(): it does not end after all.
  void leave(int peer, Traffic traffic) noexcept;
  void stay(int peer, Traffic traffic) noexcept;
  // It has ended. Takes in the connection, or opens the one, that has waited for that.
  void left(int peer, Traffic traffic) noexcept;
  // Leaves the door, and ends connections that are not a rank's yet.
  void close() noexcept;

  // Called on the loop. A peer has connected and sent this hello to the door.
  void arrive(const GuestPointer& guest, const Hello& hello) noexcept;
  // The next message of a guest that this rank has connected to.
  void greet(const GuestPointer& guest, const Arrival& arrival) noexcept;
  // A guest's connection has ended before it has greeted.
  void gone(const GuestPointer& guest, const Error& why) noexcept;
  // The door cannot accept connections.
  void cannot_take_in(const Error& why) noexcept;

  // The table of begin() and the ranks of make(), for a group that some of these ranks make.
  Table table() const;
  const std::vector<int>& members() const { return members_; }
  std::shared_ptr<Door> door() const;
  // The transport that leads to a peer: that of its connection, or the one that would be used;
  // empty if the connector has only one.
  std::string transport_to(int peer) const;
  // The peers to which connections are being opened.
  std::vector<int> pending() const;

 private:
  // One connection to one peer, as this rank knows it.
  struct Slot {
    enum class State : std::uint8_t { Closed, Waits, Connects, Open, Leaves };
    State state = State::Closed;
    GuestPointer ours;              // while this rank connects
    EventLoop::Registration timer;  // while it waits for the peer to connect
    std::string transport;          // once it is open
    bool has_failed = false;        // it could not be made over a better transport
    std::uint32_t closed = 0;       // as in a Hello
    // Both wait until a connection that leaves has ended.
    GuestPointer next;         // the peer has connected again
    std::optional<When> asks;  // this rank needs a new one
  };
  Slot& slot_of(int peer, Traffic traffic) WEFT_REQUIRES(mutex_);

  void connect(int peer, Traffic traffic) noexcept;
  void wait_for(int peer, Traffic traffic, std::chrono::milliseconds time) WEFT_REQUIRES(mutex_);
  void unreachable(int peer, Traffic traffic, const Error& why) noexcept;
  // The connection could not be made over this transport: tries another, or reports the peer as
  // unreachable.
  void failed(int peer, Traffic traffic, const std::string& transport, const Error& why) noexcept;
  // Counts the guest among those that have not greeted. False if it has been dropped, or this
  // object is closed.
  bool expect(const GuestPointer& guest);
  void challenged(const GuestPointer& guest, const Arrival& arrival) noexcept;
  void take_in(const GuestPointer& guest, const std::shared_ptr<Connection>& connection) noexcept;
  void crossed(const GuestPointer& guest, bool is_told) noexcept;
  // Why the sender of `hello` is not the expected rank; empty if it is.
  std::optional<std::string> why_stranger(const Guest& guest, const Hello& hello)
      WEFT_REQUIRES(mutex_);
  void say_hello(Connection& connection, int peer, Traffic traffic, Answer answer = Answer::Takes);
  // Drops a connection that the peer does not use any more.
  void drop(const GuestPointer& guest) noexcept;
  void turned_back(const GuestPointer& guest) noexcept;
  void turn_away(const GuestPointer& guest, const std::string& why);
  void replace(int peer, Traffic traffic) noexcept;
  // Stops waiting for the guest and returns its connection, if it still has one.
  std::shared_ptr<Connection> forget(const GuestPointer& guest) WEFT_REQUIRES(mutex_);

  const std::shared_ptr<Connector> connector_;
  const Reroute reroute_;  // may be empty
  const Token group_;
  const std::vector<int> members_;
  const JoinOptions options_;
  const std::string place_;

  mutable Mutex mutex_;
  std::shared_ptr<Door> door_ WEFT_GUARDED_BY(mutex_);  // null once this object is closed
  std::weak_ptr<Core> core_ WEFT_GUARDED_BY(mutex_);
  Table table_ WEFT_GUARDED_BY(mutex_);  // empty until begin()
  std::optional<Deadline> joining_ WEFT_GUARDED_BY(mutex_);
  std::vector<GuestPointer> guests_ WEFT_GUARDED_BY(mutex_);  // not greeted yet
  std::vector<Slot> slots_ WEFT_GUARDED_BY(mutex_);           // by peer and Traffic
};

}  // namespace weft::transport::mesh
