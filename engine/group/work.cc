// SPDX-License-Identifier: Apache-2.0
#include <atomic>

#include <weft/base/log.h>
#include <weft/base/mutex.h>
#include <weft/engine/future/thread_executor.h>
#include <weft/engine/future/when_all.h>
#include <weft/engine/group/core.h>
#include <weft/engine/group/work_state.h>
#include <weft/profiling/trace/dump.h>
#include <weft/profiling/trace/host_time.h>
#include <weft/profiling/trace/trace.h>

namespace weft {

namespace traced {
namespace {
constinit trace::Name wait{trace::Layer::Engine, "wait"};
}  // namespace
}  // namespace traced

namespace group {

Error named(const Error& error, const std::string& what, bool place) {
  const auto begin = what.rfind(": ") == std::string::npos ? 0 : what.rfind(": ") + 2;
  const std::string bare = what.substr(begin, what.find(" #", begin) - begin);
  std::string_view why = error.text();
  std::string where;
  for (const std::string& name : {what, bare}) {
    const std::string before = name + " on group '";
    const auto end = why.find("): ");
    if (!why.starts_with(before) || end == std::string_view::npos) continue;
    if (place) where = why.substr(name.size(), end + 1 - name.size());
    why.remove_prefix(end + 3);
    break;
  }
  if (why.starts_with(what + ": ")) why.remove_prefix(what.size() + 2);
  return error.with_text(what + where + ": " + std::string(why));
}

namespace {

// Adds this rank's place in its mesh to the place that a backend names, "group 'x' (shm, rank 0 of
// 2)".
Error with_place_in_mesh(const Error& error, const CoreOptions& options) {
  const std::string& text = error.text();
  const std::string group = "group '" + options.name + "' (";
  const auto begin = text.find(group);
  const auto end = begin == std::string::npos ? begin : text.find(')', begin + group.size());
  const bool has_it = text.find(options.place_in_mesh) != std::string::npos;
  if (has_it || end == std::string::npos) return error;
  return error.with_text(text.substr(0, end) + ", " + options.place_in_mesh + text.substr(end));
}

}  // namespace

WorkState::~WorkState() {
  if (seen || !core || core->made_in.is_inherited()) return;
  // Nobody will look at the Work any more, so an error, now or later, surfaces on the group.
  const auto dropped = [wait = wait](const Error& error) {
    const std::string what = wait.what();
    const Error said = named(error, what);
    const std::string rest = said.text().substr(what.size());
    return said.with_text(what + ", whose Work was dropped" +
                          (rest.starts_with(" on ") ? "," : "") + rest);
  };
  for (const Op& op : ops) {
    if (const auto error = op.error()) {
      core->failure.note_unseen(dropped(*error));
      continue;
    }
    op.on_ended([op, dropped, weak = std::weak_ptr(core)] {
      const auto error = op.error();
      const auto group = weak.lock();
      if (error && group) group->failure.note_unseen(dropped(*error));
    });
  }
}

std::optional<Error> WorkState::error() const {
  for (const Op& op : ops) {
    if (const auto error = op.error())
      return told(core->failure.with_absent(core->failure.explain(*error), wait));
  }
  return std::nullopt;
}

Error WorkState::told(const Error& error) const {
  const std::string what = wait.what();
  const Error said = named(error, what);
  if (said.text().find("group '" + core->options.name + "' (") != std::string::npos)
    return with_place_in_mesh(said, core->options);
  return said.with_text(what + " " + core->options.place() + said.text().substr(what.size()));
}

bool WorkState::done() const {
  for (const Op& op : ops) {
    if (!op.done().query()) return false;
  }
  return true;
}

void WorkState::wait_on(const c10::Stream& stream) {
  // A later error surfaces on the group.
  if (const auto known = error()) {
    seen = true;
    throw *known;
  }
  for (const Op& op : ops) core->options.job->devices->wait(op.done(), stream);
}

}  // namespace group

void Work::wait() {
  if (!state_) return;
  state_->core->require_own();
  if (state_->host_waits) return synchronize(kNoTimeout);
  state_->wait_on(tensor::CudaDevices::current_stream(state_->device));
}

void Work::wait(c10::Stream stream) {
  if (!state_) return;
  state_->core->require_own();
  if (stream.device_type() != state_->device.type()) {
    throw Error(Blame::Caller, "a stream of " + stream.device().str() +
                                   " cannot wait for tensors on " + state_->device.str());
  }
  if (state_->device.is_cpu()) return synchronize(kNoTimeout);
  state_->wait_on(stream);
}

namespace {

// Tells the executor of this thread that it blocks, so that another thread of the executor goes on:
// this operation may wait for a peer that waits for an answer of this agent, or for a continuation.
bool await(const Fence& done, Deadline deadline) {
  const auto execution_context = weft::detail::current_executor();
  weft::detail::Executor* const here = weft::detail::thread_executor();
  weft::detail::Executor* const executor = here != nullptr ? here : execution_context.get();
  if (executor == nullptr || done.query()) return done.synchronize(deadline);
  bool is_done = false;
  executor->block([&] { is_done = done.synchronize(deadline); });
  return is_done;
}

}  // namespace

void Work::synchronize(std::chrono::milliseconds timeout) {
  if (!state_) return;
  state_->core->require_own();
  if (timeout == kGroupTimeout) timeout = state_->core->options.timeout;
  if (timeout.count() < 0) {
    throw Error(Blame::Caller, "Work::synchronize: a timeout of " + describe(timeout) +
                                   "; it must be positive, kGroupTimeout or kNoTimeout");
  }
  if (state_->is_captured && !state_->done()) {
    throw Error(Blame::Caller, state_->wait.what() + " " + state_->core->options.place() +
                                   " was captured into a CUDA graph, and the host cannot wait for "
                                   "it: nothing runs before the "
                                   "graph is launched. Make the stream wait with Work::wait(), and "
                                   "leave barriers outside");
  }
  const Deadline deadline = timeout == kNoTimeout ? Deadline::never() : Deadline::in(timeout);
  for (const Op& op : state_->ops) {
    const trace::Range waiting(traced::wait, {.rank = state_->core->options.rank});
    const trace::WaitScope counted(state_->backend);
    if (!await(op.done(), deadline)) {
      const Error late(Blame::Timeout, state_->wait.what() + " " + state_->core->options.place() +
                                           " was not done within " + describe(timeout) +
                                           "; it goes on and may be waited for again");
      // A limit this short is a look in between. Its dump would be taken for that of a failure,
      // which might then have none: at most one is written in a second.
      constexpr auto kLook = std::chrono::milliseconds(100);
      if (timeout > kLook) trace::dump_after("Work::synchronize", late);
      throw late;
    }
  }
  state_->seen = true;
  if (const auto error = state_->error()) {
    // The thread that has ended the operation breaks the group, perhaps only after this thread goes
    // on. Break it here too, so that this thread's next call finds it broken.
    auto& failure = state_->core->failure;
    if (failure.breaks_group(state_->wait, *error)) failure.fail(*error);
    throw *error;
  }
}

bool Work::query() const { return !state_ || state_->done(); }

int Work::source_rank() const {
  return state_ && state_->done() && !state_->ops.empty() ? state_->ops.front().source_rank() : -1;
}

std::optional<Error> Work::error() const {
  if (!state_ || !state_->done()) return std::nullopt;
  state_->seen = true;
  return state_->error();
}

namespace {

// The function given to on_done_inline(), while its operation runs.
struct Inline {
  std::shared_ptr<group::WorkState> state;
  std::function<void(const std::optional<Error>&)> done;
  std::atomic<std::size_t> left;  // Ops that have not ended
  Mutex mutex;
  std::optional<Error> error;  // of the first Op that failed; guarded by mutex

  static void call(const std::function<void(const std::optional<Error>&)>& done,
                   const std::string& what, const std::optional<Error>& error) noexcept {
    try {
      done(error);
    } catch (...) {
      log::error("the function that " + what + " called at its end (Work::on_done_inline) threw: " +
                 text_of(std::current_exception()));
    }
  }

  void ended(const Op& op) {
    if (const auto why = op.error()) {
      MutexLock lock(mutex);
      if (!error) error = why;
    }
    if (--left > 0) return;
    const std::string what = state->wait.what();
    if (!error) {
      // As in future(): the function may drop the group's last handle.
      state.reset();
      return call(done, what, std::nullopt);
    }
    auto& core = *state->core;
    core.failure.explain_later(
        *error, [state = std::move(state), done = std::move(done), what](const Error& why) {
          call(done, what, state->told(why));
        });
  }
};

}  // namespace

void Work::on_done_inline(std::function<void(const std::optional<Error>&)> done) const {
  if (!done) throw Error(Blame::Caller, "Work::on_done_inline: the function is empty");
  if (!state_ || state_->ops.empty())
    return Inline::call(done, state_ ? state_->wait.what() : "an operation", std::nullopt);
  if (state_->is_captured) {
    throw Error(Blame::Caller, state_->wait.what() + " " + state_->core->options.place() +
                                   " was captured into a CUDA graph, and ends at each launch of "
                                   "the graph without the host being told; wait for the stream "
                                   "that the graph is launched on");
  }
  state_->seen = true;
  const auto inlined = std::make_shared<Inline>();
  inlined->state = state_;
  inlined->done = std::move(done);
  inlined->left = state_->ops.size();
  for (const Op& op : std::vector<Op>(state_->ops)) {
    op.on_ended([inlined, op] { inlined->ended(op); });
  }
}

Future<void> Work::future() {
  if (!state_) return Future<void>::ready();
  state_->core->require_own();
  if (!state_->device.is_cpu()) {
    Promise<void> promise;
    if (const auto error = state_->error()) {
      state_->seen = true;
      promise.set_error(*error);
    } else {
      std::vector<Fence> fences;
      for (const Op& op : state_->ops) fences.push_back(op.done());
      promise.set_with(state_->core->options.job->devices->work(state_->device, std::move(fences)),
                       {});
    }
    return promise.future();
  }
  state_->seen = true;
  std::vector<Future<void>> ends;
  for (const Op& op : state_->ops) {
    Promise<void> promise(state_->core->options.job->continuations);
    ends.push_back(promise.future());
    op.on_ended([promise, op, state = state_]() mutable {
      const auto error = op.error();
      if (!error) {
        // A thread that waits may at once drop the group's last handle, which leaves the group, so
        // no handle may be left here.
        state.reset();
        return promise.set();
      }
      state->core->failure.explain_later(
          *error, [promise, state](const Error& why) { promise.set_error(state->told(why)); });
    });
  }
  return when_all(std::move(ends));
}

}  // namespace weft
