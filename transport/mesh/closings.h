// SPDX-License-Identifier: Apache-2.0
// The closing of a mesh's idle connections, of which a rank keeps at most
// JoinOptions::max_connections. They open again when they are needed (openings.h), and no operation
// notices: no message is lost, overtaken by another, or repeated.
//
// A rank that has more asks the peers of those that it has not used for longest (Ask). It goes on
// using them meanwhile. A peer that needs its connection too refuses, and says so when it does not
// any more (Idle). One that does not agrees, and then holds its own messages back until the
// connection ends or another message arrives. It ends when the rank that asked closes it: then all
// messages of both sides have arrived, because neither has sent anything after its last word, and
// what was held back opens a new connection. A message, or a Stay, arrives if the rank that asked
// has come to need the connection in between.
// So a rank never waits for the answer to its own question; one that has agreed waits for a peer
// that is free to answer, because nothing that it was sent waits to be accepted.
//
// If both ask at once, the higher rank refuses. Each Ask gets one answer, in order.
//
// A connection that ends without having been agreed on is the loss of its peer, as ever. The death
// of a peer with which no connection is left is noticed like that of one that was never connected:
// when the connection is opened again, and by membership, which has connections of its own.
//
// A connection counts as one, however many descriptors its transport uses for it (as many as
// WEFT_TCP_SOCKETS says over tcp). Those that leave are not counted. One is busy while an operation
// of this rank needs it, so an operation always has as many as it needs.
#pragma once

#include <cstdint>
#include <vector>

#include <weft/base/event_loop.h>
#include <weft/transport/mesh/events.h>

namespace weft::transport::mesh {

class Core;

// The part of Core that knows which connections may be closed. Its functions are called while an
// event is handled.
class Closings {
 public:
  Closings(Core& core, std::size_t most);

  void opened(int peer, Traffic traffic);
  // True if messages for the peer have to wait until the connection has ended or stays.
  bool holds(int peer, Traffic traffic) const {
    return of(peer, traffic).state > Link::State::Open;
  }
  // Notes the use of a connection, and returns the Op.
  Op sent(int peer, Traffic traffic, Op op);
  Op accepted(int peer, Traffic traffic, Op op);
  // Returns true if the message concerns closing, and has been dealt with.
  bool arrived(const event::Arrived& event);
  // Called when a connection has ended. Returns true if that was agreed on.
  bool ended(int peer, Traffic traffic);
  void lost(int peer);

  // Called after every event: arranges a look() if there may be something to close.
  void notice() {
    if ((open_ > most_ || owed_ > 0) && !is_due_) arrange();
  }
  // Asks for as many idle connections as there are too many.
  void look();

 private:
  // One connection, as this rank knows it.
  struct Link {
    // Agreed: the peer may close it. Ending: this rank has closed it.
    enum class State : std::uint8_t { None, Open, Agreed, Ending };
    State state = State::None;
    bool asked = false;       // the peer has not answered yet
    bool used_since = false;  // a message was sent after the Ask, and takes it back
    bool is_needed = false;   // the peer has refused, and not said Idle yet
    bool owes_idle = false;   // this rank has
    bool is_awaited = false;  // a look follows when the Ops have ended
    std::uint64_t used = 0;   // when, as clock_ counts
    Op sending, accepting;    // the last ones that had not ended at once
  };
  Link& of(int peer, Traffic traffic) {
    return links_[static_cast<std::size_t>(peer) * kConnectionsPerPair +
                  static_cast<std::size_t>(traffic)];
  }
  const Link& of(int peer, Traffic traffic) const {
    return const_cast<Closings*>(this)->of(peer, traffic);
  }
  void arrange();
  // Whether the connection's own operations have ended. If not, a look() follows when they have.
  bool is_still(Link& link);
  // The same, and no operation of the group needs it.
  bool is_idle(int peer, Traffic traffic);
  void heard(int peer, Traffic traffic, ClosingStep step);
  void heard_ask(int peer, Traffic traffic);
  void heard_agree(int peer, Traffic traffic);
  void stays(int peer, Traffic traffic);
  void say(int peer, Traffic traffic, ClosingStep step);

  Core& core_;
  const std::size_t most_;
  std::vector<Link> links_;  // by peer and Traffic
  std::size_t open_ = 0;     // links in State::Open
  std::size_t owed_ = 0;     // links with owes_idle
  std::uint64_t clock_ = 0;  // counts messages
  bool is_due_ = false;      // a look() is arranged
  bool was_vain_ = false;    // the last look() has done nothing
  EventLoop::Registration pause_;
  std::vector<bool> busy_;  // by peer; scratch
};

}  // namespace weft::transport::mesh
