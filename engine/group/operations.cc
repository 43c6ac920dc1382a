// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <span>

#include <weft/base/config.h>
#include <weft/base/log.h>
#include <weft/base/make_error.h>
#include <weft/engine/group/called_by.h>
#include <weft/engine/group/core.h>
#include <weft/engine/group/operations.h>
#include <weft/engine/group/work_state.h>
#include <weft/engine/tensor/tensor.h>
#include <weft/profiling/trace/dump.h>

namespace weft::group {

namespace {

// The bytes are those of all tensors that this rank gives an operation, sent and received; dtype
// and shape are the first one's.
trace::About about(const char* name, std::uint64_t number, const c10::Device& device,
                   std::span<const at::Tensor> tensors) {
  trace::About about{
      .name = name, .sequence = number, .device = device.is_cpu() ? -1 : device.index()};
  if (tensors.empty()) return about;
  for (const at::Tensor& tensor : tensors) about.bytes += tensor.nbytes();
  const at::Tensor& first = tensors.front();
  about.dtype = weft::name(tensor::dtype_of(first.scalar_type())).data();  // a literal
  about.shape = {first.sizes().data(), first.sizes().size()};
  return about;
}

void end(trace::Operation& traced, const std::optional<Error>& error) {
  if (error) {
    traced.fail(*error);
  } else {
    traced.end();
  }
}

// Called before a tensor is written. If autograd has saved it, its backward then fails with
// libtorch's own error ("modified by an inplace operation") instead of computing with the new
// values.
void raise_version(const at::Tensor& tensor) {
  if (!tensor.is_inference()) tensor.unsafeGetTensorImpl()->bump_version();
}

// Warns once a process if a backward passes through a tensor that a collective has overwritten:
// autograd does not see the collective, so the gradients are those of this rank's part alone.
// Reducing a loss for a report, after its backward or detached, is fine.
void warn_of_backward_through(const at::Tensor& tensor, const Wait& call) {
  static std::atomic<bool> said{false};
  if (said || !tensor.requires_grad() || tensor.is_leaf()) return;
  tensor.register_hook([call](const at::Tensor&) {
    if (said.exchange(true)) return;
    log::warn("a backward passes through a tensor that " + call.what() +
              " has overwritten, which autograd does not see: the gradients are those of this "
              "rank's part alone. Call weft::functional::all_reduce (or its like) if other ranks "
              "should get gradients, or pass tensor.detach().clone() to the collective if the "
              "program only reads its result");
  });
}

}  // namespace

struct Operations::Message {
  int peer = -1;
  int tag = 0;
  bool is_send = false;
  // Its number for the comparison of WEFT_DEBUG=detail; null if that compares nothing.
  std::shared_ptr<std::uint64_t> counted;
  Op transfer = {};  // the backend's part, without that comparison
};

Operations::Operations(Core& core)
    : core_(core),
      options_(core.options),
      member_(core.member),
      ledger_(core.ledger),
      failure_(core.failure),
      carriers_(core.carriers),
      joining_(core.joining),
      comparison_(core.options, *core.bootstrap, core.failure, message_numbers_, core) {}

void Operations::throw_if_refused() {
  throw_if_left();
  failure_.throw_if_failed();
}

void Operations::throw_if_left() const {
  if (has_left_) {
    throw Error(Blame::Caller,
                "this rank has left " + options_.self() + " by leave(); make another group");
  }
}

std::shared_ptr<WorkState> Operations::new_state(const c10::Device& device, bool host_waits) const {
  auto state = std::make_shared<WorkState>();
  state->core = core_.handle.lock();
  state->device = device;
  state->host_waits = host_waits;
  return state;
}

// --- Collectives ---

Work Operations::issue(Operation operation, const Call& call) {
  throw_if_refused();
  if (operation.host_waits) {
    options_.job->devices->refuse_capture(operation.device, operation.name,
                                          "the host waits for it");
  }
  auto state = new_state(operation.device, operation.host_waits || operation.device.is_cpu());
  MutexLock lock(mutex_);
  throw_if_left();  // leave() may have been called while this thread waited for the mutex
  transport::Communicator& communicator = joining_.communicator(operation.device);
  state->backend = communicator.backend();
  const auto number = begin_collective(operation);
  state->wait = unfinished_.last();
  auto traced = record(operation, number);
  try {
    start(operation, number, call, communicator, *state);
  } catch (...) {
    const Error why = to_error(std::current_exception(), Blame::PeerLost);
    traced.fail(why);
    trace::dump_after(options_.place(), why);
    ledger_->complete_collective(number);  // otherwise leaving would wait for it
    throw;
  }
  if (operation.on_all) {  // all ranks have made these by now, or none has
    for (const auto& other : carriers_.communicators()) {
      if (other.get() != &communicator) state->ops.push_back(other->barrier({}));
    }
  }
  const auto is_over = [](const Op& op) { return op.ended() && !op.error(); };
  if (std::all_of(state->ops.begin(), state->ops.end(), is_over)) {  // or there was nothing to do
    ledger_->complete_collective(number);
    traced.end();
  } else {
    follow_collective(*state, number, traced);
  }
  return Work(std::move(state));
}

// Throws the ledger's error, with the name of the operation that cannot begin.
std::uint64_t Operations::begin_collective(const Operation& operation) {
  std::uint64_t number = 0;
  try {
    number = ledger_->begin_collective();
  } catch (const Error& error) {
    throw error.within(called_as(operation.name, CalledBy::name()));
  }
  recent_calls_.remember(operation, number);
  unfinished_.begin({.name = operation.name,
                     .called_by = CalledBy::name(),
                     .since = coarse_now(),
                     .collective = number});
  return number;
}

trace::Operation Operations::record(const Operation& operation, std::uint64_t number) const {
  auto shown = about(operation.name, number, operation.device, operation.tensors);
  shown.peer = operation.root;
  if (operation.reduction) shown.reduction = weft::name(*operation.reduction).data();  // a literal
  return trace::Operation::begin(member_, trace::Kind::Collective, shown);
}

// Moves the operation's tensors into the Ops that it appends to `state`. Appends none if no rank
// has anything to send.
void Operations::start(Operation& operation, std::uint64_t number, const Call& call,
                       transport::Communicator& communicator, WorkState& state) {
  if (config().debug == DebugLevel::Detail) comparison_.compare(operation, number);
  const auto is_empty = [](const at::Tensor& tensor) { return tensor.numel() == 0; };
  const bool skip = operation.may_skip && !communicator.compares_calls() &&
                    !operation.tensors.empty() &&
                    std::all_of(operation.tensors.begin(), operation.tensors.end(), is_empty);
  if (skip) return;
  if (operation.prepare) operation.prepare();
  const Fence ready = operation.begins_after.source()
                          ? operation.begins_after
                          : options_.job->devices->ready(operation.device);
  state.is_captured = tensor::CudaDevices::is_captured(ready);
  for (const at::Tensor& tensor : operation.writes) {
    raise_version(tensor);
    warn_of_backward_through(tensor, state.wait);
  }
  call(communicator, tensor::pin(std::move(operation.tensors)), ready, state.ops);
}

void Operations::follow_collective(const WorkState& state, std::uint64_t number,
                                   trace::Operation traced) {
  // The last of several Ops ends the collective; if any fail, with the first error.
  struct Ends {
    explicit Ends(std::size_t operations) : left(operations) {}
    std::atomic<std::size_t> left;
    std::atomic<bool> failed{false};
  };
  auto ends = std::make_shared<Ends>(state.ops.size());
  for (const Op& op : state.ops) {
    unfinished_.add({state.wait, op});
    follow(state.wait, op,
           [ends, ledger = ledger_, number, traced](const std::optional<Error>& error) mutable {
             if (error && !ends->failed.exchange(true)) traced.fail(*error);
             if (--ends->left > 0) return;
             ledger->complete_collective(number);
             if (!ends->failed) traced.end();
           });
  }
}

// --- Messages ---

Work Operations::issue_message(const at::Tensor& tensor, int peer, bool is_send, int tag,
                               const MessageCall& call) {
  throw_if_refused();
  auto state = new_state(tensor.device(), tensor.device().is_cpu());
  MutexLock lock(mutex_);
  throw_if_left();  // as in issue()
  transport::Communicator& communicator = joining_.communicator(tensor.device());
  unfinished_.begin(
      {.name = is_send ? "send to" : "recv from", .since = coarse_now(), .peer = peer});
  state->wait = unfinished_.last();
  state->backend = communicator.backend();
  transport::PointToPoint& messages = messages_of(communicator, peer, tag);
  const Fence ready = options_.job->devices->ready(tensor.device());
  auto pin = tensor::pin(tensor);
  Message message{.peer = peer, .tag = tag, .is_send = is_send};
  begin_message(message, tensor);
  // From here on nothing throws: leaving waits for operations that have begun.
  const bool from_any = peer == transport::kAnySource;
  const std::uint64_t number = from_any ? 0 : message_numbers_.next(is_send, peer, tag);
  auto shown = about(is_send ? "send" : "recv", number, tensor.device(), {&tensor, 1});
  shown.peer = peer;
  shown.tag = tag;
  auto traced =
      trace::Operation::begin(member_, is_send ? trace::Kind::Send : trace::Kind::Receive, shown);
  state->is_captured = tensor::CudaDevices::is_captured(ready);
  Op op = message.transfer = call(messages, std::move(pin), ready);
  if (config().debug == DebugLevel::Detail && !communicator.compares_calls() && tensor.is_cpu()) {
    message.counted = std::make_shared<std::uint64_t>(number);
    op = comparison_.compare(op, {state->wait.what(), tensor, is_send, peer, tag, message.counted});
  }
  state->ops.push_back(op);
  unfinished_.add({state->wait, op, /*receives=*/!is_send});
  follow_message(state->wait, op, message, traced);
  return Work(std::move(state));
}

// Throws Unsupported if the backend cannot carry such a message.
transport::PointToPoint& Operations::messages_of(transport::Communicator& communicator, int peer,
                                                 int tag) const {
  transport::PointToPoint* const messages = communicator.point_to_point();
  const auto need = [&](bool present, const std::string& what) WEFT_REQUIRES(mutex_) {
    if (present) return;
    throw Error(Blame::Unsupported, unfinished_.last().what() + " " + options_.place() +
                                        ": backend '" + std::string(communicator.backend()) + "' " +
                                        what);
  };
  need(messages != nullptr, "has no send and recv");
  need(tag == 0 || messages->has_tags(), "has no tags; leave the tag 0");
  need(peer != transport::kAnySource || messages->has_any_source(),
       "needs to know the source; name the rank");
  return *messages;
}

void Operations::begin_message(const Message& message, const at::Tensor& tensor) {
  if (message.is_send) {
    ledger_->begin_send(message.peer);
  } else {
    raise_version(tensor);
    ledger_->begin_recv(message.peer);
  }
}

void Operations::follow_message(const Wait& wait, const Op& op, const Message& message,
                                trace::Operation traced) {
  follow(wait, op,
         [this, weak = core_.weak_from_this(), ledger = ledger_, op, message,
          traced](const std::optional<Error>& failure) mutable {
           const auto core = weak.lock();
           const auto [peer, tag, is_send, counted, transfer] = message;
           const int source = op.source_rank();
           if (peer == transport::kAnySource && !failure && core) {
             traced.end(source, counted ? *counted : message_numbers_.next(false, source, tag));
           } else {
             end(traced, failure);
           }
           if (is_send) {
             // If only the comparison has failed, the other rank has the bytes and counts them.
             if (failure && transfer.error()) ledger->fail_send(peer);
             return;
           }
           // If the recv named its source, the backend may leave it out on success. A recv that
           // failed because of the message's size has taken that message too.
           ledger->complete_recv(peer, failure || source >= 0 ? source : peer);
           const auto error = ledger->left_behind();
           if (core && error) failure_.fail(*error);
         });
}

// --- Until an operation ends ---

// Calls `done` when the operation has ended.
void Operations::follow(const Wait& wait, const Op& op,
                        std::function<void(const std::optional<Error>&)> done) {
  op.on_ended([this, weak = core_.weak_from_this(), wait, op, finish = std::move(done)]() mutable {
    const auto error = op.error();
    finish(error);
    const auto core = weak.lock();
    if (core && error && failure_.breaks_group(wait, *error))
      failure_.fail(named(*error, wait.what(), /*place=*/false));
  });
}

Work Operations::limited(Work work, std::chrono::milliseconds limit) {
  const auto state = work.state_;
  if (!state || state->is_captured || state->done()) return work;
  const auto ops = std::make_shared<const std::vector<Op>>(state->ops);
  // Owned by the operation, which goes on if its Work is dropped.
  const auto timer = std::make_shared<EventLoop::Registration>();
  *timer = options_.job->loop->at(
      Deadline::in(limit), [this, weak = core_.weak_from_this(), ops, limit, wait = state->wait] {
        const auto core = weak.lock();
        const bool is_over =
            std::all_of(ops->begin(), ops->end(), [](const Op& op) { return op.done().query(); });
        if (!core || is_over) return;
        const std::string text = ": not all ranks took part within " + describe(limit) +
                                 ", the limit of with_timeout(), and the group is broken";
        failure_.fail(Error(Blame::Timeout, wait.what() + text));
      });
  const auto left = std::make_shared<std::atomic<std::size_t>>(ops->size());
  for (const Op& op : *ops) {
    op.on_ended([left, timer] {
      if (--*left == 0) timer->reset();
    });
  }
  return work;
}

// The job's Waits go on reporting operations that have not ended.
std::string Operations::wait_for_all(Deadline deadline) {
  std::vector<Unfinished::Issued> issued;
  {
    // Other threads may be issuing; from now on they are refused.
    MutexLock lock(mutex_);
    issued = unfinished_.issued();
  }
  for (const auto& one : issued) {
    if (!one.receives && !one.op.done().synchronize(deadline)) return one.wait.what();
  }
  return "";
}

// The analysis does not know try_to_lock.
WEFT_UNCHECKED_LOCKING std::vector<Wait> Operations::pending() {
  std::unique_lock lock(mutex_, std::try_to_lock);
  return lock ? unfinished_.waits() : std::vector<Wait>();
}

// Like pending().
WEFT_UNCHECKED_LOCKING Progress Operations::progress() {
  const std::uint64_t begun = ledger_->collectives_begun();
  std::unique_lock lock(mutex_, std::try_to_lock);
  if (!lock) return {begun, "a call of this group that has not returned"};
  return {begun, unfinished_.last_text(begun)};
}

}  // namespace weft::group
