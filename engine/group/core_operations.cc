#include <algorithm>
#include <span>
#include <sstream>
#include <string_view>

#include <weft/base/config.h>
#include <weft/base/log.h>
#include <weft/engine/group/called_by.h>
#include <weft/engine/group/core.h>
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
void warn_of_backward_through(const at::Tensor& tensor, const Waits::Wait& call) {
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

// --- Issuing ---

Work Core::issue(Operation operation, const Call& call) {
  throw_if_broken();
  if (operation.host_waits)
    options.job->devices->refuse_capture(operation.device, operation.name, "the host waits for it");
  auto state = std::make_shared<WorkState>();
  state->core = handle_.lock();
  state->device = operation.device;
  state->host_waits = operation.host_waits || operation.device.is_cpu();
  std::lock_guard lock(issue_mutex);
  transport::Communicator& carrier = joining.communicator(operation.device);
  state->backend = carrier.backend();
  const auto number = begin_collective(operation.name);
  remember_call(operation, number);
  last_ = {.name = operation.name,
           .called_by = CalledBy::name(),
           .since = coarse_now(),
           .collective = number};
  state->wait = last_;
  auto shown = about(operation.name, number, operation.device, operation.tensors);
  shown.peer = operation.root;
  if (operation.reduction) shown.reduction = weft::name(*operation.reduction).data();  // a literal
  auto traced = trace::Operation::begin(member, trace::Kind::Collective, shown);
  try {
    if (config().debug == DebugLevel::Detail) compare_across_ranks(operation, number);
    const auto is_empty = [](const at::Tensor& tensor) { return tensor.numel() == 0; };
    const bool skip = operation.may_skip && !carrier.compares_calls() &&
                      !operation.tensors.empty() &&
                      std::all_of(operation.tensors.begin(), operation.tensors.end(), is_empty);
    if (!skip) {
      if (operation.prepare) operation.prepare();
      const Fence ready = operation.begins_after.source()
                              ? operation.begins_after
                              : options.job->devices->ready(operation.device);
      state->is_captured = tensor::CudaDevices::is_captured(ready);
      for (const at::Tensor& tensor : operation.writes) {
        raise_version(tensor);
        warn_of_backward_through(tensor, state->wait);
      }
      call(carrier, tensor::pin(std::move(operation.tensors)), ready, state->ops);
    }
  } catch (...) {
    const Error why = to_error(std::current_exception(), Blame::PeerLost);
    traced.fail(why);
    trace::dump_after(options.place(), why);
    ledger->complete_collective(number);  // otherwise leaving would wait for it
    throw;
  }
  if (operation.on_all) {  // all ranks have made these by now, or none has
    for (const auto& other : carriers.communicators()) {
      if (other.get() != &carrier) state->ops.push_back(other->barrier({}));
    }
  }
  const auto is_over = [](const Op& op) { return op.ended() && !op.error(); };
  if (std::all_of(state->ops.begin(), state->ops.end(), is_over)) {  // or there was nothing to do
    ledger->complete_collective(number);
    traced.end();
    return Work(std::move(state));
  }
  // The last of several Ops ends the collective; if any fail, with the first error.
  struct Ends {
    explicit Ends(std::size_t operations) : left(operations) {}
    std::atomic<std::size_t> left;
    std::atomic<bool> failed{false};
  };
  auto ends = std::make_shared<Ends>(state->ops.size());
  for (const Op& op : state->ops) {
    remember({state->wait, op});
    follow(state->wait, op,
           [ends, ledger = ledger, number, traced](const std::optional<Error>& error) mutable {
             if (error && !ends->failed.exchange(true)) traced.fail(*error);
             if (--ends->left > 0) return;
             ledger->complete_collective(number);
             if (!ends->failed) traced.end();
           });
  }
  return Work(std::move(state));
}

// Throws the ledger's error, with the name of the operation that cannot begin.
std::uint64_t Core::begin_collective(const char* name) {
  try {
    return ledger->begin_collective();
  } catch (const Error& error) {
    throw error.within(called_as(name, CalledBy::name()));
  }
}

std::uint64_t Core::next_message(bool is_send, int peer, int tag) {
  std::lock_guard lock(numbers_mutex_);
  return ++(is_send ? sent_ : received_)[{peer, tag}];
}

Work Core::issue_message(const at::Tensor& tensor, int peer, bool is_send, int tag,
                         const MessageCall& call) {
  throw_if_broken();
  auto state = std::make_shared<WorkState>();
  state->core = handle_.lock();
  state->device = tensor.device();
  state->host_waits = tensor.device().is_cpu();
  std::lock_guard lock(issue_mutex);
  transport::Communicator& carrier = joining.communicator(tensor.device());
  last_ = {.name = is_send ? "send to" : "recv from", .since = coarse_now(), .peer = peer};
  state->wait = last_;
  state->backend = carrier.backend();
  transport::PointToPoint* messages = carrier.point_to_point();
  const auto need = [&](bool present, const std::string& what) {
    if (present) return;
    throw Error(Blame::Unsupported, last_.what() + " " + options.place() + ": backend '" +
                                        std::string(carrier.backend()) + "' " + what);
  };
  need(messages != nullptr, "has no send and recv");
  need(tag == 0 || messages->has_tags(), "has no tags; leave the tag 0");
  need(peer != transport::kAnySource || messages->has_any_source(),
       "needs to know the source; name the rank");
  const Fence ready = options.job->devices->ready(tensor.device());
  auto pin = tensor::pin(tensor);
  if (is_send) {
    ledger->begin_send(peer);
  } else {
    raise_version(tensor);
    ledger->begin_recv(peer);
  }
  // From here on nothing throws: leaving waits for operations that have begun.
  const bool from_any = peer == transport::kAnySource;
  const std::uint64_t number = from_any ? 0 : next_message(is_send, peer, tag);
  auto shown = about(is_send ? "send" : "recv", number, tensor.device(), {&tensor, 1});
  shown.peer = peer;
  shown.tag = tag;
  auto traced =
      trace::Operation::begin(member, is_send ? trace::Kind::Send : trace::Kind::Receive, shown);
  state->is_captured = tensor::CudaDevices::is_captured(ready);
  Op op = call(*messages, std::move(pin), ready);
  const bool compares =
      config().debug == DebugLevel::Detail && !carrier.compares_calls() && tensor.is_cpu();
  const auto counted = compares ? std::make_shared<std::uint64_t>(number) : nullptr;
  if (compares) op = compare_message(op, {last_.what(), tensor, is_send, peer, tag, counted});
  state->ops.push_back(op);
  remember({state->wait, op, /*receives=*/!is_send});
  follow(state->wait, op,
         [weak = weak_from_this(), ledger = ledger, op, peer, tag, is_send, counted,
          traced](const std::optional<Error>& failure) mutable {
           const auto core = weak.lock();
           const int source = op.source_rank();
           if (peer == transport::kAnySource && !failure && core) {
             traced.end(source, counted ? *counted : core->next_message(false, source, tag));
           } else {
             end(traced, failure);
           }
           if (is_send) {
             if (failure) ledger->fail_send(peer);
             return;
           }
           // If the recv named its source, the backend may leave it out on success. A recv that
           // failed because of the message's size has taken that message too.
           ledger->complete_recv(peer, failure || source >= 0 ? source : peer);
           const auto error = ledger->left_behind();
           if (core && error) core->failure.fail(*error);
         });
  return Work(std::move(state));
}

// Calls `done` when the operation has ended.
void Core::follow(const Waits::Wait& wait, const Op& op,
                  std::function<void(const std::optional<Error>&)> done) {
  op.on_ended([weak = weak_from_this(), wait, op, finish = std::move(done)]() mutable {
    const auto error = op.error();
    finish(error);
    const auto core = weak.lock();
    if (core && error && Failure::breaks_group(wait, *error))
      core->failure.fail(named(core->failure.with_hint(*error), wait.what(), /*place=*/false));
  });
}

void Core::remember(Issued issued) {
  if (issued.op.ended()) return;
  // Not at every call, which would scan thousands of messages each time.
  if (unfinished_.size() >= 2 * kept_unfinished_ + 8) {
    std::erase_if(unfinished_, [](const Issued& one) { return one.op.ended(); });
    kept_unfinished_ = unfinished_.size();
  }
  unfinished_.push_back(std::move(issued));
}

std::vector<Waits::Wait> Core::pending() {
  constexpr std::size_t kMost = 64;
  std::vector<Waits::Wait> waits;
  std::unique_lock lock(issue_mutex, std::try_to_lock);
  if (!lock) return waits;
  for (const Issued& one : unfinished_) {
    if (waits.size() == kMost) break;
    if (!one.op.ended() && !one.op.done().query()) waits.push_back(one.wait);
  }
  return waits;
}

void Core::remember_call(const Operation& operation, std::uint64_t number) {
  Called called{.number = number,
                .name = operation.name,
                .reduction = operation.reduction,
                .root = operation.root,
                .training = operation.training};
  if (!operation.tensors.empty()) {
    const at::Tensor& first = operation.tensors.front();
    called.dtype = first.scalar_type();
    called.device = first.device().type();
    if (!operation.parts) called.bytes = first.nbytes();
  }
  std::lock_guard lock(called_mutex_);
  called_[number % called_.size()] = called;
}

std::optional<std::string> Core::call(std::uint64_t number) {
  std::unique_lock lock(called_mutex_);
  const Called called = called_[number % called_.size()];
  lock.unlock();
  return number > 0 && called.number == number ? std::optional(called.text()) : std::nullopt;
}

// In the words of the mesh. Leaves out differences between calls that match: "all_gather_into"
// matches "all_gather", "all_to_all_single" "all_to_all".
std::string Core::Called::text() const {
  std::string text(name);
  for (const std::string_view ending : {"_into", "_single"}) {
    if (text.ends_with(ending)) text.resize(text.size() - ending.size());
  }
  if (bytes) text += " of " + std::to_string(*bytes) + " bytes";
  if (dtype) text += " of " + std::string(weft::name(tensor::dtype_of(*dtype)));
  if (device != c10::kCPU) text += " on " + c10::DeviceTypeName(device, /*lower_case=*/true);
  if (reduction) text += " with " + std::string(weft::name(*reduction));
  text += transport::training_text(training);
  const bool gives = text.starts_with("broadcast") || text.starts_with("scatter");
  if (root >= 0) text += (gives ? " from rank " : " to rank ") + std::to_string(root);
  return text;
}

Waits::Progress Core::progress() {
  const std::uint64_t begun = ledger->collectives_begun();
  std::unique_lock lock(issue_mutex, std::try_to_lock);
  if (!lock) return {begun, "a call of this group that has not returned"};
  if (last_.name == nullptr) return {begun, "no operation: it has issued none"};
  const auto ago =
      std::chrono::duration_cast<std::chrono::milliseconds>(Waits::Clock::now() - last_.since);
  const std::string when = ", " + describe_wait(ago) + " ago)";
  if (last_.collective > 0)
    return {begun, "#" + std::to_string(last_.collective) + " (" + last_.operation() + when};
  const std::string behind = begun == 0 ? "" : "after collective #" + std::to_string(begun) + ", ";
  return {begun, last_.operation() + " (" + behind + when.substr(2)};
}

Work Core::limited(Work work, std::chrono::milliseconds limit) {
  const auto state = work.state_;
  if (!state || state->is_captured || state->done()) return work;
  const auto ops = std::make_shared<const std::vector<Op>>(state->ops);
  // Owned by the operation, which goes on if its Work is dropped.
  const auto timer = std::make_shared<EventLoop::Registration>();
  *timer = options.job->loop->at(
      Deadline::in(limit), [weak = weak_from_this(), ops, limit, wait = state->wait] {
        const auto core = weak.lock();
        const bool is_over =
            std::all_of(ops->begin(), ops->end(), [](const Op& op) { return op.done().query(); });
        if (!core || is_over) return;
        const std::string text =
            ": not all ranks took part within " + describe(limit) + ", the limit of with_timeout()";
        core->failure.fail(core->failure.with_hint(Error(Blame::Timeout, wait.what() + text)));
      });
  const auto left = std::make_shared<std::atomic<std::size_t>>(ops->size());
  for (const Op& op : *ops) {
    op.on_ended([left, timer] {
      if (--*left == 0) timer->reset();
    });
  }
  return work;
}

void Core::throw_if_broken() {
  throw_if_left();
  failure.throw_if_failed();
}

int Core::next_number(const std::string& kind) {
  std::lock_guard lock(numbers_mutex_);
  return ++numbers_[kind];
}

}  // namespace weft::group
