// SPDX-License-Identifier: Apache-2.0
// The autograd context of a thread. It follows calls, continuations and coroutines as the agent
// does.
#pragma once

#include <memory>
#include <utility>

#include <weft/engine/future/executor.h>

namespace weft::autograd {

class Context;

// The execution context of the thread that made an autograd context; `around` is the one before it.
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

// The autograd context of this thread, or of the call that it runs. Null if there is none or it has
// been released.
std::shared_ptr<Context> current_context();
// True if this thread's messages in it are recorded: not under NoGradGuard, nor in a call that was
// made under one.
bool records_calls();

}  // namespace weft::autograd
