// SPDX-License-Identifier: Apache-2.0
#include <functional>

#include <ATen/ops/empty_like.h>
#include <ATen/ops/zeros_like.h>
#include <c10/core/GradMode.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/functions/utils.h>

#include <weft/engine/group/functional.h>
#include <weft/engine/tensor/torch_releases.h>

namespace weft::functional {

namespace {

using torch::autograd::variable_list;
using Step = std::function<variable_list(const variable_list&)>;

// The gradient function of a collective's results.
class CollectiveNode final : public torch::autograd::Node {
 public:
  CollectiveNode(const char* of, Step backward) : of_(of), backward_(std::move(backward)) {}
  std::string name() const override { return "weft::functional::" + std::string(of_); }
  // Outputs without a gradient get zeros: no loss of this rank depends on them, but other ranks'
  // losses may.
  variable_list apply(variable_list&& gradients) override {
    for (std::size_t i = 0; i < gradients.size(); ++i) {
      if (!gradients[i].defined()) gradients[i] = input_metadata(i).zeros_like();
    }
    return backward_(gradients);
  }

 private:
  const char* const of_;
  const Step backward_;
};

// The values without autograd; a view if possible.
at::Tensor plain(const at::Tensor& tensor) {
  return tensor.detach().resolve_conj().resolve_neg().contiguous();
}

variable_list plain(const variable_list& tensors) {
  variable_list result;
  for (const at::Tensor& tensor : tensors) result.push_back(plain(tensor));
  return result;
}

at::Tensor room_for(const at::Tensor& tensor) {
  return at::empty_like(tensor, at::MemoryFormat::Contiguous);
}

variable_list room_for(const variable_list& tensors) {
  variable_list result;
  for (const at::Tensor& tensor : tensors) result.push_back(room_for(tensor));
  return result;
}

variable_list zeros_for(const variable_list& tensors) {
  variable_list result;
  for (const at::Tensor& tensor : tensors) result.push_back(at::zeros_like(tensor));
  return result;
}

variable_list of_each_rank(const at::Tensor& tensor, const ProcessGroup& group) {
  return variable_list(static_cast<std::size_t>(group.size()), tensor);
}

// The gradient of an input: of an average, its share.
at::Tensor share_of(const at::Tensor& gradient, ReduceOp op, const ProcessGroup& group) {
  return op == ReduceOp::Avg ? gradient.div(group.size()) : gradient;
}

[[noreturn]] void refuse(const char* what, const std::string& why) {
  throw Error(Blame::Caller, "functional::" + std::string(what) + ": " + why);
}

void require_gradient(const char* what, ReduceOp op) {
  if (op == ReduceOp::Sum || op == ReduceOp::Avg) return;
  refuse(what, std::string(name(op)) +
                   " has no gradient here; use Sum or Avg, or the group's own " + what +
                   " on tensor.detach()");
}

void require_one_each(const char* what, const variable_list& tensors, const ProcessGroup& group) {
  if (static_cast<int>(tensors.size()) == group.size()) return;
  refuse(what,
         std::to_string(tensors.size()) + (tensors.size() == 1 ? " tensor is" : " tensors are") +
             " given; it takes one for each of the " + std::to_string(group.size()) + " ranks");
}

// Runs `forward` on the inputs. If gradients are enabled, connects its results to the inputs by
// `backward`, which returns the inputs' gradients for those of the results. Both get plain tensors,
// or tensors with a graph when a backward pass is itself differentiated.
variable_list run(const char* what, const variable_list& inputs, const Step& forward,
                  Step backward) {
  for (const at::Tensor& input : inputs) {
    if (!input.defined()) refuse(what, "a tensor is undefined");
    if (input.layout() != at::kStrided)
      refuse(what, "a tensor is sparse; only dense ones have gradients here (to_dense())");
    if (input.scalar_type() != inputs.front().scalar_type() ||
        input.device() != inputs.front().device() || input.sizes() != inputs.front().sizes()) {
      refuse(what, "the tensors differ in shape, dtype or device; those of one call must be alike");
    }
  }
  const bool leads = c10::GradMode::is_enabled() &&
                     torch::autograd::isDifferentiableType(inputs.front().scalar_type());
  variable_list results = forward(plain(inputs));
  if (!leads) return results;
  const auto node = make_node<CollectiveNode>(what, std::move(backward));
  for (const at::Tensor& input : inputs) {
    node->add_next_edge(input.requires_grad() ? torch::autograd::impl::gradient_edge(input)
                                              : torch::autograd::Edge());
  }
  torch::autograd::set_history(results, node);
  return results;
}

}  // namespace

at::Tensor broadcast(const at::Tensor& tensor, int root, ProcessGroup group) {
  const auto forward = [&](const variable_list& in) -> variable_list {
    const at::Tensor out = group.rank() == root ? in[0].clone() : room_for(in[0]);
    group.broadcast(out, root).wait();
    return {out};
  };
  return run("broadcast", {tensor}, forward,
             [group, root](const variable_list& out) -> variable_list {
               return {reduce(out[0], root, group)};
             })[0];
}

at::Tensor reduce(const at::Tensor& tensor, int root, ProcessGroup group, ReduceOp op) {
  require_gradient("reduce", op);
  const auto forward = [&](const variable_list& in) -> variable_list {
    const at::Tensor out = in[0].clone();
    group.reduce(out, root, op).wait();
    if (group.rank() != root) out.zero_();
    return {out};
  };
  return run("reduce", {tensor}, forward,
             [group, root, op](const variable_list& out) -> variable_list {
               return {share_of(broadcast(out[0], root, group), op, group)};
             })[0];
}

at::Tensor all_reduce(const at::Tensor& tensor, ProcessGroup group, ReduceOp op) {
  require_gradient("all_reduce", op);
  const auto forward = [&](const variable_list& in) -> variable_list {
    const at::Tensor out = in[0].clone();
    group.all_reduce(out, op).wait();
    return {out};
  };
  return run("all_reduce", {tensor}, forward,
             [group, op](const variable_list& out) -> variable_list {
               return {all_reduce(out[0], group, op)};
             })[0];
}

std::vector<at::Tensor> all_gather(const at::Tensor& tensor, ProcessGroup group) {
  const auto forward = [&](const variable_list& in) {
    const variable_list out = room_for(of_each_rank(in[0], group));
    group.all_gather(out, in[0]).wait();
    return out;
  };
  return run("all_gather", {tensor}, forward, [group](const variable_list& out) -> variable_list {
    return {reduce_scatter(out, group)};
  });
}

std::vector<at::Tensor> gather(const at::Tensor& tensor, int root, ProcessGroup group) {
  const auto forward = [&](const variable_list& in) {
    const variable_list all = of_each_rank(in[0], group);
    const variable_list out = group.rank() == root ? room_for(all) : zeros_for(all);
    group.gather(group.rank() == root ? out : variable_list(), in[0], root).wait();
    return out;
  };
  return run("gather", {tensor}, forward, [group, root](const variable_list& out) -> variable_list {
    return {scatter(out, root, group)};
  });
}

at::Tensor scatter(const std::vector<at::Tensor>& tensors, int root, ProcessGroup group) {
  require_one_each("scatter", tensors, group);
  const auto forward = [&](const variable_list& in) -> variable_list {
    const at::Tensor out = room_for(in[0]);
    group.scatter(out, group.rank() == root ? in : variable_list(), root).wait();
    return {out};
  };
  return run("scatter", tensors, forward,
             [group, root](const variable_list& out) { return gather(out[0], root, group); })[0];
}

at::Tensor reduce_scatter(const std::vector<at::Tensor>& tensors, ProcessGroup group, ReduceOp op) {
  require_gradient("reduce_scatter", op);
  require_one_each("reduce_scatter", tensors, group);
  const auto forward = [&](const variable_list& in) -> variable_list {
    const at::Tensor out = room_for(in[0]);
    group.reduce_scatter(out, in, op).wait();
    return {out};
  };
  return run("reduce_scatter", tensors, forward, [group, op](const variable_list& out) {
    return all_gather(share_of(out[0], op, group), group);
  })[0];
}

std::vector<at::Tensor> all_to_all(const std::vector<at::Tensor>& tensors, ProcessGroup group) {
  require_one_each("all_to_all", tensors, group);
  const auto forward = [&](const variable_list& in) {
    const variable_list out = room_for(in);
    group.all_to_all(out, in).wait();
    return out;
  };
  return run("all_to_all", tensors, forward,
             [group](const variable_list& out) { return all_to_all(out, group); });
}

}  // namespace weft::functional
