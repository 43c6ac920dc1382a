// SPDX-License-Identifier: Apache-2.0
#include <ATen/core/LegacyTypeDispatch.h>
#include <torch/csrc/distributed/c10d/Utils.hpp>

#include <weft/python/backend/arguments.h>
#include <weft/python/backend/backend.h>
#include <weft/python/backend/errors.h>

namespace weft::python {

namespace {

using c10d::OpType;

constexpr CallName kBroadcast{OpType::BROADCAST, "broadcast", "weft:broadcast"};
constexpr CallName kAllGather{OpType::ALLGATHER, "all_gather", "weft:all_gather"};
constexpr CallName kAllGatherInto{OpType::_ALLGATHER_BASE, "all_gather_into",
                                  "weft:_all_gather_base"};
constexpr CallName kAllGatherCoalesced{OpType::ALLGATHER_COALESCED, "all_gather_coalesced",
                                       "weft:all_gather_coalesced"};
constexpr CallName kGather{OpType::GATHER, "gather", "weft:gather"};
constexpr CallName kScatter{OpType::SCATTER, "scatter", "weft:scatter"};
constexpr CallName kAllToAll{OpType::ALLTOALL, "all_to_all", "weft:all_to_all"};
constexpr CallName kAllToAllSingle{OpType::ALLTOALL_BASE, "all_to_all_single", "weft:all_to_all"};
constexpr CallName kSend{OpType::SEND, "send", "weft:send"};
constexpr CallName kRecv{OpType::RECV, "recv", "weft:recv"};
constexpr CallName kRecvAny{OpType::RECVANYSOURCE, "recv", "weft:recvAnySource"};

bool differ_in_size(const Tensors& tensors) {
  for (const at::Tensor& one : tensors) {
    if (one.sizes() != tensors.front().sizes()) return true;
  }
  return false;
}

int as_rank(std::int64_t rank) { return static_cast<int>(rank); }

// Ranks that give different sizes gather by one broadcast of each.
std::vector<weft::Work> gather_uneven(weft::ProcessGroup& group, const Tensors& outputs,
                                      const at::Tensor& input) {
  const auto rank = static_cast<std::size_t>(group.rank());
  if (outputs.size() != static_cast<std::size_t>(group.size()) ||
      outputs[rank].sizes() != input.sizes() ||
      outputs[rank].scalar_type() != input.scalar_type()) {
    throw Error(Blame::Caller,
                "all_gather: takes an output for each of the " + std::to_string(group.size()) +
                    " ranks, and this rank's must have the shape and type of its input");
  }
  {
    // An operation writes outputs of which autograd knows nothing, as it does in the other cases.
    const at::AutoDispatchBelowADInplaceOrView same_memory;
    outputs[rank].copy_(input);
  }
  std::vector<weft::Work> works;
  for (int root = 0; root < group.size(); ++root)
    works.push_back(group.broadcast(outputs[static_cast<std::size_t>(root)], root));
  return works;
}

}  // namespace

WorkPointer MovingBackend::broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) {
  return translated(kBroadcast.operation, [&] {
    const at::Tensor& tensor = only(kBroadcast.operation, tensors);
    return issue(
        {kBroadcast, options.timeout, tensor.device(), tensors, tensors},
        [&](weft::ProcessGroup& group, Outputs& to) -> Works {
          return {group.broadcast(movable(to.in_place(tensor)), as_rank(options.rootRank))};
        });
  });
}

WorkPointer MovingBackend::allgather(std::vector<Tensors>& outputs, Tensors& inputs,
                                     const c10d::AllgatherOptions& options) {
  return translated(kAllGather.operation, [&] {
    const at::Tensor& input = only(kAllGather.operation, inputs);
    const Tensors& own = only(kAllGather.operation, outputs);
    return issue({kAllGather, options.timeout, input.device(), inputs, own},
                 [&](weft::ProcessGroup& group, Outputs& to) -> Works {
                   if (differ_in_size(own)) return gather_uneven(group, to.of(own), movable(input));
                   return {group.all_gather(to.of(own), movable(input))};
                 });
  });
}

WorkPointer MovingBackend::_allgather_base(at::Tensor& output, at::Tensor& input,
                                           const c10d::AllgatherOptions& options) {
  return issue({kAllGatherInto, options.timeout, input.device(), {input}, {output}},
               [&](weft::ProcessGroup& group, Outputs& to) -> Works {
                 return {group.all_gather_into(to.of(output), movable(input))};
               });
}

WorkPointer MovingBackend::allgather_coalesced(std::vector<Tensors>& outputs, Tensors& inputs,
                                               const c10d::AllgatherOptions& options) {
  return translated(kAllGatherCoalesced.operation, [&] {
    if (outputs.size() != static_cast<std::size_t>(getSize())) {
      throw Error(Blame::Caller, "all_gather_coalesced: takes a list of outputs for each of the " +
                                     std::to_string(getSize()) + " ranks, and got " +
                                     std::to_string(outputs.size()));
    }
    Tensors all;
    for (const Tensors& of_rank : outputs) {
      check_pairs(kAllGatherCoalesced.operation, of_rank.size(), inputs.size());
      all.insert(all.end(), of_rank.begin(), of_rank.end());
    }
    return issue({kAllGatherCoalesced, options.timeout, inputs.front().device(), inputs, all},
                 [&](weft::ProcessGroup& group, Outputs& to) -> Works {
                   Works works;
                   for (std::size_t i = 0; i < inputs.size(); ++i) {
                     Tensors own;
                     for (const Tensors& of_rank : outputs) own.push_back(of_rank[i]);
                     works.push_back(group.all_gather(to.of(own), movable(inputs[i])));
                   }
                   return works;
                 });
  });
}

WorkPointer MovingBackend::allgather_into_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                                           const c10d::AllgatherOptions& options) {
  return translated(kAllGatherCoalesced.operation, [&] {
    check_pairs(kAllGatherCoalesced.operation, outputs.size(), inputs.size());
    return issue({kAllGatherCoalesced, options.timeout, inputs.front().device(), inputs, outputs},
                 [&](weft::ProcessGroup& group, Outputs& to) -> Works {
                   Works works;
                   for (std::size_t i = 0; i < inputs.size(); ++i)
                     works.push_back(group.all_gather_into(to.of(outputs[i]), movable(inputs[i])));
                   return works;
                 });
  });
}

WorkPointer MovingBackend::gather(std::vector<Tensors>& outputs, Tensors& inputs,
                                  const c10d::GatherOptions& options) {
  return translated(kGather.operation, [&] {
    const at::Tensor& input = only(kGather.operation, inputs);
    const bool is_root = getRank() == as_rank(options.rootRank);
    const Tensors own = is_root ? only(kGather.operation, outputs) : Tensors();
    if (!is_root && !outputs.empty()) {
      throw Error(Blame::Caller, "gather: requires empty output on non-root ranks; rank " +
                                     std::to_string(options.rootRank) + " is the root");
    }
    return issue({kGather, options.timeout, input.device(), inputs, own},
                 [&](weft::ProcessGroup& group, Outputs& to) -> Works {
                   return {group.gather(to.of(own), movable(input), as_rank(options.rootRank))};
                 });
  });
}

#if TORCH_VERSION_MAJOR > 2 || TORCH_VERSION_MINOR >= 15
WorkPointer MovingBackend::gather_into_tensor(at::Tensor& output, at::Tensor& input,
                                              const c10d::GatherOptions& options) {
  const bool is_root = getRank() == as_rank(options.rootRank);
  return issue({kGather, options.timeout, input.device(), {input}, {output}},
               [&](weft::ProcessGroup& group, Outputs& to) -> Works {
                 const at::Tensor own = movable(input);
                 return {group.gather(is_root ? parts_of(to.of(output), getSize(), own) : Tensors(),
                                      own, as_rank(options.rootRank))};
               });
}
#endif

WorkPointer MovingBackend::scatter(Tensors& outputs, std::vector<Tensors>& inputs,
                                   const c10d::ScatterOptions& options) {
  return translated(kScatter.operation, [&] {
    const at::Tensor& output = only(kScatter.operation, outputs);
    const bool is_root = getRank() == as_rank(options.rootRank);
    const Tensors own = is_root ? only(kScatter.operation, inputs) : Tensors();
    if (!is_root && !inputs.empty()) {
      throw Error(Blame::Caller, "scatter: requires empty input on non-root ranks; rank " +
                                     std::to_string(options.rootRank) + " is the root");
    }
    return issue({kScatter, options.timeout, output.device(), own, outputs},
                 [&](weft::ProcessGroup& group, Outputs& to) -> Works {
                   return {group.scatter(to.of(output), movable(own), as_rank(options.rootRank))};
                 });
  });
}

WorkPointer MovingBackend::alltoall(Tensors& outputs, Tensors& inputs,
                                    const c10d::AllToAllOptions& options) {
  return translated(kAllToAll.operation, [&] {
    check_pairs(kAllToAll.operation, outputs.size(), inputs.size());
    return issue({kAllToAll, options.timeout, outputs.front().device(), inputs, outputs},
                 [&](weft::ProcessGroup& group, Outputs& to) -> Works {
                   return {group.all_to_all(to.of(outputs), movable(inputs))};
                 });
  });
}

WorkPointer MovingBackend::alltoall_base(at::Tensor& output, at::Tensor& input,
                                         std::vector<std::int64_t>& output_splits,
                                         std::vector<std::int64_t>& input_splits,
                                         const c10d::AllToAllOptions& options) {
  c10d::checkSplitSizes(input_splits, input, getSize());
  c10d::checkSplitSizes(output_splits, output, getSize());
  return issue({kAllToAllSingle, options.timeout, output.device(), {input}, {output}},
               [&](weft::ProcessGroup& group, Outputs& to) -> Works {
                 at::Tensor into = to.of(output), from = movable(input);
                 if (output_splits.empty() && input_splits.empty()) {
                   // The parts must be equal, and their shapes may differ.
                   into = into.view({-1});
                   from = from.view({-1});
                 }
                 return {group.all_to_all_single(into, from, output_splits, input_splits)};
               });
}

WorkPointer MovingBackend::send(Tensors& tensors, int to, int tag) {
  return translated(kSend.operation, [&] {
    const at::Tensor& tensor = only(kSend.operation, tensors);
    return issue({kSend, c10d::kUnsetTimeout, tensor.device(), tensors, tensors},
                 [&](weft::ProcessGroup& group, Outputs&) -> Works {
                   return {group.send(movable(tensor), to, tag)};
                 });
  });
}

WorkPointer MovingBackend::recv(Tensors& tensors, int from, int tag) {
  return translated(kRecv.operation, [&] {
    const at::Tensor& tensor = only(kRecv.operation, tensors);
    return issue({kRecv, c10d::kUnsetTimeout, tensor.device(), tensors, tensors},
                 [&](weft::ProcessGroup& group, Outputs& to) -> Works {
                   return {group.recv(to.of(tensor), from, tag)};
                 });
  });
}

WorkPointer MovingBackend::recvAnysource(Tensors& tensors, int tag) {
  return translated(kRecvAny.operation, [&] {
    const at::Tensor& tensor = only(kRecvAny.operation, tensors);
    return issue({kRecvAny, c10d::kUnsetTimeout, tensor.device(), tensors, tensors},
                 [&](weft::ProcessGroup& group, Outputs& to) -> Works {
                   return {group.recv(to.of(tensor), weft::kAnySource, tag)};
                 });
  });
}

}  // namespace weft::python
