// SPDX-License-Identifier: Apache-2.0
#include <ATen/ops/ones_like.h>
#include <c10/core/StreamGuard.h>
#include <torch/csrc/autograd/variable.h>

#include <weft/engine/autograd/backward.h>
#include <weft/engine/autograd/messages.h>
#include <weft/engine/autograd/pass.h>
#include <weft/engine/call/core.h>
#include <weft/engine/tensor/cuda_devices.h>
#include <weft/engine/tensor/tensor.h>

namespace weft::autograd {

namespace {

struct Roots {
  std::vector<torch::autograd::Edge> edges;
  variable_list gradients;
};

[[noreturn]] void wrong(std::size_t root, const std::string& what) {
  throw Error(Blame::Caller, "backward(): root " + std::to_string(root) + " " + what);
}

at::Tensor gradient_of(const at::Tensor& root, std::size_t i, const BackwardOptions& options) {
  if (options.grad_outputs.empty()) {
    if (root.numel() != 1) {
      wrong(i, "has " + std::to_string(root.numel()) +
                   " elements and is not a scalar: sum it up, or give grad_outputs");
    }
    return at::ones_like(root, at::MemoryFormat::Preserve);
  }
  const at::Tensor& given = options.grad_outputs[i];
  if (!given.defined()) wrong(i, "has an undefined gradient in grad_outputs");
  if (given.sizes() != root.sizes() || given.scalar_type() != root.scalar_type() ||
      given.device() != root.device()) {
    wrong(i, "is " + tensor::describe(root) + ", its gradient in grad_outputs is " +
                 tensor::describe(given));
  }
  return given.detach();
}

Roots checked(const std::vector<at::Tensor>& roots, const BackwardOptions& options) {
  if (roots.empty())
    throw Error(Blame::Caller, "backward(): no roots were given; give the loss: backward({loss})");
  if (!options.grad_outputs.empty() && options.grad_outputs.size() != roots.size()) {
    throw Error(Blame::Caller, "backward(): " + std::to_string(roots.size()) + " roots, but " +
                                   std::to_string(options.grad_outputs.size()) +
                                   " gradients in grad_outputs");
  }
  Roots result;
  for (std::size_t i = 0; i < roots.size(); ++i) {
    const at::Tensor& root = roots[i];
    if (!root.defined())
      wrong(i, "is undefined: give a tensor that was computed, such as the loss");
    if (!root.requires_grad()) {
      wrong(i, "(" + tensor::describe(root) +
                   ") does not require grad: nothing that it was computed from does, or it was "
                   "computed under NoGradGuard");
    }
    if (!root.grad_fn()) {
      wrong(
          i,
          "(" + tensor::describe(root) +
              ") is a leaf, which has no graph behind it: give a tensor that was computed from it");
    }
    result.edges.push_back(torch::autograd::impl::gradient_edge(root));
    result.gradients.push_back(gradient_of(root, i, options));
  }
  return result;
}

void start(const std::shared_ptr<Context>& context, Pass& pass, Roots& roots) {
  context->passes().count(pass, roots.edges);
  pass.start(roots.edges, std::move(roots.gradients));
}

// Exact: asks which messages lead to the roots, and starts the pass once that is known.
void start_planned(const std::shared_ptr<call::AgentCore>& core,
                   const std::shared_ptr<Context>& context, const std::shared_ptr<Pass>& pass,
                   const std::shared_ptr<Roots>& roots) {
  std::vector<Node*> nodes;
  for (const auto& edge : roots->edges) nodes.push_back(edge.function.get());
  // The roots' gradients are computed on the streams that are current now.
  const auto streams = tensor::CudaDevices::current_streams(core->devices().gpus());
  messages::reach(core, context, pass->name(), nodes, pass->deadline())
      .on_done([=](const Future<Outcome>& reached) {
        const Outcome how = reached.get();
        if (how.failed()) return pass->fail(how);
        if (pass->ending().outcome().done()) return;
        const PassName& name = pass->name();
        if (name.retain_graph) context->passes().remember_plan(roots->edges, name.plan);
        try {
          const c10::MultiStreamGuard current(streams);
          start(context, *pass, *roots);
        } catch (...) {
          pass->fail(context->outcome(std::current_exception(), "at the roots"));
        }
      });
}

// Begins a pass. After the checks, every error fails the pass.
std::shared_ptr<Pass> begun(const std::shared_ptr<call::AgentCore>& core,
                            const std::shared_ptr<Context>& context,
                            const std::vector<at::Tensor>& given, const BackwardOptions& options) {
  core->lifetime().require_open();
  if (context->released()) {
    throw Error(Blame::Caller, "backward(): autograd context " + to_text(context->id()) +
                                   " has been released, and its records with it: compute the roots "
                                   "again in another context");
  }
  const auto roots = std::make_shared<Roots>(checked(given, options));
  const auto limit = core->outgoing_calls().timeout();
  const Deadline deadline = limit.count() == 0 ? Deadline::never() : Deadline::in(limit);
  PassName name;
  name.context = context->id();
  name.retain_graph = options.retain_graph;
  const bool is_exact = options.mode == BackwardMode::Exact;
  const auto known = is_exact ? context->passes().planned_for(roots->edges) : std::nullopt;
  const bool makes_plan = is_exact && !known;
  if (known) name.plan = *known;
  const auto pass = context->passes().begin(core, name, makes_plan, deadline);
  try {
    makes_plan ? start_planned(core, context, pass, roots) : start(context, *pass, *roots);
  } catch (...) {
    pass->fail(context->outcome(std::current_exception(), "at the roots"));
  }
  return pass;
}

// Converts the pass's outcome into the user's future. A thread that blocks on it, or on its
// continuations, drives the agent's event loop.
Future<void> ended(const std::shared_ptr<Pass>& pass,
                   const std::shared_ptr<call::ThreadPool>& executor) {
  const Promise<void> promise(executor);
  pass->ending().outcome().on_done_light([promise, pass](const Future<Outcome>& one) {
    if (const auto error = one.error()) return promise.set_error(error);
    const Outcome& outcome = one.value();
    if (!outcome.failed()) return promise.set();
    pass->ending().told().on_done_light(
        [promise, outcome](const Future<void>&) { promise.set_error(outcome.error()); });
  });
  return promise.future();
}

}  // namespace

void backward(const std::shared_ptr<call::AgentCore>& core, const std::shared_ptr<Context>& context,
              const std::vector<at::Tensor>& roots, const BackwardOptions& options) {
  ended(begun(core, context, roots, options), core->thread_pool()).get();
}

Future<void> backward_async(const std::shared_ptr<call::AgentCore>& core,
                            const std::shared_ptr<Context>& context,
                            const std::vector<at::Tensor>& roots, const BackwardOptions& options) {
  const auto pass = begun(core, context, roots, options);
  const auto whole = ended(pass, core->thread_pool());
  context->passes().began({pass, whole});
  return whole;
}

}  // namespace weft::autograd
