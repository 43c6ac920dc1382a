// SPDX-License-Identifier: Apache-2.0
// A Work of c10d for one or more operations of Weft.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <utility>
#include <vector>

#include <c10/core/Event.h>
#include <torch/csrc/distributed/c10d/Work.hpp>
#include <torch/headeronly/version.h>

#include <weft/group.h>
#include <weft/python/backend/arguments.h>
#include <weft/python/backend/completions.h>

namespace weft::python {

// A call of the backend, as libtorch and its profiler know it.
struct CallName {
  c10d::OpType type;
  const char* operation;  // "all_reduce", for errors
  const char* title;      // "weft:all_reduce", for the profiler
};

// Copies outputs back once, on the first thread that calls run(). Copies between GPUs' tensors are
// made on that thread's current stream, and the current streams of later calls wait for them.
class CopyBack {
 public:
  explicit CopyBack(Outputs outputs) : outputs_(std::move(outputs)) {}
  void run();

 private:
  Outputs outputs_;
  std::once_flag once_;
  std::optional<c10::Event> copied_;  // for outputs on a GPU
};
using Copies = std::vector<std::shared_ptr<CopyBack>>;

class IssuedWork final : public c10d::Work {
 public:
  // The profiler's event begins here. `outputs` is what result() and the future hold; `operation`
  // is what callbacks of the future follow.
  IssuedWork(int rank, const CallName& name, const Cause& operation,
             std::chrono::milliseconds timeout, const std::vector<at::Tensor>& inputs,
             std::vector<at::Tensor> outputs);

  // Called once, before anybody else sees this object. `copies` are made when all operations have
  // ended well, before a wait returns and before the future is complete.
  void issued(std::vector<weft::Work> operations, Copies copies = {});
  const std::vector<weft::Work>& operations() const { return operations_; }
  const Copies& copies() const { return copies_; }

  bool isCompleted() override;
  bool isSuccess() const override;
  std::exception_ptr exception() const override;
  int sourceRank() const override;
  std::vector<at::Tensor> result() override;
  void synchronize() override;
  bool wait(std::chrono::milliseconds timeout) override;
  void abort() override;
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override;
  std::uint64_t getSequencenumber() const override { return operation_.number; }
#if TORCH_VERSION_MAJOR > 2 || TORCH_VERSION_MINOR >= 15
  std::chrono::milliseconds getTimeout() const override { return timeout_; }
#endif

 private:
  bool is_done() const;
  // Returns the error of an operation that has ended. Releases the GIL meanwhile: the threads that
  // end operations may hold what it waits for, and ask for the GIL.
  std::optional<Error> first_error() const;
  bool is_on_gpu() const;
  void await(weft::Work& operation, std::chrono::milliseconds limit) const;
  void when_done(std::function<void(const std::optional<Error>&)> done) const;

  CallName name_;
  Cause operation_;
  [[maybe_unused]] std::chrono::milliseconds timeout_;
  std::vector<weft::Work> operations_;
  Copies copies_;
  std::vector<at::Tensor> outputs_;
  std::mutex future_mutex_;
  c10::intrusive_ptr<c10::ivalue::Future> future_;
};

}  // namespace weft::python
