#include <utility>

#include <weft/engine/future/executor.h>
#include <weft/engine/future/thread_executor.h>

namespace weft::detail {

namespace {

thread_local AmbientRef current;

}  // namespace

Home*& thread_home() {
  static thread_local Home* home = nullptr;
  return home;
}

const AmbientRef& ambient() { return current; }

std::shared_ptr<Home> ambient_home() { return current ? current->home() : nullptr; }

AmbientScope::AmbientScope(AmbientRef ambient)
    : before_(std::exchange(current, std::move(ambient))) {}

AmbientScope::~AmbientScope() { current = std::move(before_); }

Task in_this_ambient(Task task) {
  if (!current) return task;
  return Task([ambient = current, task = std::move(task)]() mutable {
    const AmbientScope scope(std::move(ambient));
    task();
  });
}

}  // namespace weft::detail
