// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <array>
#include <span>
#include <sstream>

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/view_as_real.h>
#include <c10/core/GradMode.h>

#include <weft/engine/group/access.h>
#include <weft/engine/group/arguments.h>
#include <weft/engine/group/core.h>
#include <weft/engine/group/leaving.h>
#include <weft/engine/group/process_group.h>
#include <weft/engine/group/sparse_sum.h>
#include <weft/engine/group/subgroups.h>
#include <weft/engine/tensor/tensor.h>
#include <weft/profiling/trace/dump.h>
#include <weft/transport/registry.h>

namespace weft {

using group::check_aligned;
using group::check_apart;
using group::check_same_kind;
using group::Core;
using group::Use;
using transport::Communicator;
using transport::PointToPoint;

namespace {

using Ops = std::vector<Op>;
using Tensors = std::vector<at::Tensor>;

std::vector<Slice> slices_of(const Tensors& tensors) {
  std::vector<Slice> slices;
  slices.reserve(tensors.size());
  for (const at::Tensor& tensor : tensors) slices.push_back(tensor::slice_of(tensor));
  return slices;
}

// The tensors that this rank writes: the given one, or none.
std::span<const at::Tensor> written(const at::Tensor& tensor, bool writes = true) {
  return {&tensor, writes ? 1U : 0U};
}

// The parts of a flat tensor other than this rank's own, in at most two pieces.
std::array<Slice, 2> all_but(const std::vector<Slice>& parts, std::size_t own) {
  const std::size_t bytes = parts.front().bytes;
  return {parts.front().part(0, own * bytes),
          parts[own].part(bytes, (parts.size() - own - 1) * bytes)};
}

std::vector<std::int64_t> sizes_of(const Tensors& tensors) {
  std::vector<std::int64_t> sizes;
  for (const at::Tensor& tensor : tensors) sizes.push_back(tensor.numel());
  return sizes;
}

// The parts of a flat tensor, one for each rank.
std::vector<Slice> parts_of(const at::Tensor& tensor, int ranks) {
  const Slice whole = tensor::slice_of(tensor);
  const std::size_t bytes = whole.bytes / static_cast<std::size_t>(ranks);
  std::vector<Slice> parts;
  for (std::size_t rank = 0; rank < static_cast<std::size_t>(ranks); ++rank)
    parts.push_back(whole.part(rank * bytes, bytes));
  return parts;
}

// A tensor's rows (dimension 0), divided between the ranks.
struct Rows {
  std::vector<std::int64_t> splits;  // rows, by rank
  std::int64_t row = 0;              // elements of one
  std::vector<Slice> slices;
  std::vector<std::int64_t> elements() const {
    std::vector<std::int64_t> all;
    for (const std::int64_t rows : splits) all.push_back(rows * row);
    return all;
  }
};

std::string shape_text(c10::IntArrayRef shape) {
  std::ostringstream text;
  text << shape;
  return text.str();
}

// Throws Caller, naming the argument, where the splits do not fit the tensor.
Rows rows_of(const std::string& operation, const std::string& name, const at::Tensor& tensor,
             std::vector<std::int64_t> splits, int ranks) {
  const auto fail = [&](const std::string& why) {
    throw Error(Blame::Caller, operation + ": " + why);
  };
  if (tensor.dim() == 0) fail(name + " has no dimension to divide; give it at least one");
  const std::int64_t rows = tensor.size(0);
  if (splits.empty()) {
    if (rows % ranks != 0) {
      fail(name + " has " + std::to_string(rows) + " rows, which " + std::to_string(ranks) +
           " ranks cannot divide equally; give " + name + "_splits");
    }
    splits.assign(static_cast<std::size_t>(ranks), rows / ranks);
  }
  if (splits.size() != static_cast<std::size_t>(ranks)) {
    fail(name + "_splits has " + std::to_string(splits.size()) + " numbers for " +
         std::to_string(ranks) + " ranks");
  }
  std::int64_t left = rows;
  for (const std::int64_t split : splits) {
    if (split < 0) fail(name + "_splits holds " + std::to_string(split) + ", which is negative");
    if (split > left) left = -1;  // a sum could overflow
    if (left < 0) break;
    left -= split;
  }
  if (left != 0) {
    fail(name + "_splits do not add up to the " + std::to_string(rows) + " rows of " + name);
  }
  Rows divided{.splits = std::move(splits), .row = rows == 0 ? 0 : tensor.numel() / rows};
  const Slice whole = tensor::slice_of(tensor);
  const std::size_t row_bytes =
      static_cast<std::size_t>(divided.row) * static_cast<std::size_t>(tensor.element_size());
  std::size_t offset = 0;
  for (const std::int64_t split : divided.splits) {
    const std::size_t bytes = static_cast<std::size_t>(split) * row_bytes;
    divided.slices.push_back(whole.part(offset, bytes));
    offset += bytes;
  }
  return divided;
}

// Issues an all_to_all. Parts may be empty here and not on other ranks, so a rank takes part
// even if all of its own are empty. `has_equal_parts`: by the form of the call, so that the ranks
// need not tell each other.
Work issue_exchange(Core& core, const char* name, Tensors tensors,
                    std::span<const at::Tensor> writes, std::span<const Slice> to,
                    std::span<const Slice> from, group::Operation::Parts parts,
                    bool has_equal_parts) {
  const at::Tensor like = tensors.front();
  return core.operations.issue(
      {.name = name,
       .fingerprint =
           [&] {
             return std::string(c10::toString(like.scalar_type())) + " on " + like.device().str();
           },
       .device = like.device(),
       .tensors = std::move(tensors),
       .writes = writes,
       .parts = [&] { return parts; },
       .may_skip = false},
      [&](Communicator& ranks, const Pin& pin, const Fence& ready, Ops& ops) {
        ops.push_back(ranks.run({.kind = transport::CollectiveKind::AllToAll,
                                 .dtype = tensor::dtype_of(like.scalar_type()),
                                 .inputs = from,
                                 .outputs = to,
                                 .has_equal_parts = has_equal_parts},
                                pin, ready));
      });
}

Tensors joined(const at::Tensor& first, Tensors list) {
  list.insert(list.begin(), first);
  return list;
}

bool all_of_one_size(const Tensors& tensors) {
  return std::all_of(tensors.begin(), tensors.end(),
                     [&](const at::Tensor& one) { return one.numel() == tensors.front().numel(); });
}

std::string with(const at::Tensor& tensor, ReduceOp op) {
  return tensor::describe(tensor) + ", " + std::string(name(op));
}
std::string with(const at::Tensor& tensor, int root) {
  return tensor::describe(tensor) + ", root " + std::to_string(root);
}

void check_flat(const std::string& operation, const at::Tensor& flat, const char* flat_name,
                const at::Tensor& part, int ranks) {
  if (flat.numel() == part.numel() * ranks) return;
  throw Error(Blame::Caller, operation + ": " + flat_name + " has " + std::to_string(flat.numel()) +
                                 " elements; it takes " + std::to_string(ranks) + " x " +
                                 std::to_string(part.numel()));
}

// Operations that gather take complex tensors as their real views, on all ranks, so that one kind
// may be gathered into the other. Tensors that are not plain stay as they are; the checks refuse
// them.
at::Tensor as_real(const at::Tensor& tensor) {
  if (!tensor.defined() || !tensor.is_complex() || tensor.layout() != at::kStrided ||
      tensor.is_conj())
    return tensor;
  const at::AutoDispatchBelowADInplaceOrView bytes_only;
  return at::view_as_real(tensor);
}
void as_real(Tensors& tensors) {
  for (at::Tensor& tensor : tensors) tensor = as_real(tensor);
}

void sum_sparse(const ProcessGroup& group, at::Tensor& tensor, ReduceOp op) {
  if (op != ReduceOp::Sum) {
    throw Error(Blame::Unsupported,
                "all_reduce: sparse tensors can only be added up, not reduced with " +
                    std::string(name(op)) + "; scale the values, or reduce .to_dense()");
  }
  const c10::AutoGradMode no_grad(false);
  tensor.copy_(group::SparseSum(group, tensor).finish());
}

}  // namespace

std::vector<BackendInfo> available_backends() {
  std::vector<BackendInfo> infos;
  for (const transport::Backend& backend : transport::backends()) {
    BackendInfo info;
    info.name = backend.name;
    const auto opened = backend.open();
    info.usable = opened.ok();
    if (!opened) info.why_not = opened.error().text();
    infos.push_back(std::move(info));
  }
  return infos;
}

Core& ProcessGroup::core() const {
  if (!core_)
    throw Error(
        Blame::Caller,
        "this process group is empty: this rank is not a member, or it was default-constructed");
  core_->require_own();
  return *core_;
}

int ProcessGroup::rank() const { return core().options.rank; }
int ProcessGroup::size() const { return core().options.size; }
c10::Device ProcessGroup::device() const { return core().options.device; }
std::string ProcessGroup::backend(c10::Device device) const {
  return core().carriers.of(device).backend;
}
std::string ProcessGroup::transport(int peer) const {
  core().options.check_rank(peer, "transport: peer");
  return core().carriers.transport(peer);
}
std::vector<std::string> ProcessGroup::waiting_for() const {
  return core().options.job->waits->waiting_for(core().options.name);
}
c10::intrusive_ptr<c10d::Store> ProcessGroup::store() const { return core().options.store; }

int ProcessGroup::global_rank(int group_rank) const {
  core().options.check_rank(group_rank, "global_rank:");
  return core().options.global_ranks[static_cast<std::size_t>(group_rank)];
}

const std::vector<int>& ProcessGroup::ranks() const { return core().options.global_ranks; }

Work ProcessGroup::broadcast(at::Tensor tensor, int root) {
  return limited(group::broadcast(*this, tensor, root));
}

Work group::broadcast(const ProcessGroup& group, const at::Tensor& tensor, int root,
                      Fence begins_after, transport::Training training) {
  Core& core = Core::of(group);
  check_tensor(core, "broadcast", "tensor", tensor,
               core.options.rank == root ? Use::Reads : Use::Writes);
  core.options.check_rank(root, "broadcast: root");
  auto data = tensor::elements_of(tensor);
  data.training = training;
  return core.operations.issue(
      {.name = "broadcast",
       .fingerprint = [&] { return with(tensor, root) + transport::training_text(training); },
       .device = tensor.device(),
       .tensors = {tensor},
       .writes = written(tensor, core.options.rank != root),
       .root = root,
       .training = training,
       .begins_after = std::move(begins_after)},
      [&](Communicator& ranks, const Pin& pin, const Fence& ready, Ops& ops) {
        ops.push_back(ranks.broadcast(data, root, pin, ready));
      });
}

Work ProcessGroup::reduce(at::Tensor tensor, int root, ReduceOp op) {
  check_tensor(core(), "reduce", "tensor", tensor, rank() == root ? Use::Writes : Use::Reads);
  core().options.check_rank(root, "reduce: root");
  check_reduction(core(), "reduce", tensor, op);
  const auto data = tensor::elements_of(tensor);
  return limited(core().operations.issue(
      {.name = "reduce",
       .fingerprint = [&] { return with(tensor, op) + ", root " + std::to_string(root); },
       .device = tensor.device(),
       .tensors = {tensor},
       .writes = written(tensor, rank() == root),
       .reduction = op,
       .root = root},
      [&](Communicator& ranks, const Pin& pin, const Fence& ready, Ops& ops) {
        ops.push_back(ranks.reduce(data, root, op, pin, ready));
      }));
}

Work ProcessGroup::all_reduce(at::Tensor tensor, ReduceOp op) {
  if (tensor.defined() && tensor.layout() == at::kSparse) {
    sum_sparse(*this, tensor, op);
    return {};
  }
  return limited(group::all_reduce(*this, tensor, op));
}

Work group::all_reduce(const ProcessGroup& group, const at::Tensor& tensor, ReduceOp op,
                       transport::Training training) {
  Core& core = Core::of(group);
  check_tensor(core, "all_reduce", "tensor", tensor, Use::Writes);
  check_reduction(core, "all_reduce", tensor, op);
  auto data = tensor::elements_of(tensor);
  data.training = training;
  const auto fingerprint = [&] { return with(tensor, op) + transport::training_text(training); };
  return core.operations.issue(
      {.name = "all_reduce",
       .fingerprint = fingerprint,
       .device = tensor.device(),
       .tensors = {tensor},
       .writes = written(tensor),
       .reduction = op,
       .training = training},
      [&](Communicator& ranks, const Pin& pin, const Fence& ready, Ops& ops) {
        ops.push_back(ranks.all_reduce(data, op, pin, ready));
      });
}

Work ProcessGroup::all_gather(Tensors outputs, at::Tensor input) {
  const Tensors given = outputs;
  input = as_real(input);
  as_real(outputs);
  check_tensor(core(), "all_gather", "input", input, Use::Reads);
  check_list(core(), "all_gather", "outputs", outputs, input, /*same_shape=*/true, Use::Writes);
  const auto to = slices_of(outputs);
  const auto from = tensor::elements_of(input);
  check_apart("all_gather", {{"outputs", to, rank(), true}, {"input", {&from.slice, 1}, 0}});
  return limited(core().operations.issue(
      {.name = "all_gather",
       .fingerprint = [&] { return tensor::describe(input); },
       .device = input.device(),
       .tensors = joined(input, std::move(outputs)),
       .writes = given},
      [&](Communicator& ranks, const Pin& pin, const Fence& ready, Ops& ops) {
        ops.push_back(ranks.all_gather(to, from, pin, ready));
      }));
}

Work ProcessGroup::all_gather_into(at::Tensor output, at::Tensor input) {
  const at::Tensor given = output;
  input = as_real(input);
  output = as_real(output);
  check_tensor(core(), "all_gather_into", "input", input, Use::Reads);
  check_tensor(core(), "all_gather_into", "output", output, Use::Writes);
  check_same_kind("all_gather_into", "output", output, input);
  check_flat("all_gather_into", output, "output", input, size());
  const auto to = parts_of(output, size());
  const auto from = tensor::elements_of(input);
  const auto own = static_cast<std::size_t>(rank());
  const auto others = all_but(to, own);
  check_apart("all_gather_into", {{"output", others, -1, true},
                                  {"output", {&to[own], 1}, 0, true},
                                  {"input", {&from.slice, 1}, 0}});
  return limited(core().operations.issue(
      {.name = "all_gather_into",
       .fingerprint = [&] { return tensor::describe(input); },
       .device = input.device(),
       .tensors = {input, output},
       .writes = written(given)},
      [&](Communicator& ranks, const Pin& pin, const Fence& ready, Ops& ops) {
        ops.push_back(ranks.all_gather(to, from, pin, ready));
      }));
}

Work ProcessGroup::gather(Tensors outputs, at::Tensor input, int root) {
  const Tensors given = outputs;
  input = as_real(input);
  as_real(outputs);
  check_tensor(core(), "gather", "input", input, Use::Reads);
  core().options.check_rank(root, "gather: root");
  if (rank() == root) {
    check_list(core(), "gather", "outputs", outputs, input, /*same_shape=*/true, Use::Writes);
  } else if (!outputs.empty()) {
    throw Error(Blame::Caller, "gather: outputs must be empty on ranks other than the root (" +
                                   std::to_string(root) + ")");
  }
  const auto to = slices_of(outputs);
  const auto from = tensor::elements_of(input);
  check_apart("gather", {{"outputs", to, rank(), true}, {"input", {&from.slice, 1}, 0}});
  return limited(core().operations.issue(
      {.name = "gather",
       .fingerprint = [&] { return with(input, root); },
       .device = input.device(),
       .tensors = joined(input, std::move(outputs)),
       .writes = given,
       .root = root},
      [&](Communicator& ranks, const Pin& pin, const Fence& ready, Ops& ops) {
        ops.push_back(ranks.gather(to, from, root, pin, ready));
      }));
}

Work ProcessGroup::scatter(at::Tensor output, Tensors inputs, int root) {
  check_tensor(core(), "scatter", "output", output, Use::Writes);
  core().options.check_rank(root, "scatter: root");
  if (rank() == root) {
    check_list(core(), "scatter", "inputs", inputs, output, /*same_shape=*/true, Use::Reads);
  } else if (!inputs.empty()) {
    throw Error(Blame::Caller, "scatter: inputs must be empty on ranks other than the root (" +
                                   std::to_string(root) + ")");
  }
  const auto from = slices_of(inputs);
  const auto to = tensor::elements_of(output);
  check_apart("scatter", {{"inputs", from, rank()}, {"output", {&to.slice, 1}, 0, true}});
  return limited(core().operations.issue(
      {.name = "scatter",
       .fingerprint = [&] { return with(output, root); },
       .device = output.device(),
       .tensors = joined(output, std::move(inputs)),
       .writes = written(output),
       .root = root},
      [&](Communicator& ranks, const Pin& pin, const Fence& ready, Ops& ops) {
        ops.push_back(ranks.scatter(to, from, root, pin, ready));
      }));
}

Work ProcessGroup::reduce_scatter(at::Tensor output, Tensors inputs, ReduceOp op) {
  check_tensor(core(), "reduce_scatter", "output", output, Use::Writes);
  check_list(core(), "reduce_scatter", "inputs", inputs, output, /*same_shape=*/false, Use::Reads);
  check_reduction(core(), "reduce_scatter", output, op);
  for (const at::Tensor& input : inputs) check_aligned("reduce_scatter", input);
  const auto from = slices_of(inputs);
  const auto to = tensor::elements_of(output);
  check_apart("reduce_scatter", {{"inputs", from, rank()}, {"output", {&to.slice, 1}, 0, true}});
  const bool even = all_of_one_size(inputs);
  const auto fingerprint = [&] {
    std::string all;
    for (const at::Tensor& input : inputs) all += with(input, op) + "; ";
    return all;
  };
  // For parts of different sizes: one reduction to each rank, this rank's own in place.
  const auto copy_own_part = [&, own = inputs[static_cast<std::size_t>(rank())]]() mutable {
    // Like backends, this writes bytes without regard to autograd.
    const at::AutoDispatchBelowADInplaceOrView bytes_only;
    output.copy_(own, /*non_blocking=*/true);
  };
  Tensors pinned = inputs;  // the first is alike on all ranks; outputs may differ
  pinned.push_back(output);
  return limited(core().operations.issue(
      {.name = "reduce_scatter",
       .fingerprint = fingerprint,
       .device = output.device(),
       .tensors = std::move(pinned),
       .writes = written(output),
       .reduction = op,
       .prepare = even ? std::function<void()>() : copy_own_part},
      [&](Communicator& ranks, const Pin& pin, const Fence& ready, Ops& ops) {
        if (even) {
          ops.push_back(ranks.reduce_scatter(to, from, op, pin, ready));
          return;
        }
        for (int root = 0; root < size(); ++root) {
          const auto part = from[static_cast<std::size_t>(root)];
          if (part.bytes == 0) continue;
          const auto data = root == rank() ? to : transport::Elements{part, to.dtype};
          ops.push_back(ranks.reduce(data, root, op, pin, ready));
        }
      }));
}

Work ProcessGroup::reduce_scatter_into(at::Tensor output, at::Tensor input, ReduceOp op) {
  check_tensor(core(), "reduce_scatter_into", "output", output, Use::Writes);
  check_tensor(core(), "reduce_scatter_into", "input", input, Use::Reads);
  check_same_kind("reduce_scatter_into", "input", input, output);
  check_flat("reduce_scatter_into", input, "input", output, size());
  check_reduction(core(), "reduce_scatter_into", output, op);
  check_aligned("reduce_scatter_into", input);
  const auto from = parts_of(input, size());
  const auto to = tensor::elements_of(output);
  const auto own = static_cast<std::size_t>(rank());
  const auto others = all_but(from, own);
  check_apart(
      "reduce_scatter_into",
      {{"input", others, -1}, {"input", {&from[own], 1}, 0}, {"output", {&to.slice, 1}, 0, true}});
  return limited(core().operations.issue(
      {.name = "reduce_scatter_into",
       .fingerprint = [&] { return with(output, op); },
       .device = output.device(),
       .tensors = {output, input},
       .writes = written(output),
       .reduction = op},
      [&](Communicator& ranks, const Pin& pin, const Fence& ready, Ops& ops) {
        ops.push_back(ranks.reduce_scatter(to, from, op, pin, ready));
      }));
}

Work ProcessGroup::all_to_all(Tensors outputs, Tensors inputs) {
  if (inputs.empty())
    throw Error(Blame::Caller, "all_to_all: inputs is empty; it takes one tensor for each rank");
  const at::Tensor like = inputs.front();
  const auto check = [&](const char* name, const Tensors& list, Use use) {
    if (static_cast<int>(list.size()) != size()) {
      throw Error(Blame::Caller,
                  std::string("all_to_all: ") + name + " holds " + std::to_string(list.size()) +
                      (list.size() == 1 ? " tensor" : " tensors") +
                      "; it takes one for each of the " + std::to_string(size()) + " ranks");
    }
    for (const at::Tensor& tensor : list) {
      check_tensor(core(), "all_to_all", name, tensor, use);
      check_same_kind("all_to_all", name, tensor, like);
    }
  };
  check("inputs", inputs, Use::Reads);
  check("outputs", outputs, Use::Writes);
  const auto own = static_cast<std::size_t>(rank());
  if (outputs[own].numel() != inputs[own].numel()) {
    throw Error(Blame::Caller, "all_to_all: this rank's own part has " +
                                   std::to_string(inputs[own].numel()) + " elements going in and " +
                                   std::to_string(outputs[own].numel()) + " coming out");
  }
  const auto to = slices_of(outputs);
  const auto from = slices_of(inputs);
  check_apart("all_to_all", {{"outputs", to, rank(), true}, {"inputs", from, rank()}});
  Tensors pinned = outputs;
  pinned.insert(pinned.end(), inputs.begin(), inputs.end());
  return limited(issue_exchange(core(), "all_to_all", std::move(pinned), outputs, to, from,
                                {sizes_of(inputs), sizes_of(outputs)},
                                /*has_equal_parts=*/false));
}

Work ProcessGroup::all_to_all_single(at::Tensor output, at::Tensor input,
                                     std::vector<std::int64_t> output_splits,
                                     std::vector<std::int64_t> input_splits) {
  const char* const name = "all_to_all_single";
  check_tensor(core(), name, "input", input, Use::Reads);
  check_tensor(core(), name, "output", output, Use::Writes);
  check_same_kind(name, "output", output, input);
  const bool divides_equally = input_splits.empty() && output_splits.empty();
  const Rows sends = rows_of(name, "input", input, std::move(input_splits), size());
  const Rows takes = rows_of(name, "output", output, std::move(output_splits), size());
  if (input.sizes().slice(1) != output.sizes().slice(1)) {
    throw Error(Blame::Caller, std::string(name) + ": the rows of input have the shape " +
                                   shape_text(input.sizes().slice(1)) + ", those of output " +
                                   shape_text(output.sizes().slice(1)));
  }
  const auto own = static_cast<std::size_t>(rank());
  if (takes.splits[own] != sends.splits[own]) {
    throw Error(Blame::Caller, std::string(name) + ": this rank's own part has " +
                                   std::to_string(sends.splits[own]) +
                                   " rows in input_splits and " +
                                   std::to_string(takes.splits[own]) + " in output_splits");
  }
  check_apart(name, {{"output", takes.slices, rank(), true}, {"input", sends.slices, rank()}});
  return limited(issue_exchange(core(), name, {output, input}, written(output), takes.slices,
                                sends.slices, {sends.elements(), takes.elements()},
                                divides_equally));
}

Work ProcessGroup::send(at::Tensor tensor, int to, int tag) {
  check_tensor(core(), "send", "tensor", tensor, Use::Reads);
  core().options.check_rank(to, "send: to");
  if (to == rank())
    throw Error(Blame::Caller,
                "send: rank " + std::to_string(to) + " is this rank; copy the tensor instead");
  if (tag < 0) throw Error(Blame::Caller, "send: tag " + std::to_string(tag) + " is negative");
  const auto data = tensor::elements_of(tensor);
  return limited(
      core().operations.issue_message(tensor, to, /*is_send=*/true, tag,
                                      [&](PointToPoint& ranks, const Pin& pin, const Fence& ready) {
                                        return ranks.send(data, to, tag, pin, ready);
                                      }));
}

Work ProcessGroup::recv(at::Tensor tensor, int from, int tag) {
  check_tensor(core(), "recv", "tensor", tensor, Use::Writes);
  if (from != kAnySource) core().options.check_rank(from, "recv: from");
  if (from == rank())
    throw Error(Blame::Caller,
                "recv: rank " + std::to_string(from) + " is this rank; copy the tensor instead");
  if (tag < 0) throw Error(Blame::Caller, "recv: tag " + std::to_string(tag) + " is negative");
  const auto data = tensor::elements_of(tensor);
  return limited(
      core().operations.issue_message(tensor, from, /*is_send=*/false, tag,
                                      [&](PointToPoint& ranks, const Pin& pin, const Fence& ready) {
                                        return ranks.recv(data, from, tag, pin, ready);
                                      }));
}

Work ProcessGroup::barrier() {
  return limited(core().operations.issue({.name = "barrier",
                                          .fingerprint = [] { return std::string(); },
                                          .device = core().carriers.barrier_device(),
                                          .tensors = {},
                                          .host_waits = true,
                                          .on_all = true},
                                         [](Communicator& ranks, const Pin&, const Fence& ready,
                                            Ops& ops) { ops.push_back(ranks.barrier(ready)); }));
}

void ProcessGroup::monitored_barrier(std::chrono::milliseconds timeout) {
  core().operations.throw_if_refused();
  core().monitored_barrier.meet(timeout == kGroupTimeout && limit_.count() > 0 ? limit_ : timeout);
}

ProcessGroup ProcessGroup::new_group(std::vector<int> ranks, ProcessGroupOptions options) {
  return group::new_group(core(), ranks, options);
}

std::vector<int> ProcessGroup::living_ranks() const { return core().ledger->living(); }

ProcessGroup ProcessGroup::split(int color, int key) { return group::split(core(), color, key); }

std::optional<Error> ProcessGroup::error() const { return core().failure.error(); }

ProcessGroup ProcessGroup::with_timeout(std::chrono::milliseconds limit) const {
  const auto whole = core().options.timeout;
  if (limit.count() <= 0 || limit > whole) {
    throw Error(Blame::Caller, "with_timeout " + core().options.place() + ": a limit of " +
                                   weft::describe(limit) +
                                   "; it must be positive, and at most the group's timeout of " +
                                   weft::describe(whole) +
                                   " (ProcessGroupOptions::timeout), which holds in any case");
  }
  ProcessGroup limited(*this);
  limited.limit_ = limit;
  return limited;
}

Work ProcessGroup::limited(Work work) const {
  return limit_.count() > 0 ? core().operations.limited(std::move(work), limit_) : std::move(work);
}

void ProcessGroup::leave(std::chrono::milliseconds limit) { group::leave(core(), limit); }

void ProcessGroup::abort(std::string reason) { core().failure.abort(reason); }

std::string ProcessGroup::dump() const {
  return trace::dump("asked for " + core().options.place());
}

}  // namespace weft
