// SPDX-License-Identifier: Apache-2.0
// The outgoing calls of one agent that wait for their replies. WaitingCall has 16 members: it
// records what the end of a call needs, whichever way the call ends, and it is moved as a whole.
#pragma once

#include <cstdint>
#include <exception>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <unordered_map>
#include <vector>

#include <weft/base/deadline.h>
#include <weft/base/event_loop.h>
#include <weft/base/mutex.h>
#include <weft/engine/call/function.h>
#include <weft/engine/call/in_flight.h>
#include <weft/engine/call/types.h>
#include <weft/engine/codec/stream.h>
#include <weft/engine/future/future.h>
#include <weft/profiling/trace/depth.h>
#include <weft/profiling/trace/operation.h>

namespace weft::call {

class CallContext;
struct CallState;
class SentReferences;

// Receives one reply. Completed once.
class PendingCall {
 public:
  PendingCall() = default;
  PendingCall(const PendingCall&) = delete;
  PendingCall& operator=(const PendingCall&) = delete;
  virtual ~PendingCall() = default;
  // `work` returns the work that is enqueued for the result, once the result is decoded. Throws the
  // errors of decoding; then fail() is called.
  virtual void succeed(const msgpack::object& result,
                       const std::function<weft::detail::DeviceWorkRef()>& work) = 0;
  virtual void fail(std::exception_ptr error) = 0;
  // The address that threads pass to Executor::drive() when they block on the result.
  virtual const void* awaited() const { return nullptr; }
};

template <class R>
class PendingResult final : public PendingCall {
 public:
  explicit PendingResult(Promise<R> promise) : promise_(std::move(promise)) {}
  void succeed(const msgpack::object& result,
               const std::function<weft::detail::DeviceWorkRef()>& work) override {
    auto value = detail::unpack_result<R>(result);
    // A late result is read only so that the references in it end.
    if (promise_.future().done()) return;
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
  std::chrono::milliseconds limit{0};  // as given, for the error's text
  const Function* function = nullptr;
  int to = -1;                          // the callee's rank
  std::uint64_t connection_number = 0;  // number of the connection that it went by
  MessageKind kind = MessageKind::Call;
  std::shared_ptr<CallContext> context;  // in which it was made
  // The references in the call. They end if the callee has not read them.
  std::shared_ptr<SentReferences> references;
  std::shared_ptr<CallState> here;  // set for a call to this worker itself
  trace::Operation traced{};
  trace::Waiting in_flight{};
  std::string note{};  // the callee's reason why it waits
  Slot slot{};
  // Held until there is an answer, even past the deadline, since the callee holds the bytes too.
  HeldBytes bytes{};
};

// A call for which a thread waits.
struct AwaitedCall {
  std::uint64_t id = 0;
  std::string what;  // the function
  int to = -1;
  std::chrono::milliseconds limit{0};
  std::shared_ptr<const CallState> here;  // set for a call to this worker itself
  Deadline::Clock::time_point since;      // when the thread began to wait
  bool is_fetch = false;                  // it fetches an RRef's value
  // False: the thread waits for another future, and this call has been pending for longest.
  bool is_its_own = true;
};

// Usable from every thread.
class PendingCalls {
 public:
  void add(std::uint64_t id, WaitingCall call);
  // Removes the call and returns it; the caller must complete it. `pending` is null if the call is
  // gone.
  WaitingCall take(std::uint64_t id);
  // The same, if the call went to that worker by that connection.
  WaitingCall take_of(std::uint64_t id, int rank, std::uint64_t connection_number);
  // Notes the reason why a call to that worker still waits.
  void note(std::uint64_t id, int rank, std::string why);
  struct Taken {
    std::uint64_t id = 0;
    WaitingCall call;
  };
  // All calls to a worker; only those over one of its connections if `connection_number` is not 0.
  std::vector<Taken> take_all_to(int rank, std::uint64_t connection_number);
  std::vector<Taken> take_all();
  // The calls whose time is over. `next` becomes the earliest deadline of the others.
  std::vector<Taken> take_expired(Deadline::Clock::time_point now, Deadline& next);
  // Of the calls that these threads wait for, the one with the longest wait. If no thread waits for
  // a call's own result, the oldest call.
  std::optional<AwaitedCall> longest_awaited(const std::vector<EventLoop::Wait>& waiting) const;
  bool waits(std::uint64_t id) const;
  std::size_t size() const;

 private:
  template <class F>
  WaitingCall take_where(std::uint64_t id, F wanted);
  template <class F>
  std::vector<Taken> take_if(F wanted);
  mutable Mutex mutex_;
  std::unordered_map<std::uint64_t, WaitingCall> calls_ WEFT_GUARDED_BY(mutex_);
};

}  // namespace weft::call
