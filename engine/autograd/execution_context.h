// The autograd context of a thread: it follows calls, continuations and coroutines as the agent
// does.
#pragma once

#include <memory>
#include <utility>

#include <weft/engine/future/executor.h>

namespace weft::autograd {

class Context;

// Of the thread that made the context, around what was there before.
class AutogradExecutionContext final : public weft::detail::ExecutionContext {
 public:
  AutogradExecutionContext(weft::detail::ExecutionContextRef around,
                           std::shared_ptr<Context> context)
      : around_(std::move(around)), context_(std::move(context)) {}
  const std::shared_ptr<weft::detail::Executor>& executor() const override;
  const weft::detail::ExecutionContext* around() const override { return around_.get(); }
  const std::shared_ptr<Context>& context() const { return context_; }

 private:
  const weft::detail::ExecutionContextRef around_;
  const std::shared_ptr<Context> context_;
};

// This thread's, or that of the call that it runs. Null where there is none, or it has been
// released.
std::shared_ptr<Context> current_context();
// Whether what this thread sends in it is recorded: not under NoGradGuard, nor in a call that was
// made under one.
bool records_calls();

}  // namespace weft::autograd
