// SPDX-License-Identifier: Apache-2.0
// The state of one communicator: its connections and the operations that use them. Calls come from
// any thread, arrivals from the event loop. Each becomes an event. Events are handled one at a
// time, by the thread that posts one while no other thread is handling events. So a call starts its
// operation at once on the calling thread, and no lock is held while connections are called. An
// operation that ends before its call returns, because all that it needs has already arrived,
// allocates no memory.
//
// An operation that fails breaks the communicator: all pending and later operations end with the
// same error, the peers are told, and the connections are closed. (Wrong arguments that only this
// rank can detect fail only their own operation.)
#pragma once

#include <atomic>
#include <functional>

#include <weft/base/log.h>
#include <weft/base/make_error.h>
#include <weft/base/mutex.h>
#include <weft/transport/mesh/choose.h>
#include <weft/transport/mesh/closings.h>
#include <weft/transport/mesh/collectives.h>
#include <weft/transport/mesh/events.h>
#include <weft/transport/mesh/layout.h>
#include <weft/transport/mesh/messages.h>
#include <weft/transport/mesh/openings.h>
#include <weft/transport/transport.h>

namespace weft::transport::mesh {

class Core final : public std::enable_shared_from_this<Core> {
 public:
  // Without `openings` the connections are those of the Adopted events.
  Core(const JoinOptions& options, std::string backend, Chooser chooser = choose,
       std::shared_ptr<Openings> openings = nullptr, Layout layout = {});

  const int rank;
  const int ranks;
  const std::string backend;
  const std::string place;  // "on group 'x' (shm, rank 0 of 2)"
  const std::chrono::milliseconds timeout;
  const std::shared_ptr<EventLoop> loop;
  const Chooser chooser;
  const Layout layout;

  // Handles the event now, or queues it for the thread that is handling events. Thread-safe.
  template <class One>
  void post(One event) noexcept;
  // Issues a collective: `fill` describes it in an Operation, which may be a reused one.
  // Thread-safe.
  template <class Fill>
  Op call(const Fill& fill) noexcept;
  std::shared_ptr<HostFlag> flag() const;
  // True once fail() has been called. Thread-safe.
  bool has_failed() const noexcept { return has_failed_.load(std::memory_order_acquire); }
  // The transport that leads to a peer. Thread-safe.
  std::string transport_to(int peer) const;
  // May be null.
  const std::shared_ptr<Openings>& openings() const { return openings_; }
  // Called by the handlers of a connection.
  void arrived(int peer, Traffic traffic, const Arrival& arrival) noexcept;

  // The functions below may be called only while an event is handled.

  // Opens a connection that will be needed, unless it is open.
  void expect(int peer, Traffic traffic, Openings::When when) noexcept;
  // The message waits until its connection is open, see expect().
  Op send(int peer, Traffic traffic, const Header& header, const Slice& payload, Pin pin) noexcept;
  Op accept(int peer, Traffic traffic, const Slice& destination, Pin pin) noexcept;
  Op discard(int peer, Traffic traffic) noexcept;
  // Returns true if the Op has already ended without an error. Otherwise posts the event, with the
  // Op's error if it has one, once the Op has ended.
  template <class Ended>
  bool ended(const Op& op, Ended event);

  // Breaks the communicator: when the present event has been handled, all operations fail. Callers
  // return as soon as they can.
  void fail(const Error& why);
  bool is_broken() const { return broken_.has_value(); }
  // The error that ends an operation that cannot go on. Requires is_broken().
  const Error& why_broken() const { return *broken_; }
  // Why the peer is lost; empty if it is not.
  const std::optional<Error>& lost(int peer) const {
    return peers_[static_cast<std::size_t>(peer)].lost;
  }
  // Checks all deadlines when this one passes, unless the timer runs already.
  void watch(Deadline deadline);
  // Keeps the Operation for reuse, unless something else still refers to it.
  void keep(std::shared_ptr<Operation> operation);

  Scratch scratch;

  // Sets the peers that operations need over such a connection, and clears the others.
  void mark_busy(Traffic traffic, std::vector<bool>& busy) const;

 private:
  friend class Closings;
  // A message whose connection is not open yet, or about to end.
  struct Unsent {
    EncodedHeader header;
    Slice payload;
    Pin pin;
    Completion completion;
  };
  struct Peer {
    std::shared_ptr<Connection> connections[kConnectionsPerPair];
    bool expected[kConnectionsPerPair] = {};
    std::vector<Unsent> unsent[kConnectionsPerPair];
    std::optional<Traffic> ended;  // the first connection that ended
    EventLoop::Registration grace;
    std::optional<Error> lost;
  };
  Connection* connection_of(int peer, Traffic traffic) const {
    return peers_[static_cast<std::size_t>(peer)]
        .connections[static_cast<std::size_t>(traffic)]
        .get();
  }

  // At most one thread handles events. enter() returns true if the calling thread does from now on;
  // leave() handles the events that have been queued meanwhile.
  bool enter() noexcept;
  void leave() noexcept;
  // Queues the event for the thread that is handling events; if there is none, this thread handles
  // it.
  void queue(Event event) noexcept;
  template <class One>
  void handle(One& event) noexcept;
  std::shared_ptr<Operation> fresh_operation();
  void on(event::Adopted& event);
  void on(event::Unreachable& event);
  void on(event::Arrived& event);
  void on(event::Closed& event);
  void on(event::Called& event) { collectives_.call(std::move(event.operation)); }
  void on(event::Ready&) { collectives_.advance(); }
  void on(event::StepEnded& event) { collectives_.step_ended(event); }
  void on(event::Posted& event) { messages_.post(std::move(event.transfer), event.is_ready); }
  void on(event::TransferEnded& event) { messages_.ended(event); }
  void on(event::Landed& event) { messages_.landed(event); }
  void on(event::Failed& event);
  void on(event::Told& event);
  void on(event::Tick&);
  void on(event::Look&) { closings_.look(); }
  void on(event::Asked& event);
  void heard_failure(int peer, const Message& message);
  // Ends all operations with the error that broke the communicator.
  void bury() noexcept;
  // Closes the connections that still write into a failed operation's memory, and ends that
  // operation.
  void let_go() noexcept;
  void tell(int peer, Traffic traffic) noexcept;
  void close(int peer) noexcept;
  void drop_unsent(int peer) noexcept;
  void send_unsent(int peer, Traffic traffic);
  // A connection is about to end by agreement; stays after all; has ended.
  void leave(int peer, Traffic traffic) noexcept;
  void stay(int peer, Traffic traffic);
  void part(int peer, Traffic traffic);

  const std::shared_ptr<Openings> openings_;  // may be null
  std::vector<Peer> peers_;
  Collectives collectives_{*this};
  Messages messages_{*this};
  Closings closings_;
  std::optional<Error> broken_;
  std::atomic<bool> has_failed_{false};  // as broken_, for all threads
  bool buried_ = false;
  bool silent_ = false;    // peers are not told why the communicator broke
  int told_by_ = -1;       // the peer that reported the failure, which needs no report
  bool watching_ = false;  // the timer runs
  EventLoop::Registration timer_;

  std::vector<std::shared_ptr<Operation>> idle_;

  enum class Turn : std::uint8_t { Free, Taken, Wanted };  // Wanted: taken, and an event is queued
  std::atomic<Turn> turn_{Turn::Free};
  Mutex mutex_;                                         // also held while turn_ is set to Wanted
  std::vector<Event> waiting_ WEFT_GUARDED_BY(mutex_);  // empty unless turn_ is Wanted
  std::vector<Event> batch_;                            // the handling thread's; guarded by turn_
};

template <class One>
void Core::post(One event) noexcept {
  if (!enter()) return queue(std::move(event));
  const auto self = shared_from_this();  // the event may drop the last reference
  handle(event);
  leave();
}

template <class Fill>
Op Core::call(const Fill& fill) noexcept {
  if (!enter()) {
    auto operation = std::make_shared<Operation>();
    fill(*operation);
    operation->completion.emplace(Pin(), flag());
    const Op op = operation->completion->op();
    queue(event::Called{std::move(operation)});
    return op;
  }
  const auto self = shared_from_this();
  auto operation = fresh_operation();
  fill(*operation);
  event::Called called{operation};
  handle(called);
  Op op;
  if (!operation->is_over) {
    operation->completion.emplace(Pin(), flag());
    op = operation->completion->op();
  } else if (operation->error) {
    op = Op::failed(*operation->error);
  } else {
    keep(std::move(operation));
  }
  leave();
  return op;
}

template <class One>
void Core::handle(One& event) noexcept {
  try {
    on(event);
    closings_.notice();
  } catch (...) {
    // Out of memory, or a slice is not aligned for its elements.
    fail(to_error(std::current_exception(), Blame::Busy));
  }
  if (broken_ && !buried_) bury();
}

template <class Ended>
bool Core::ended(const Op& op, Ended event) {
  if (op.ended()) {
    event.error = op.error();
    if (!event.error) return true;
    post(std::move(event));
    return false;
  }
  op.on_ended([core = shared_from_this(), op, event = std::move(event)]() mutable {
    event.error = op.error();
    core->post(std::move(event));
  });
  return false;
}

}  // namespace weft::transport::mesh
