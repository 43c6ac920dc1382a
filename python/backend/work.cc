// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <atomic>
#include <utility>

#include <ATen/core/ivalue.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <weft/python/backend/completions.h>
#include <weft/python/backend/errors.h>
#include <weft/python/backend/interpreter.h>
#include <weft/python/backend/work.h>

namespace weft::python {

namespace {

using Future = c10::ivalue::Future;
using Clock = std::chrono::steady_clock;

c10::intrusive_ptr<Future> future_of(const std::vector<at::Tensor>& outputs) {
  std::vector<c10::Device> devices;
  for (const at::Tensor& output : outputs) {
    if (output.is_cuda() &&
        std::find(devices.begin(), devices.end(), output.device()) == devices.end())
      devices.push_back(output.device());
  }
  return c10::make_intrusive<Future>(c10::ListType::create(c10::TensorType::get()),
                                     std::move(devices));
}

void run(const Copies& copies) {
  for (const auto& one : copies) one->run();
}

// The error of a wait that has ended by its limit, made of the error of its last piece.
Error of_whole_wait(const Error& error, std::chrono::milliseconds limit) {
  const std::string& text = error.text();
  return error.with_text(text.substr(0, text.find(" was not done within ")) +
                         " was not done within " + std::to_string(limit.count()) +
                         " ms; it goes on and may be waited for again");
}

}  // namespace

void CopyBack::run() {
  const c10::Device device = outputs_.device();
  std::call_once(once_, [&] {
    outputs_.copy_back();
    if (!device.is_cuda()) return;
    c10::Event copied(device.type());
    copied.record(c10::impl::VirtualGuardImpl(device.type()).getStream(device));
    copied_ = std::move(copied);
  });
  if (copied_) copied_->block(c10::impl::VirtualGuardImpl(device.type()).getStream(device));
}

IssuedWork::IssuedWork(int rank, const CallName& name, const Cause& operation,
                       std::chrono::milliseconds timeout, const std::vector<at::Tensor>& inputs,
                       std::vector<at::Tensor> outputs)
    : c10d::Work(rank, name.type, name.title, inputs),
      name_(name),
      operation_(operation),
      timeout_(timeout),
      outputs_(std::move(outputs)) {}

void IssuedWork::issued(std::vector<weft::Work> operations, Copies copies) {
  operations_ = std::move(operations);
  copies_ = std::move(copies);
  if (!copies_.empty() && !is_on_gpu()) {
    // The outputs are copied back even if nobody waits.
    when_done([all = copies_](const std::optional<Error>& error) {
      if (error) return;
      try {
        run(all);
      } catch (const std::exception&) {  // a wait makes the copies again, and throws
      }
    });
  }
  if (!recordFunctionEndCallback_) return;  // nobody profiles
  auto self = c10::intrusive_ptr<IssuedWork>::reclaim_copy(this);
  when_done([self](const std::optional<Error>&) { self->finish(); });
}

bool IssuedWork::is_done() const {
  return std::all_of(operations_.begin(), operations_.end(),
                     [](const weft::Work& one) { return one.query(); });
}

bool IssuedWork::is_on_gpu() const {
  return std::any_of(outputs_.begin(), outputs_.end(),
                     [](const at::Tensor& one) { return one.is_cuda(); });
}

bool IssuedWork::isCompleted() {
  if (!is_done()) return false;
  if (!copies_.empty() && exception() == nullptr) run(copies_);
  return true;
}

bool IssuedWork::isSuccess() const { return is_done() && exception() == nullptr; }

std::optional<Error> IssuedWork::first_error() const {
  const WithoutGil unlocked;
  for (const weft::Work& one : operations_) {
    if (auto error = one.error()) return error;
  }
  return std::nullopt;
}

std::exception_ptr IssuedWork::exception() const {
  const auto error = first_error();
  return error ? failure_of(*error, name_.operation) : nullptr;
}

int IssuedWork::sourceRank() const {
  return operations_.empty() ? -1 : operations_.front().source_rank();
}

std::vector<at::Tensor> IssuedWork::result() { return outputs_; }

void IssuedWork::abort() {
  TORCH_CHECK(false, "weft: one operation cannot be aborted alone; abort its process group");
}

// Blocks until the operation has ended. The main thread waits in pieces, and looks for Ctrl-C after
// each.
void IssuedWork::await(weft::Work& operation, std::chrono::milliseconds limit) const {
  const bool is_limited = limit > std::chrono::milliseconds(0);
  if (!on_main_thread()) return operation.synchronize(is_limited ? limit : weft::kNoTimeout);
  const auto end = Clock::now() + (is_limited ? limit : std::chrono::milliseconds(0));
  for (;;) {
    auto piece = kSignalPause;
    if (is_limited) {
      const auto left = std::chrono::ceil<std::chrono::milliseconds>(end - Clock::now());
      piece = std::clamp(left, std::chrono::milliseconds(0), kSignalPause);
    }
    try {
      return operation.synchronize(piece);
    } catch (const Error& error) {
      // Either the operation has failed, or only this piece of the wait is over.
      if (error.blame() != Blame::Timeout || operation.query())
        return operation.synchronize(weft::kNoTimeout);
      if (is_limited && Clock::now() >= end) throw of_whole_wait(error, limit);
    }
    run_signal_handlers();
  }
}

bool IssuedWork::wait(std::chrono::milliseconds timeout) {
  const WithoutGil unlocked;
  translated(name_.operation, [&] {
    for (weft::Work& one : operations_) {
      // The stream waits, and the host goes on.
      if (is_on_gpu()) {
        one.wait();
      } else {
        await(one, timeout);
      }
    }
    run(copies_);
  });
  return true;
}

void IssuedWork::synchronize() {
  if (is_on_gpu()) wait(::kNoTimeout);
}

// Calls the function when all operations have ended, with the first error, on the thread that ends
// the last of them.
void IssuedWork::when_done(std::function<void(const std::optional<Error>&)> done) const {
  if (operations_.size() == 1) return operations_.front().on_done_inline(std::move(done));
  struct Gathered {
    std::atomic<std::size_t> left;
    std::mutex mutex;
    std::optional<Error> error;
    std::function<void(const std::optional<Error>&)> done;
  };
  if (operations_.empty()) return done(std::nullopt);
  const auto all = std::make_shared<Gathered>();
  all->left = operations_.size();
  all->done = std::move(done);
  for (const weft::Work& one : operations_) {
    one.on_done_inline([all](const std::optional<Error>& error) {
      if (error) {
        const std::lock_guard lock(all->mutex);
        if (!all->error) all->error = error;
      }
      if (--all->left == 0) all->done(all->error);
    });
  }
}

c10::intrusive_ptr<Future> IssuedWork::getFuture() {
  // The current stream waits; the future records it and is complete at once. The mutex is not held
  // meanwhile, because wait() takes the GIL when it returns.
  if (is_on_gpu()) wait(::kNoTimeout);
  const bool has_ended = is_done();
  const auto ended_with = has_ended ? first_error() : std::nullopt;
  const std::lock_guard lock(future_mutex_);
  if (future_) return future_;
  future_ = future_of(outputs_);
  if (is_on_gpu()) {
    future_->markCompleted(c10::IValue(outputs_));
    return future_;
  }
  const auto complete = [future = future_, outputs = outputs_, copies = copies_,
                         operation = name_.operation](const std::optional<Error>& error) {
    if (error) return future->setError(failure_of(*error, operation));
    try {
      run(copies);
    } catch (const std::exception&) {
      return future->setError(std::current_exception());
    }
    future->markCompleted(c10::IValue(outputs));
  };
  // A caller that holds the GIL is a Python program, whose callbacks take the GIL and may wait for
  // further operations: they must not run on the thread that ends operations. C++ (the reducer of
  // DistributedDataParallel) only wakes a thread, or copies.
  if (PyGILState_Check() == 0) {
    when_done(complete);
  } else if (has_ended) {
    complete(ended_with);
  } else {
    when_done([complete, depth = depth_of_future(),
               operation = operation_](const std::optional<Error>& error) {
      complete_soon(depth, operation, [complete, error] { complete(error); });
    });
  }
  return future_;
}

}  // namespace weft::python
