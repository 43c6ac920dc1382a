#include <c10/core/GradMode.h>

#include <weft/engine/autograd/ambient.h>
#include <weft/engine/autograd/context.h>
#include <weft/engine/call/incoming_call.h>

namespace weft::autograd {

const std::shared_ptr<weft::detail::Home>& ContextAmbient::home() const {
  static const std::shared_ptr<weft::detail::Home> none;
  return around_ ? around_->home() : none;
}

std::shared_ptr<Context> current_context() {
  const weft::detail::Ambient* ambient = weft::detail::ambient().get();
  if (ambient == nullptr) return nullptr;
  std::shared_ptr<Context> context;
  if (const auto* own = dynamic_cast<const ContextAmbient*>(ambient)) {
    context = own->context();
  } else if (const auto* call = dynamic_cast<const rpc::CallAmbient*>(ambient)) {
    context = call->call().context;
  }
  return context && !context->released() ? context : nullptr;
}

bool records_calls() {
  const auto* call = dynamic_cast<const rpc::CallAmbient*>(weft::detail::ambient().get());
  return c10::GradMode::is_enabled() && (call == nullptr || !call->call().no_grad);
}

}  // namespace weft::autograd
