// SPDX-License-Identifier: Apache-2.0
#include <weft/engine/autograd/autograd_context.h>
#include <weft/engine/autograd/backward.h>
#include <weft/engine/autograd/context.h>
#include <weft/engine/autograd/contexts.h>
#include <weft/engine/autograd/execution_context.h>
#include <weft/engine/call/calls.h>
#include <weft/engine/call/core.h>

namespace weft {

namespace {

std::shared_ptr<autograd::Context> begin(const rpc::Agent& agent) {
  const auto& core = call::detail::CoreCalls::of(agent);
  core->lifetime().require_open();
  if (const auto context = autograd::current_context()) {
    throw Error(Blame::Caller, "AutogradContext: this thread is inside autograd context " +
                                   autograd::to_text(context->id()) +
                                   " already; a thread has one at a time");
  }
  return autograd::contexts_of(*core).make();
}

}  // namespace

AutogradContext::AutogradContext(const rpc::Agent& agent)
    : core_(call::detail::CoreCalls::of(agent)), context_(begin(agent)) {
  scope_.emplace(std::make_shared<autograd::AutogradExecutionContext>(
      weft::detail::execution_context(), context_));
}

AutogradContext::AutogradContext(std::shared_ptr<call::AgentCore> core,
                                 std::shared_ptr<autograd::Context> context)
    : core_(std::move(core)), context_(std::move(context)) {}

AutogradContext::~AutogradContext() {
  if (!scope_) return;
  scope_.reset();
  if (core_->lifetime().is_inherited()) return;
  try {
    release();
  } catch (const std::exception&) {
    // The agent has left, and its contexts with it.
  }
}

AutogradContext AutogradContext::current() {
  auto context = autograd::current_context();
  if (!context) {
    throw Error(Blame::Caller,
                "AutogradContext::current(): this thread is neither inside an AutogradContext nor "
                "runs a call made in one, or the context has been released");
  }
  auto core = context->core();
  return AutogradContext(std::move(core), std::move(context));
}

std::uint64_t AutogradContext::id() const { return context_->id(); }

void AutogradContext::backward(const std::vector<at::Tensor>& roots,
                               const BackwardOptions& options) {
  autograd::backward(core_, context_, roots, options);
}

Future<void> AutogradContext::backward_async(const std::vector<at::Tensor>& roots,
                                             const BackwardOptions& options) {
  return autograd::backward_async(core_, context_, roots, options);
}

at::Tensor AutogradContext::gradient(const at::Tensor& parameter) const {
  return context_->passes().gradient(parameter);
}

std::vector<std::pair<at::Tensor, at::Tensor>> AutogradContext::gradients() const {
  return context_->passes().gradients();
}

void AutogradContext::release() {
  autograd::contexts_of(*core_).release(context_->id(), "it was released");
}

}  // namespace weft
