// SPDX-License-Identifier: Apache-2.0
// The control messages of references. They are ordinary calls that are retried, and do no harm if
// they arrive twice.
#pragma once

#include <functional>
#include <memory>
#include <tuple>

#include <weft/base/make_error.h>
#include <weft/engine/call/calls.h>
#include <weft/engine/call/directory.h>
#include <weft/engine/rref/references.h>

namespace weft::rref {

namespace internal {

// To the owner, from a worker that another worker has given a reference.
void fork(Id id, ForkId fork);
// To the worker that gave a reference: the owner knows the child.
void child_accepted(ForkId child);
// To the owner: a fork has ended.
void user_delete(Id id, ForkId fork);
// To the owner: a value that another worker was to send will not come.
void will_not_come(Id id, call::Outcome why);
// From a worker that sent references which may have been lost with a connection: the receiver ends
// those that it does not have.
void give_back(std::vector<std::pair<Id, ForkId>> owned, std::vector<ForkId> children);
// From the caller of that call: it could not read the reply.
void take_back_reply(std::uint64_t call);

}  // namespace internal

constexpr int kRetries = 5;
constexpr auto kFirstPause = std::chrono::milliseconds(20);  // tripled after each attempt
constexpr auto kControlLimit = std::chrono::seconds(2);      // for one attempt
constexpr int kTriesUntilOverdue = 3;  // failed attempts; some 6 s if nobody answers

constexpr auto kPatience = std::chrono::minutes(5);
constexpr auto kPatientPause = std::chrono::seconds(5);

struct ControlOptions {
  bool on_loop = true;  // the function is short and runs on the event loop
  // Called once: after kTriesUntilOverdue failed attempts, which go on, or when the worker is gone.
  std::function<void()> overdue;
  // For a message without which something would be kept for ever. After the retries it is sent
  // again and again for kPatience, but nobody waits for that. A worker that answers again gets it
  // at the latest after this pause and one attempt.
  bool keeps_on = false;
  std::chrono::milliseconds patient_pause = kPatientPause;
};

namespace detail {

// One message and its attempts.
template <auto F>
class Attempts : public std::enable_shared_from_this<Attempts<F>> {
 public:
  using Arguments = typename call::detail::FunctionBody<F>::Arguments;
  Attempts(std::shared_ptr<call::AgentCore> core, const call::Recipient& to, rpc::MessageKind kind,
           Arguments arguments, ControlOptions options)
      : core_(std::move(core)),
        to_(to),
        kind_(kind),
        arguments_(std::move(arguments)),
        options_(std::move(options)),
        promise_(call::detail::CoreCalls::executor(*core_)) {
    call::detail::CoreCalls::hold_activity(*core_, +1);
  }
  ~Attempts() {
    be_patient();
    if (depends_on_it_) call::detail::CoreCalls::depend_on(*core_, to_.rank, -1);
  }
  Attempts(const Attempts&) = delete;
  Attempts& operator=(const Attempts&) = delete;

  Future<void> future() const { return promise_.future(); }
  void start() {
    call::detail::CoreCalls::off_loop(*core_, to_,
                                      Task([self = this->shared_from_this()] { self->send(); }));
  }

 private:
  void send() {
    try {
      auto sent = call::issue<call::detail::FunctionBody<F>>(
          core_, {to_, kControlLimit, kind_, options_.on_loop}, arguments_);
      sent.on_done_light([self = this->shared_from_this()](const Future<void>& ended) {
        self->ended(ended.error());
      });
    } catch (...) {
      ended(std::current_exception());
    }
  }
  void ended(const std::exception_ptr& error) {
    if (!error) {
      call::detail::CoreCalls::heard_from(*core_, to_.rank);
      return promise_.set();
    }
    const bool is_gone = call::is_not_there(error) || does_not_answer_probes(error);
    const bool is_overdue =
        ++tries_ == kTriesUntilOverdue || (is_gone && tries_ < kTriesUntilOverdue);
    if (is_overdue && options_.overdue) options_.overdue();
    const int most =
        kRetries + (options_.keeps_on ? static_cast<int>(kPatience / options_.patient_pause) : 0);
    if (is_gone || tries_ > most || call::detail::CoreCalls::closed(*core_))
      return promise_.set_error(error);
    if (tries_ > kRetries) {
      be_patient();
      pause_ = options_.patient_pause;
    }
    call::detail::CoreCalls::after(*core_, pause_,
                                   Task([self = this->shared_from_this()] { self->start(); }));
    pause_ *= 3;
  }
  // True if the worker has not answered a liveness probe, so that it need not be told. The first
  // failure starts such a probe.
  bool does_not_answer_probes(const std::exception_ptr& error) {
    if (!ends_connection(to_error(error, Blame::Remote).blame())) return false;
    if (call::detail::CoreCalls::is_lost(*core_, to_.rank)) return true;
    if (!std::exchange(depends_on_it_, true))
      call::detail::CoreCalls::depend_on(*core_, to_.rank, +1);
    call::detail::CoreCalls::look_after(*core_, to_.rank);
    return false;
  }
  // From here on a graceful shutdown does not wait for this message.
  void be_patient() {
    if (std::exchange(is_awaited_, false)) call::detail::CoreCalls::hold_activity(*core_, -1);
  }

  const std::shared_ptr<call::AgentCore> core_;
  const call::Recipient to_;
  const rpc::MessageKind kind_;
  const Arguments arguments_;
  const ControlOptions options_;
  Promise<void> promise_;
  int tries_ = 0;
  bool is_awaited_ = true;
  bool depends_on_it_ = false;
  std::chrono::milliseconds pause_ = kFirstPause;
};

}  // namespace detail

// Sends the message until it is answered. The future is done then; it fails if all attempts have
// failed, if the worker did not answer a liveness probe, or if it has left.
template <auto F>
Future<void> control(const std::shared_ptr<call::AgentCore>& core, const call::Recipient& to,
                     rpc::MessageKind kind,
                     typename call::detail::FunctionBody<F>::Arguments arguments,
                     ControlOptions options = {}) {
  auto attempts = std::make_shared<detail::Attempts<F>>(core, to, kind, std::move(arguments),
                                                        std::move(options));
  auto future = attempts->future();
  attempts->start();
  return future;
}

}  // namespace weft::rref
