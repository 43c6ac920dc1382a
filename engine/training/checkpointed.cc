// SPDX-License-Identifier: Apache-2.0
// One node of libtorch's graph stands for the module. Its next edges are the inputs and the
// module's parameters, of sharded parameters the whole ones. In backward it runs the forward again
// and asks for the gradients of all of them (torch::autograd::grad, which accumulates nothing).
// So gradient accumulators and sharded units run in the outer backward, once, with their hooks.
#include <algorithm>
#include <atomic>
#include <set>
#include <string>
#include <string_view>
#include <unordered_set>
#include <utility>

#include <ATen/ThreadLocalState.h>
#include <ATen/autocast_mode.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/functions/accumulate_grad.h>
#include <torch/csrc/autograd/variable.h>
#include <torch/nn/module.h>

#include <weft/base/error.h>
#include <weft/engine/autograd/nodes.h>
#include <weft/engine/shard/libtorch_internals.h>
#include <weft/engine/shard/unit.h>
#include <weft/engine/training/checkpointed.h>
#include <weft/engine/training/generators.h>
#include <weft/engine/training/layers.h>

namespace weft::training::detail {

namespace {

using torch::autograd::variable_list;

// The tensors that the module's members hold, each once.
Tensors parameters_of(const torch::nn::Module& module) {
  Tensors parameters;
  std::unordered_set<const void*> seen;
  for (const at::Tensor& parameter : module.parameters()) {
    const shard::Owner owner = shard::owner_of(parameter);
    const at::Tensor& member =
        owner.unit ? owner.unit->parameters()[owner.parameter].whole : parameter;
    if (member.requires_grad() && seen.insert(member.unsafeGetTensorImpl()).second)
      parameters.push_back(member);
  }
  return parameters;
}

std::vector<c10::Device> devices_of(const Tensors& inputs, const Tensors& parameters) {
  std::vector<c10::Device> devices;
  for (const Tensors* tensors : {&inputs, &parameters}) {
    for (const at::Tensor& tensor : *tensors) {
      if (tensor.defined()) devices.push_back(tensor.device());
    }
  }
  return devices;
}

// Throws Caller while a GPU's generator is in a capture: libtorch keeps its state on the GPU then,
// and does not tell it, so the second forward could not draw the same numbers.
GeneratorStates states_of(const std::vector<c10::Device>& devices,
                          const torch::nn::Module& module) {
  try {
    return GeneratorStates(devices);
  } catch (const c10::Error& error) {
    if (std::string_view(error.what()).find("graph capture") == std::string_view::npos) throw;
    throw Error(Blame::Caller,
                "checkpointed: " + module.name() +
                    " cannot be captured into a CUDA graph: it would need the state of the GPU's "
                    "random number generator, which libtorch does not give during a capture; "
                    "capture the step without checkpointed(), or run it as it is");
  }
}

// The autocast cache holds copies of parameters as one forward has made them: without gradients
// in the first forward, and for the graph of the second one in that.
class WithoutAutocastCache {
 public:
  WithoutAutocastCache() : before_(at::autocast::is_autocast_cache_enabled()) {
    at::autocast::set_autocast_cache_enabled(false);
  }
  ~WithoutAutocastCache() { at::autocast::set_autocast_cache_enabled(before_); }
  WithoutAutocastCache(const WithoutAutocastCache&) = delete;
  WithoutAutocastCache& operator=(const WithoutAutocastCache&) = delete;

 private:
  const bool before_;
};
class OwnAutocastCache {
 public:
  OwnAutocastCache() {
    at::autocast::increment_nesting();
    at::autocast::clear_cache();
  }
  ~OwnAutocastCache() {
    at::autocast::clear_cache();
    at::autocast::decrement_nesting();
  }
  OwnAutocastCache(const OwnAutocastCache&) = delete;
  OwnAutocastCache& operator=(const OwnAutocastCache&) = delete;
};

// Running statistics have at the end the values that they had at the begin.
class SameStatistics {
 public:
  explicit SameStatistics(const torch::nn::Module& module) {
    const c10::AutoGradMode no_grad(false);
    for (const auto& layer : module.modules()) {
      if (!has_running_statistics(*layer)) continue;
      for (const at::Tensor& buffer : layer->buffers(/*recurse=*/false)) {
        if (buffer.defined()) statistics_.emplace_back(buffer, buffer.clone());
      }
    }
  }
  ~SameStatistics() {
    const c10::AutoGradMode no_grad(false);
    // An alias with a version of its own: the graph may have saved the buffer.
    for (const auto& [buffer, value] : statistics_) buffer.variable_data().copy_(value);
  }
  SameStatistics(const SameStatistics&) = delete;
  SameStatistics& operator=(const SameStatistics&) = delete;

 private:
  std::vector<std::pair<at::Tensor, at::Tensor>> statistics_;
};

// While it lives, hooks of leaves do not run: they run on the gradient that the outer backward
// accumulates, once.
class WithoutLeafHooks {
 public:
  explicit WithoutLeafHooks(const Tensors& parameters) {
    for (const at::Tensor& parameter : parameters) {
      if (!parameter.is_leaf()) continue;
      aside_.emplace_back(parameter, Hooks());
      torch::autograd::impl::hooks(parameter).swap(aside_.back().second);
    }
  }
  ~WithoutLeafHooks() {
    for (auto& [parameter, hooks] : aside_) torch::autograd::impl::hooks(parameter).swap(hooks);
  }
  WithoutLeafHooks(const WithoutLeafHooks&) = delete;
  WithoutLeafHooks& operator=(const WithoutLeafHooks&) = delete;

 private:
  using Hooks = std::vector<std::unique_ptr<torch::autograd::FunctionPreHook>>;
  std::vector<std::pair<at::Tensor, Hooks>> aside_;
};

struct OutputShape {
  explicit OutputShape(const at::Tensor& output)
      : sizes(output.sizes().vec()), dtype(output.scalar_type()) {}
  bool operator==(const OutputShape&) const = default;

  std::vector<std::int64_t> sizes;
  at::ScalarType dtype;
};

std::uint32_t version_of(const at::Tensor& tensor) {
  return tensor.is_inference() ? 0 : static_cast<std::uint32_t>(tensor._version());
}

// Holds all that the second forward needs. Its node owns it. Its functions take and return the
// defined tensors only.
class Recomputation final : public torch::CustomClassHolder {
 public:
  Recomputation(std::shared_ptr<torch::nn::Module> module, const Tensors& inputs, Forward again)
      : module_(std::move(module)),
        parameters_(parameters_of(*module_)),
        devices_(devices_of(inputs, parameters_)),
        generators_(states_of(devices_, *module_)),
        again_(std::move(again)) {
    for (const at::Tensor& input : inputs) is_defined_.push_back(input.defined());
  }

  const Tensors& parameters() const { return parameters_; }
  std::string module_name() const { return module_->name(); }

  // The outputs of the first forward that are defined.
  Tensors first(const Tensors& inputs, const Forward& forward) {
    const WithoutAutocastCache no_cache;
    std::vector<std::uint32_t> versions;
    for (const at::Tensor& input : inputs)
      versions.push_back(input.defined() ? version_of(input) : 0);
    const Tensors outputs = forward(inputs);
    for (std::size_t i = 0; i < inputs.size(); ++i) {
      if (!inputs[i].defined() || version_of(inputs[i]) == versions[i]) continue;
      throw Error(Blame::Caller,
                  "checkpointed: the forward of " + module_name() +
                      " writes to its argument in place, so it cannot run again in backward with "
                      "the same one; let it write to a copy (no inplace layers on its arguments)");
    }
    Tensors defined;
    for (const at::Tensor& output : outputs) {
      if (!output.defined()) continue;
      shapes_.emplace_back(output);
      defined.push_back(output);
    }
    return defined;
  }

  void require_first_backward() {
    if (c10::GradMode::is_enabled()) {
      throw Error(Blame::Caller,
                  "checkpointed: a backward with create_graph reaches " + module_name() +
                      ", whose intermediate results are computed again without a graph of their "
                      "own; leave create_graph out, or call the module without checkpointed()");
    }
    if (!is_used_.exchange(true)) return;
    throw Error(Blame::Caller,
                "checkpointed: a second backward reaches " + module_name() +
                    ", which computes its intermediate results again for one backward only; run "
                    "the forward once more, or call the module without checkpointed()");
  }

  // The gradients of those inputs (the defined ones) and parameters that `is_wanted` by index.
  variable_list gradients(const Tensors& saved, const variable_list& of_outputs,
                          const std::vector<bool>& is_wanted) {
    Tensors inputs;
    for (const at::Tensor& input : saved)
      inputs.push_back(input.detach().set_requires_grad(input.requires_grad()));
    const SameStatistics statistics(*module_);
    const Tensors outputs = second(inputs);
    Tensors roots;
    Tensors seeds;
    for (std::size_t i = 0; i < outputs.size(); ++i) {
      if (!of_outputs[i].defined() || !outputs[i].requires_grad()) continue;
      roots.push_back(outputs[i]);
      seeds.push_back(of_outputs[i]);
    }
    Tensors wanted;
    for (std::size_t i = 0; i < is_wanted.size(); ++i) {
      if (!is_wanted[i]) continue;
      wanted.push_back(i < inputs.size() ? inputs[i] : parameters_[i - inputs.size()]);
    }
    variable_list all(is_wanted.size());
    if (roots.empty() || wanted.empty()) return all;
    require_reached(roots, inputs);
    const WithoutLeafHooks no_hooks(parameters_);
    auto found = torch::autograd::grad(roots, wanted, seeds, /*retain_graph=*/false,
                                       /*create_graph=*/false, /*allow_unused=*/true);
    for (std::size_t i = 0, next = 0; i < all.size(); ++i) {
      if (is_wanted[i]) all[i] = std::move(found[next++]);
    }
    return all;
  }

 private:
  // The defined outputs of the second forward.
  Tensors second(const Tensors& defined) {
    Tensors inputs;
    for (std::size_t i = 0, next = 0; i < is_defined_.size(); ++i)
      inputs.push_back(is_defined_[i] ? defined[next++] : at::Tensor());
    const GeneratorStates before = states_of(devices_, *module_);
    Tensors all;
    {
      const at::ThreadLocalStateGuard as_before(thread_);
      const c10::AutoGradMode with_gradients(true);
      const OwnAutocastCache cache;
      generators_.restore();
      try {
        all = again_(inputs);
      } catch (...) {
        before.restore();
        throw;
      }
    }
    before.restore();
    Tensors outputs;
    std::vector<OutputShape> shapes;
    for (const at::Tensor& output : all) {
      if (!output.defined()) continue;
      shapes.emplace_back(output);
      outputs.push_back(output);
    }
    if (shapes == shapes_) return outputs;
    throw Error(Blame::Caller,
                "checkpointed: the forward of " + module_name() +
                    " has returned tensors of other shapes or dtypes in backward than at first; "
                    "what it computes must depend only on its arguments, parameters and random "
                    "numbers");
  }

  // Throws Caller for a leaf or a received tensor in the graph of the second forward that is
  // neither an argument nor a parameter of the module: this node has no edge to it, so it would get
  // no gradient.
  void require_reached(const Tensors& roots, const Tensors& inputs) const {
    std::set<std::pair<const torch::autograd::Node*, std::uint32_t>> seen;
    std::vector<torch::autograd::Edge> open;
    const auto visit = [&](const torch::autograd::Edge& edge) {
      if (edge.is_valid() && seen.emplace(edge.function.get(), edge.input_nr).second)
        open.push_back(edge);
    };
    for (const Tensors* const tensors : {&inputs, &parameters_}) {
      for (const at::Tensor& tensor : *tensors) {
        if (tensor.requires_grad()) visit(torch::autograd::impl::gradient_edge(tensor));
      }
    }
    // The search ends there. They stay alive: tensors refer to their accumulators weakly.
    const auto ends = std::exchange(open, {});
    for (const at::Tensor& root : roots) visit(torch::autograd::impl::gradient_edge(root));
    while (!open.empty()) {
      const torch::autograd::Edge edge = open.back();
      open.pop_back();
      if (dynamic_cast<const autograd::RecvNode*>(edge.function.get()) != nullptr) {
        throw Error(Blame::Caller,
                    "checkpointed: the forward of " + module_name() +
                        " uses the result of a remote call, or a tensor that another worker has "
                        "sent and that is not its argument, so gradients would be missing; call "
                        "the module without checkpointed(), or pass the tensor as an argument");
      }
      if (const auto* const leaf =
              dynamic_cast<const torch::autograd::AccumulateGrad*>(edge.function.get())) {
        throw Error(Blame::Caller,
                    "checkpointed: the forward of " + module_name() + " uses a tensor of shape " +
                        c10::str(leaf->variable.sizes()) +
                        " that requires a gradient and is neither its argument nor registered in "
                        "the module, so it would get none; pass it as an argument, or register it "
                        "(register_parameter, also where another module's weight is assigned to a "
                        "member)");
      }
      for (const auto& next : edge.function->next_edges()) visit(next);
    }
  }

  const std::shared_ptr<torch::nn::Module> module_;
  const Tensors parameters_;
  const std::vector<c10::Device> devices_;
  const GeneratorStates generators_;
  const at::ThreadLocalState thread_;
  const Forward again_;
  std::vector<bool> is_defined_;  // by input
  std::vector<OutputShape> shapes_;
  std::atomic<bool> is_used_{false};
};

using Shared = c10::intrusive_ptr<Recomputation>;
constexpr const char* kShared = "recomputation";

struct Checkpoint : torch::autograd::Function<Checkpoint> {
  // `tensors`: the defined inputs, then the parameters.
  static variable_list forward(torch::autograd::AutogradContext* context,
                               const std::function<Tensors()>& first, const Shared& shared,
                               at::TensorList tensors) {
    const Tensors outputs = first();
    context->set_materialize_grads(false);
    context->saved_data[kShared] = c10::IValue::make_capsule(
        c10::static_intrusive_pointer_cast<torch::CustomClassHolder>(shared));
    const auto inputs = tensors.slice(0, tensors.size() - shared->parameters().size());
    context->save_for_backward(inputs.vec());
    return outputs;
  }

  static variable_list backward(torch::autograd::AutogradContext* context,
                                const variable_list& of_outputs) {
    const auto shared =
        c10::static_intrusive_pointer_cast<Recomputation>(context->saved_data[kShared].toCapsule());
    shared->require_first_backward();
    const Tensors inputs = context->get_saved_variables();
    std::vector<bool> is_wanted;
    for (std::size_t i = 0; i < inputs.size() + shared->parameters().size(); ++i)
      is_wanted.push_back(context->needs_input_grad(i));
    variable_list gradients = shared->gradients(inputs, of_outputs, is_wanted);
    gradients.insert(gradients.begin(), 2, at::Tensor());  // of `first` and `shared`
    return gradients;
  }
};

}  // namespace

void throw_no_module() { throw Error(Blame::Caller, "checkpointed: the module is empty"); }

Tensors checkpointed_outputs(const std::shared_ptr<torch::nn::Module>& module,
                             const Tensors& inputs, const Forward& first, const Forward& again) {
  const auto shared = c10::make_intrusive<Recomputation>(module, inputs, again);
  const auto requires_grad = [](const at::Tensor& tensor) {
    return tensor.defined() && tensor.requires_grad();
  };
  if (shared->parameters().empty() && std::ranges::none_of(inputs, requires_grad))
    return first(inputs);
  Tensors tensors;
  for (const at::Tensor& input : inputs) {
    if (input.defined()) tensors.push_back(input);
  }
  tensors.insert(tensors.end(), shared->parameters().begin(), shared->parameters().end());
  std::vector<bool> is_defined;
  const std::function<Tensors()> run = [&] {
    return shared->first(inputs, [&](const Tensors& given) {
      Tensors outputs = first(given);
      for (const at::Tensor& output : outputs) is_defined.push_back(output.defined());
      return outputs;
    });
  };
  const Tensors attached = Checkpoint::apply(run, shared, at::TensorList(tensors));
  Tensors outputs;
  for (std::size_t i = 0, next = 0; i < is_defined.size(); ++i)
    outputs.push_back(is_defined[i] ? attached[next++] : at::Tensor());
  return outputs;
}

}  // namespace weft::training::detail
