#include <weft/engine/group/core.h>

namespace weft {

namespace group {

WorkState::~WorkState() {
  if (seen || !core) return;
  // Nobody will look: an error, whenever it comes, surfaces on the group.
  for (const Op& op : ops) {
    const std::weak_ptr<Core> weak = core;
    auto report = [weak, op, what = what] {
      const auto error = op.error();
      const auto group = weak.lock();
      if (error && group) group->note_unseen(error->within(what + ", whose Work was dropped,"));
    };
    if (op.done().query()) {
      report();
    } else {
      core->options.job->loop->when(op.done(), report);
    }
  }
}

std::optional<Error> WorkState::error() const {
  for (const Op& op : ops) {
    if (const auto error = op.error()) return core->explain(*error).within(what);
  }
  return std::nullopt;
}

bool WorkState::done() const {
  for (const Op& op : ops) {
    if (!op.done().query()) return false;
  }
  return true;
}

}  // namespace group

void Work::wait() {
  if (state_) synchronize(kNoTimeout);
}

void Work::wait(c10::Stream stream) {
  if (!state_) return;
  if (stream.device_type() != state_->device.type()) {
    throw Error(Blame::Caller,
                "a stream of " + stream.device().str() + " cannot wait for tensors on " + state_->device.str());
  }
  wait();
}

void Work::synchronize(std::chrono::milliseconds timeout) {
  if (!state_) return;
  if (timeout == kGroupTimeout) timeout = state_->core->options.timeout;
  const Deadline deadline = timeout == kNoTimeout ? Deadline::never() : Deadline::in(timeout);
  for (const Op& op : state_->ops) {
    if (!op.done().synchronize(deadline)) {
      throw Error(Blame::Timeout, state_->what + " " + state_->core->place() + " was not done within " + describe(timeout) +
                                      "; it goes on and may be waited for again");
    }
  }
  state_->seen = true;
  if (const auto error = state_->error()) throw *error;
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

Future<void> Work::future() {
  if (!state_) return Future<void>::ready();
  state_->seen = true;
  std::vector<Future<void>> ends;
  for (const Op& op : state_->ops) {
    Promise<void> promise;
    ends.push_back(promise.future());
    const auto finish = [promise, op, state = state_] {
      if (const auto error = op.error()) {
        promise.set_error(error->within(state->what));
      } else {
        promise.set();
      }
    };
    Task task(finish);
    if (!op.done().source()) {
      finish();
    } else if (!op.done().source()->on_passed(task)) {
      state_->core->options.job->loop->when(op.done(), finish);
    }
  }
  return when_all(std::move(ends));
}

}  // namespace weft
