#include <map>
#include <memory>
#include <mutex>

#include <weft/profiling/trace/depth.h>

namespace weft::trace {

namespace {

std::mutex mutex;  // of all()

// Never destroyed: what waits may end while the process does.
std::map<std::pair<Queue, std::string>, std::unique_ptr<Depth>>& all() {
  static auto* const made = new std::map<std::pair<Queue, std::string>, std::unique_ptr<Depth>>();
  return *made;
}

}  // namespace

Depth& depth(Queue queue, const std::string& of) {
  std::lock_guard lock(mutex);
  auto& found = all()[{queue, of}];
  if (!found) {
    found = std::make_unique<Depth>();
    found->queue = queue;
    found->of = of;
  }
  return *found;
}

std::vector<const Depth*> depths() {
  std::lock_guard lock(mutex);
  std::vector<const Depth*> found;
  for (const auto& [key, one] : all()) found.push_back(one.get());
  return found;
}

}  // namespace weft::trace
