// Messages between two ranks, with tags. Short ones go with their bytes at once, as long as the
// receiver has promised room for them (credit); longer ones announce themselves and wait until
// there is a receive for them. So every receive may come in any order, nothing fills up, and a lane
// is never held up by a message that nobody wants yet.
//
// Ordered per (peer, tag): messages are matched with receives in the order in which they, or their
// announcements, come.
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

constexpr std::uint64_t kEagerBytes = 32 << 10;  // of a message that goes at once
constexpr std::uint64_t kCredit = 1
                                  << 20;  // bytes of such messages that one peer keeps for another
constexpr std::uint64_t kMessageCost = 64;    // what a message costs beside its bytes
constexpr std::uint32_t kMaxRequests = 1024;  // announcements of one peer that wait at another

class Messages {
 public:
  explicit Messages(Core& core);

  // A send or a receive; one that is not ready comes again when it is.
  void post(std::shared_ptr<Transfer> transfer, bool is_ready);
  void arrived(int peer, const Message& message);
  void ended(event::TransferEnded& event);
  void landed(event::Landed& event);
  void lost(int peer);
  // As for collectives: a receive that a lane writes to fails when that has ended.
  void fail(const Error& why) noexcept;
  bool is_landing() const { return !moving_.empty(); }  // after fail()
  void let_go() noexcept;

  Deadline deadline() const;
  Error why_late() const;
  std::vector<PointToPoint::Unreceived> unreceived() const;

 private:
  using TransferPointer = std::shared_ptr<Transfer>;
  // A message, or its announcement, that came before its receive.
  struct Unexpected {
    std::uint64_t id = 0;
    int peer = 0;
    int tag = 0;
    std::uint64_t bytes = 0;
    Dtype dtype = Dtype::UInt8;
    std::uint64_t number = 0;  // of an announcement
    Scratch::Block block;      // the bytes of one that came with them
    bool is_here = false;      // and they have landed
    TransferPointer from;      // of one from this rank to itself, too long to be copied
    TransferPointer to;        // the receive that takes it, once it is here
  };
  struct Peer {
    std::deque<TransferPointer> waiting;            // sends that have not been announced
    std::map<std::uint64_t, TransferPointer> sent;  // announced ones
    std::map<std::uint64_t, TransferPointer> due;   // receives whose bytes are on their way
    std::uint64_t credit = kCredit;                 // what may be sent there
    std::uint64_t lent = 0;                         // what of its credit is in use here
    std::uint64_t returned = 0;                     // what it may use again and has not been told
    std::uint32_t requests = 0;                     // its announcements that wait here
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

  // The receive that has waited longest for a message like this; null if there is none.
  TransferPointer matching(int peer, int tag);
  // Gives the receive what came before it.
  void give(Unexpected& unexpected, const TransferPointer& transfer);
  // Lets the peer send the bytes, or, where they do not fit, tells it to forget them.
  void clear(int peer, std::uint64_t number, std::uint64_t bytes, const TransferPointer& transfer);
  // Whether the receive is of that dtype. Where not, one of the two ranks is wrong about the order
  // of its messages: the communicator is broken, and the receive with it.
  bool is_of(const Transfer& transfer, int peer, Dtype dtype);
  // Whether the receive has memory of that size; it has failed where not.
  bool fits(const Transfer& transfer, int peer, std::uint64_t bytes);
  void give_back(int peer, std::uint64_t credit);
  void tell(int peer, Header header);
  // The transfer ends with the connection's Op; `credit` is the peer's again then.
  void follow(const Op& op, const TransferPointer& transfer, int peer, std::uint64_t credit = 0);
  void finish(const TransferPointer& transfer, int source = -1);
  void end(const TransferPointer& transfer, const Error& why) noexcept;
  void nonsense(int peer, const std::string& what);
  std::vector<TransferPointer> all() const;

  Core& core_;
  std::vector<Peer> peers_;
  std::list<TransferPointer> receives_;  // in the order of the calls
  std::list<Unexpected> unexpected_;     // in the order in which they came
  std::list<TransferPointer> moving_;    // in the hands of a connection
  std::list<TransferPointer> unready_;
  std::uint64_t next_ = 1;
};

}  // namespace weft::transport::mesh
