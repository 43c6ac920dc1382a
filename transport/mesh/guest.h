// SPDX-License-Identifier: Apache-2.0
// The other end of a connection of a mesh that has not greeted yet (door.h, openings.h).
#pragma once

#include <cstdint>
#include <memory>
#include <optional>

#include <weft/base/event_loop.h>
#include <weft/transport/mesh/challenge.h>
#include <weft/transport/mesh/wire.h>
#include <weft/transport/transport.h>

namespace weft::transport::mesh {

class Core;
class Door;
class Openings;

// The Door guards it until the peer has said for which group it connects; then that group's
// Openings does. The members of the first part are used on the loop only, once messages are
// received.
struct Guest {
  std::weak_ptr<Openings> openings;    // of its group, once it is known
  std::weak_ptr<Core> core;            // of its group
  bool greeted = false;                // then the core owns the connection
  std::optional<Challenge> challenge;  // until the peer has proved that it knows the secret

  std::shared_ptr<Connection> connection;  // until greeted
  int peer = -1;  // the rank that we connected to, or that has sent its hello
  Traffic traffic = Traffic::Collectives;
  bool is_ours = false;      // this rank has connected
  std::uint32_t closed = 0;  // of its hello
  bool is_over = false;
  EventLoop::Registration patience;  // time limit for the hello of a rank that has connected
};
using GuestPointer = std::shared_ptr<Guest>;

// For objects that live as long as a group: a store may count its holders, and end with the last.
JoinOptions without_store(JoinOptions options);

// Receives from the guest, whose messages are for the core once it has greeted, and before that for
// its group's Openings; for the door while the group is not known.
void receive(Connection& connection, const GuestPointer& guest, std::weak_ptr<Door> door);
// Tells the peer that has sent this hello that this rank has left the group, and closes the
// connection.
void answer_left(Connection& connection, Hello hello) noexcept;

}  // namespace weft::transport::mesh
