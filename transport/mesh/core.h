// The state of one communicator: its lanes, and what is under way on them. Calls come from any
// thread, arrivals from the loop; each becomes an event, and events are handled one at a time, by
// the thread that brings one while nobody is at it. So a call starts its operation at once on the
// calling thread, and no lock is held while connections are called. What ends before its call
// returns, as where all that it needs has come already, costs no allocation.
//
// An operation that fails breaks the communicator: everything pending and later ends with the same
// error, the peers are told, and the lanes are closed. (Wrong arguments that only this rank knows
// of fail their own operation.)
#pragma once

#include <atomic>
#include <functional>
#include <mutex>

#include <weft/base/log.h>
#include <weft/transport/mesh/choose.h>
#include <weft/transport/mesh/collectives.h>
#include <weft/transport/mesh/events.h>
#include <weft/transport/mesh/messages.h>
#include <weft/transport/transport.h>

namespace weft::transport::mesh {

class Core final : public std::enable_shared_from_this<Core> {
 public:
  Core(const JoinOptions& options, std::string backend, Chooser chooser = choose);

  const int rank;
  const int ranks;
  const std::string backend;
  const std::string place;  // "on group 'x' (shm, rank 0 of 2)"
  const std::chrono::milliseconds timeout;
  const std::shared_ptr<EventLoop> loop;
  const Chooser chooser;

  // For every thread.
  template <class One>
  void post(One event) noexcept;
  // `fill` writes the call down in an Operation, which may have the memory of an earlier one.
  template <class Fill>
  Op call(const Fill& fill) noexcept;
  std::shared_ptr<HostFlag> flag() const;
  // For the handlers of a lane.
  void arrived(int peer, Lane lane, const Arrival& arrival) noexcept;

  // What follows is for those who handle an event.

  Op send(int peer, Lane lane, const Header& header, const Slice& payload, Pin pin) noexcept;
  Op accept(int peer, Lane lane, const Slice& destination, Pin pin) noexcept;
  Op discard(int peer, Lane lane) noexcept;
  // True when the Op has ended well already. Otherwise the event follows, with its error, once it
  // ends.
  template <class Ended>
  bool ended(const Op& op, Ended event);

  // Breaks the communicator once the event has been handled; callers return as soon as they can.
  void fail(const Error& why);
  bool is_broken() const { return broken_.has_value(); }
  // What an operation ends with that cannot go on.
  const Error& why_broken() const { return *broken_; }
  // Why the peer is gone, where it is.
  const std::optional<Error>& lost(int peer) const {
    return peers_[static_cast<std::size_t>(peer)].lost;
  }
  // Has the deadlines looked at then.
  void watch(Deadline deadline);
  // Keeps its memory for a later one, where nobody else has it.
  void keep(std::shared_ptr<Operation> operation);

  Scratch scratch;

 private:
  struct Peer {
    std::shared_ptr<Connection> lanes[kLanes];
    std::optional<Lane> ended;  // the first of its lanes that did
    EventLoop::Registration grace;
    std::optional<Error> lost;
  };
  Connection* lane(int peer, Lane lane) const {
    return peers_[static_cast<std::size_t>(peer)].lanes[static_cast<std::size_t>(lane)].get();
  }

  // Who handles events, one thread at most: enter() says whether it is this one from now on, and
  // leave() handles what has come meanwhile.
  bool enter() noexcept;
  void leave() noexcept;
  // The event waits for who handles, or makes this thread that.
  void queue(Event event) noexcept;
  template <class One>
  void handle(One& event) noexcept;
  std::shared_ptr<Operation> fresh_operation();
  void on(event::Adopted& event);
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
  void on(event::Asked& event);
  void heard_failure(int peer, const Message& message);
  // Ends everything with the error that broke the communicator.
  void bury() noexcept;
  // And what a lane still wrote to, if that has not ended by itself.
  void let_go() noexcept;
  void tell(int peer) noexcept;
  void close(int peer) noexcept;

  std::vector<Peer> peers_;
  Collectives collectives_{*this};
  Messages messages_{*this};
  std::optional<Error> broken_;
  bool buried_ = false;
  bool silent_ = false;    // no peer is told why
  int told_by_ = -1;       // who knows already
  bool watching_ = false;  // the timer runs
  EventLoop::Registration timer_;

  std::vector<std::shared_ptr<Operation>> idle_;

  enum class Turn : std::uint8_t { Free, Taken, Wanted };  // Wanted: taken, and an event waits
  std::atomic<Turn> turn_{Turn::Free};
  std::mutex mutex_;            // of what follows, and of who makes a turn Wanted
  std::vector<Event> waiting_;  // empty where it is not
  std::vector<Event> batch_;    // of the thread that handles
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
  } catch (...) {
    fail(to_error(std::current_exception(),
                  Blame::Busy));  // no memory, or memory that is not aligned for its elements
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
