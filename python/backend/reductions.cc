// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <string>
#include <vector>

#include <weft/python/backend/arguments.h>
#include <weft/python/backend/backend.h>
#include <weft/python/backend/errors.h>
#include <weft/python/backend/interpreter.h>

namespace weft::python {

namespace {

using c10d::OpType;

constexpr CallName kAllReduce{OpType::ALLREDUCE, "all_reduce", "weft:all_reduce"};
constexpr CallName kAllReduceSparse{OpType::_ALLREDUCE_SPARSE, "all_reduce",
                                    "weft:sparse_all_reduce"};
constexpr CallName kAllReduceCoalesced{OpType::ALLREDUCE_COALESCED, "all_reduce_coalesced",
                                       "weft:all_reduce"};
constexpr CallName kReduce{OpType::REDUCE, "reduce", "weft:reduce"};
constexpr CallName kReduceScatter{OpType::REDUCE_SCATTER, "reduce_scatter", "weft:reduce_scatter"};
constexpr CallName kReduceScatterInto{OpType::_REDUCE_SCATTER_BASE, "reduce_scatter_into",
                                      "weft:_reduce_scatter_base"};
#if TORCH_VERSION_MAJOR > 2 || TORCH_VERSION_MINOR >= 15
constexpr auto kCoalescedScatters = OpType::REDUCE_SCATTER_TENSOR_COALESCED;
#else
constexpr auto kCoalescedScatters = OpType::_REDUCE_SCATTER_BASE;
#endif
constexpr CallName kReduceScatterCoalesced{kCoalescedScatters, "reduce_scatter_coalesced",
                                           "weft:reduce_scatter_coalesced"};
constexpr CallName kBarrier{OpType::BARRIER, "barrier", "weft:barrier"};

// Returns the memory that is reduced for each tensor. A tensor that is listed twice is reduced once
// in place, and then in a copy, because all reductions take the values from before the call.
Tensors apart(const Tensors& tensors, Outputs& to) {
  Tensors all;
  for (const at::Tensor& tensor : tensors) {
    const at::Tensor data = to.in_place(tensor);
    const bool is_listed = std::any_of(all.begin(), all.end(), [&](const at::Tensor& other) {
      return data.numel() > 0 && other.data_ptr() == data.data_ptr();
    });
    all.push_back(is_listed ? data.clone() : data);
  }
  return all;
}

}  // namespace

WorkPointer Backend::allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) {
  const char* const name = kAllReduce.operation;
  return translated(name, [&] {
    const at::Tensor& tensor = only(name, tensors);
    if (tensor.defined() && tensor.layout() == at::kSparse)
      return allreduce_sparse(tensors, options);
    const Reduction reduction = reduction_of(name, options.reduceOp);
    return issue({kAllReduce, options.timeout, tensor.device(), tensors, tensors},
                 [&](weft::ProcessGroup& group, Outputs& to) -> Works {
                   const at::Tensor data = to.in_place(tensor);
                   reduction.scale(data);
                   return {group.all_reduce(data, reduction.op)};
                 });
  });
}

WorkPointer Backend::allreduce_sparse(Tensors& tensors, const c10d::AllreduceOptions& options) {
  const char* const name = kAllReduceSparse.operation;
  return translated(name, [&] {
    const at::Tensor& tensor = only(name, tensors);
    const Reduction reduction = reduction_of(name, options.reduceOp);
    return issue({kAllReduceSparse, options.timeout, tensor.device(), {}, tensors},
                 [&](weft::ProcessGroup& group, Outputs&) -> Works {
                   // Weft's call waits for the other ranks.
                   interruptible([group, tensor, op = reduction.op]() mutable {
                     group.all_reduce(tensor, op).wait();
                   });
                   return {};
                 });
  });
}

WorkPointer Backend::allreduce_coalesced(Tensors& tensors,
                                         const c10d::AllreduceCoalescedOptions& options) {
  const char* const name = kAllReduceCoalesced.operation;
  return translated(name, [&] {
    check_pairs(name, tensors.size(), tensors.size());
    const Reduction reduction = reduction_of(name, options.reduceOp);
    return issue({kAllReduceCoalesced, options.timeout, tensors.front().device(), tensors, tensors},
                 [&](weft::ProcessGroup& group, Outputs& to) -> Works {
                   Works works;
                   for (const at::Tensor& data : apart(tensors, to)) {
                     reduction.scale(data);
                     works.push_back(group.all_reduce(data, reduction.op));
                   }
                   return works;
                 });
  });
}

WorkPointer Backend::reduce(Tensors& tensors, const c10d::ReduceOptions& options) {
  const char* const name = kReduce.operation;
  return translated(name, [&] {
    const at::Tensor& tensor = only(name, tensors);
    const Reduction reduction = reduction_of(name, options.reduceOp);
    const int root = static_cast<int>(options.rootRank);
    return issue({kReduce, options.timeout, tensor.device(), tensors, tensors},
                 [&](weft::ProcessGroup& group, Outputs& to) -> Works {
                   at::Tensor data = to.in_place(tensor);
                   if (getRank() == root) {
                     reduction.scale(data);
                   } else {
                     data = reduction.scaled(data);
                   }
                   return {group.reduce(data, root, reduction.op)};
                 });
  });
}

WorkPointer Backend::reduce_scatter(Tensors& outputs, std::vector<Tensors>& inputs,
                                    const c10d::ReduceScatterOptions& options) {
  const char* const name = kReduceScatter.operation;
  return translated(name, [&] {
    const at::Tensor& output = only(name, outputs);
    const Tensors& own = only(name, inputs);
    const Reduction reduction = reduction_of(name, options.reduceOp);
    return issue({kReduceScatter, options.timeout, output.device(), own, outputs},
                 [&](weft::ProcessGroup& group, Outputs& to) -> Works {
                   Tensors from;
                   for (const at::Tensor& one : own)
                     from.push_back(reduction.scaled(one).contiguous());
                   return {group.reduce_scatter(to.of(output), from, reduction.op)};
                 });
  });
}

WorkPointer Backend::_reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                                          const c10d::ReduceScatterOptions& options) {
  return translated(kReduceScatterInto.operation, [&] {
    const Reduction reduction = reduction_of(kReduceScatterInto.operation, options.reduceOp);
    return issue({kReduceScatterInto, options.timeout, output.device(), {input}, {output}},
                 [&](weft::ProcessGroup& group, Outputs& to) -> Works {
                   return {group.reduce_scatter_into(
                       to.of(output), reduction.scaled(input).contiguous(), reduction.op)};
                 });
  });
}

WorkPointer Backend::reduce_scatter_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                                     const c10d::ReduceScatterOptions& options) {
  const char* const name = kReduceScatterCoalesced.operation;
  return translated(name, [&] {
    check_pairs(name, outputs.size(), inputs.size());
    const Reduction reduction = reduction_of(name, options.reduceOp);
    return issue(
        {kReduceScatterCoalesced, options.timeout, outputs.front().device(), inputs, outputs},
        [&](weft::ProcessGroup& group, Outputs& to) -> Works {
          Works works;
          for (std::size_t i = 0; i < inputs.size(); ++i) {
            works.push_back(group.reduce_scatter_into(
                to.of(outputs[i]), reduction.scaled(inputs[i]).contiguous(), reduction.op));
          }
          return works;
        });
  });
}

WorkPointer Backend::barrier(const c10d::BarrierOptions& options) {
  return issue({kBarrier, options.timeout, c10::Device(c10::kCPU), {}, {}},
               [&](weft::ProcessGroup&, Outputs&) -> Works {
                 Works works;
                 for (const weft::ProcessGroup& one : limited_groups(options.timeout))
                   works.push_back(weft::ProcessGroup(one).barrier());
                 return works;
               });
}

namespace {

// Adds c10d's own words to the error of a monitored barrier, because programs look for them.
Error in_words_of_c10d(const Error& error, int rank, bool names_all, bool has_time) {
  const std::string self = "Rank " + std::to_string(rank);
  if (rank != 0) {
    return error.with_text(error.text() + " (" + self +
                           " successfully reached monitoredBarrier, but received errors while "
                           "waiting for send/recv from rank 0)");
  }
  std::vector<int> missing = error.ranks();
  if (missing.empty() || !has_time)
    return error.with_text(error.text() + " (" + self + " timed out in monitoredBarrier)");
  if (!names_all) missing.resize(1);
  std::string names = names_all ? "Ranks " : "Rank ";
  for (std::size_t i = 0; i < missing.size(); ++i)
    names += (i == 0 ? "" : ", ") + std::to_string(missing[i]);
  return error.with_text(error.text() + " (" + names + " failed to pass monitoredBarrier)");
}

}  // namespace

void Backend::monitoredBarrier(const c10d::BarrierOptions& options, bool wait_all_ranks) {
  const bool has_time = options.timeout.count() != 0;
  const auto limit = has_time ? limit_of(options.timeout) : std::chrono::milliseconds(0);
  translated("monitored_barrier", [&] {
    try {
      interruptible([group = group(), limit]() mutable { group.monitored_barrier(limit); });
    } catch (const Error& error) {
      if (error.blame() != Blame::Timeout && error.blame() != Blame::PeerLost) throw;
      throw in_words_of_c10d(error, getRank(), wait_all_ranks, has_time);
    }
  });
}

}  // namespace weft::python
