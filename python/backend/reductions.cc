// SPDX-License-Identifier: Apache-2.0
// The operations that combine elements, and barrier.
#include <c10/core/GradMode.h>

#include <weft/python/backend/arguments.h>
#include <weft/python/backend/backend.h>
#include <weft/python/backend/errors.h>

namespace weft::python {

namespace {

constexpr CallName kAllReduce{c10d::OpType::ALLREDUCE, "all_reduce", "weft:all_reduce"};
constexpr CallName kBarrier{c10d::OpType::BARRIER, "barrier", "weft:barrier"};

}  // namespace

c10::intrusive_ptr<c10d::Work> Backend::allreduce(std::vector<at::Tensor>& tensors,
                                                  const c10d::AllreduceOptions& options) {
  const char* const name = kAllReduce.operation;
  return translated(name, [&] {
    const at::Tensor& tensor = only(name, tensors);
    const Reduction reduction = reduction_of(name, options.reduceOp);
    return issue(kAllReduce, options.timeout, tensor.device(), tensors, tensors,
                 [&](weft::ProcessGroup& group) -> Works {
                   const c10::AutoGradMode no_grad(false);
                   if (reduction.factor.defined()) at::Tensor(tensor).mul_(reduction.factor);
                   return {group.all_reduce(flat(name, tensor), reduction.op)};
                 });
  });
}

c10::intrusive_ptr<c10d::Work> Backend::barrier(const c10d::BarrierOptions& options) {
  return issue(kBarrier, options.timeout, c10::Device(c10::kCPU), {}, {},
               [&](weft::ProcessGroup&) -> Works {
                 const auto limit = limit_of(options.timeout);
                 Works works;
                 for (weft::ProcessGroup& one : groups())
                   works.push_back(one.with_timeout(limit).barrier());
                 return works;
               });
}

}  // namespace weft::python
