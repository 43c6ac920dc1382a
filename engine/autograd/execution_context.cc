// SPDX-License-Identifier: Apache-2.0
#include <c10/core/GradMode.h>

#include <weft/engine/autograd/context.h>
#include <weft/engine/autograd/execution_context.h>
#include <weft/engine/call/incoming_call.h>

namespace weft::autograd {

const std::shared_ptr<weft::detail::Executor>& AutogradExecutionContext::executor() const {
  static const std::shared_ptr<weft::detail::Executor> none;
  return around_ ? around_->executor() : none;
}

std::shared_ptr<Context> current_context() {
  const weft::detail::ExecutionContext* execution_context = weft::detail::execution_context().get();
  if (execution_context == nullptr) return nullptr;
  std::shared_ptr<Context> context;
  if (const auto* own = dynamic_cast<const AutogradExecutionContext*>(execution_context)) {
    context = own->context();
  } else if (const auto* call =
                 dynamic_cast<const call::CallExecutionContext*>(execution_context)) {
    context = std::static_pointer_cast<Context>(call->call().context);
  }
  return context && !context->released() ? context : nullptr;
}

bool records_calls() {
  const auto* call =
      dynamic_cast<const call::CallExecutionContext*>(weft::detail::execution_context().get());
  return c10::GradMode::is_enabled() && (call == nullptr || !call->call().no_grad);
}

}  // namespace weft::autograd
