// SPDX-License-Identifier: Apache-2.0
#include <utility>

#include <weft/engine/future/executor.h>
#include <weft/engine/future/thread_executor.h>

namespace weft::detail {

namespace {

thread_local ExecutionContextRef current;

}  // namespace

Executor*& thread_executor() {
  static thread_local Executor* executor = nullptr;
  return executor;
}

const ExecutionContextRef& execution_context() { return current; }

std::shared_ptr<Executor> current_executor() { return current ? current->executor() : nullptr; }

ExecutionContextScope::ExecutionContextScope(ExecutionContextRef execution_context)
    : before_(std::exchange(current, std::move(execution_context))) {}

ExecutionContextScope::~ExecutionContextScope() { current = std::move(before_); }

Task in_this_execution_context(Task task) {
  if (!current) return task;
  return Task([execution_context = current, task = std::move(task)]() mutable {
    const ExecutionContextScope scope(std::move(execution_context));
    task();
  });
}

}  // namespace weft::detail
