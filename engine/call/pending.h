// The calls of one agent that wait for their replies.
#pragma once

#include <cstdint>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <unordered_map>
#include <vector>

#include <weft/base/deadline.h>
#include <weft/base/event_loop.h>
#include <weft/engine/call/function.h>
#include <weft/engine/call/in_flight.h>
#include <weft/engine/call/types.h>
#include <weft/engine/codec/stream.h>
#include <weft/engine/future/future.h>
#include <weft/profiling/trace/depth.h>
#include <weft/profiling/trace/operation.h>

namespace weft::rpc {

class CallContext;
struct CallState;
class SentReferences;

// Who waits for one reply. Completed once.
class PendingCall {
 public:
  PendingCall() = default;
  PendingCall(const PendingCall&) = delete;
  PendingCall& operator=(const PendingCall&) = delete;
  virtual ~PendingCall() = default;
  // `work` gives what is enqueued for the result once that has been decoded. Throws what decoding
  // throws; then fail() is called.
  virtual void succeed(const msgpack::object& result,
                       const std::function<weft::detail::DeviceWorkRef()>& work) = 0;
  virtual void fail(std::exception_ptr error) = 0;
  // What threads wait for in Executor::drive() that block on its result.
  virtual const void* awaited() const { return nullptr; }
};

template <class R>
class PendingResult final : public PendingCall {
 public:
  explicit PendingResult(Promise<R> promise) : promise_(std::move(promise)) {}
  void succeed(const msgpack::object& result,
               const std::function<weft::detail::DeviceWorkRef()>& work) override {
    auto value = detail::unpack_result<R>(result);
    if (promise_.future().done())
      return;  // it comes too late, and is read for the references in it to end
    set(std::move(value), work());
  }
  void fail(std::exception_ptr error) override { promise_.set_error(std::move(error)); }
  const void* awaited() const override { return promise_.future().awaited(); }
  void set(weft::detail::Stored<R> value, weft::detail::DeviceWorkRef work) {
    promise_.set_with(std::move(work), std::move(value));
  }

 private:
  Promise<R> promise_;
};

struct WaitingCall {
  Deadline::Clock::time_point since;
  std::unique_ptr<PendingCall> pending;
  Deadline deadline = Deadline::never();
  std::chrono::milliseconds limit{0};  // as it was given, for the message
  const Function* function = nullptr;
  int to = -1;             // the callee's rank
  std::uint64_t lane = 0;  // which of its connections, one after the other
  MessageKind kind = MessageKind::Call;
  std::shared_ptr<CallContext> context;  // that it was made in
  std::shared_ptr<SentReferences>
      references;  // the references in it; ended where the callee has not read them
  std::shared_ptr<CallState> here;  // where it runs on this worker itself
  trace::Operation traced{};
  trace::Waiting in_flight{};
  std::string note{};  // why it waits, as the callee has said
  Slot slot{};
  HeldBytes bytes{};  // until there is an answer, also of a call whose time is over: they lie at
                      // the callee as long
};

// A call for which a thread waits.
struct AwaitedCall {
  std::uint64_t id = 0;
  std::string what;  // the function
  int to = -1;
  std::chrono::milliseconds limit{0};
  std::shared_ptr<const CallState> here;  // of one to this worker itself
  Deadline::Clock::time_point since;      // when the thread began to wait
  bool is_fetch = false;                  // of an RRef's value
  bool is_its_own =
      true;  // false: the thread waits for another future, and this call is pending for longest
};

// Usable from every thread.
class PendingCalls {
 public:
  void add(std::uint64_t id, WaitingCall call);
  // The call, which is this caller's to complete from now on; without `pending` if it is gone.
  WaitingCall take(std::uint64_t id);
  // The same; gone as well if it did not go to that worker by that connection.
  WaitingCall take_of(std::uint64_t id, int rank, std::uint64_t lane);
  // Notes that of a call that goes to that worker and waits yet.
  void note(std::uint64_t id, int rank, std::string why);
  struct Taken {
    std::uint64_t id = 0;
    WaitingCall call;
  };
  // All that went to a worker, over one of its connections where `lane` is not 0.
  std::vector<Taken> take_all_to(int rank, std::uint64_t lane);
  std::vector<Taken> take_all();
  // Those whose time is over. `next` becomes the earliest deadline of the others.
  std::vector<Taken> take_expired(Deadline::Clock::time_point now, Deadline& next);
  // Of the calls that these threads wait for that of the longest wait. Where none of them waits for
  // a call's own result, the oldest call.
  std::optional<AwaitedCall> longest_awaited(const std::vector<EventLoop::Wait>& waiting) const;
  bool waits(std::uint64_t id) const;
  std::size_t size() const;

 private:
  template <class F>
  WaitingCall take_where(std::uint64_t id, F wanted);
  template <class F>
  std::vector<Taken> take_if(F wanted);
  mutable std::mutex mutex_;
  std::unordered_map<std::uint64_t, WaitingCall> calls_;
};

}  // namespace weft::rpc
