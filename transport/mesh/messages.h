// SPDX-License-Identifier: Apache-2.0
// Messages between two ranks, with tags. A short message is sent at once with its bytes, as long as
// the receiver has room for it (credit). A longer one is announced first and sent when the receiver
// has a matching receive. So receives may be called in any order, no buffer grows without bound,
// and a message without a receive never blocks the connection.
//
// Ordered per (peer, tag): messages are matched with receives in the order in which the messages,
// or their announcements, arrive.
#pragma once

#include <deque>
#include <list>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include <weft/transport/communicator.h>
#include <weft/transport/mesh/events.h>

namespace weft::transport::mesh {

class Core;

constexpr std::uint64_t kEagerBytes = 32 << 10;  // longest message that is sent at once
// Bytes of such messages that a rank buffers for each peer.
constexpr std::uint64_t kCredit = 1 << 20;
constexpr std::uint64_t kMessageCost = 64;    // credit for a message beside its bytes
constexpr std::uint32_t kMaxRequests = 1024;  // announcements of one peer that may wait here

class Messages {
 public:
  explicit Messages(Core& core);

  // Starts a send or a receive. One that is not ready is posted again when it is.
  void post(std::shared_ptr<Transfer> transfer, bool is_ready);
  void arrived(int peer, const Message& message);
  void ended(event::TransferEnded& event);
  void landed(event::Landed& event);
  void lost(int peer);
  // Ends all messages with `why`. A receive into whose memory a connection still writes ends when
  // the connection has stopped.
  void fail(const Error& why) noexcept;
  bool is_landing() const { return !moving_.empty(); }  // after fail()
  void let_go() noexcept;

  // Sets the peers with which a message is under way, or which a receive names.
  void mark_busy(std::vector<bool>& busy) const;
  Deadline deadline() const;
  Error why_late() const;
  std::vector<PointToPoint::Unreceived> unreceived() const;

 private:
  using TransferPointer = std::shared_ptr<Transfer>;
  // A message, or its announcement, that arrived before its receive was called.
  struct Unexpected {
    std::uint64_t id = 0;
    int peer = 0;
    int tag = 0;
    std::uint64_t bytes = 0;
    Dtype dtype = Dtype::UInt8;
    std::uint64_t number = 0;  // of an announcement
    Scratch::Block block;      // the bytes of an eager message
    bool is_here = false;      // the bytes have landed in `block`
    TransferPointer from;      // the send, for a long message from this rank to itself
    TransferPointer to;        // the receive that takes it, once is_here
  };
  struct Peer {
    std::deque<TransferPointer> waiting;            // sends that have not been announced
    std::map<std::uint64_t, TransferPointer> sent;  // announced ones
    std::map<std::uint64_t, TransferPointer> due;   // receives whose bytes the peer may send
    std::uint64_t credit = kCredit;                 // that this rank may use at the peer
    std::uint64_t lent = 0;                         // of the peer's credit, in use here
    std::uint64_t returned = 0;  // freed for the peer, which has not been told yet
    std::uint32_t requests = 0;  // the peer's announcements that wait here
  };
  Peer& of(int peer) { return peers_[static_cast<std::size_t>(peer)]; }

  void post_send(TransferPointer transfer);
  void post_recv(const TransferPointer& transfer);
  const Error* in_vain(const Transfer& receive) const;
  void send_to_self(const TransferPointer& transfer);
  void go_on(int peer);
  bool send_now(int peer, const TransferPointer& transfer);
  void on_eager(int peer, const Message& message);
  void on_request(int peer, const Message& message);
  void on_clear(int peer, const Message& message);
  void on_payload(int peer, const Message& message);
  void on_credit(int peer, const Message& message);

  // Removes and returns the oldest receive that matches; null if there is none.
  TransferPointer matching(int peer, int tag);
  // Completes a receive with a message that arrived before it; or asks for the announced bytes.
  void give(Unexpected& unexpected, const TransferPointer& transfer);
  // Lets the peer send the announced bytes or, if they do not fit, tells it to drop them.
  void clear(int peer, std::uint64_t number, std::uint64_t bytes, const TransferPointer& transfer);
  // Returns true if the receive has that dtype. If not, the two ranks disagree about the order of
  // their messages: fails the receive and breaks the communicator.
  bool is_of(const Transfer& transfer, int peer, Dtype dtype);
  // Returns true if the receive's memory has that size; otherwise fails the receive.
  bool fits(const Transfer& transfer, int peer, std::uint64_t bytes);
  void give_back(int peer, std::uint64_t credit);
  void tell(int peer, Header header);
  // Ends the transfer when the connection's Op ends, and returns `credit` to the peer.
  void follow(const Op& op, const TransferPointer& transfer, int peer, std::uint64_t credit = 0);
  void finish(const TransferPointer& transfer, int source = -1);
  void end(const TransferPointer& transfer, const Error& why) noexcept;
  void nonsense(int peer, const std::string& what);
  std::vector<TransferPointer> all() const;

  Core& core_;
  std::vector<Peer> peers_;
  std::list<TransferPointer> receives_;  // in the order of their calls
  std::list<Unexpected> unexpected_;     // in the order in which they arrived
  std::list<TransferPointer> moving_;    // being sent or received by a connection
  std::list<TransferPointer> unready_;
  std::uint64_t next_ = 1;
};

}  // namespace weft::transport::mesh
