// SPDX-License-Identifier: Apache-2.0
#include <map>
#include <memory>
#include <string>
#include <string_view>

#include <weft/base/fork_mutex.h>
#include <weft/base/mutex.h>
#include <weft/profiling/trace/depth.h>

namespace weft::trace {

namespace {

constinit ForkMutex mutex(ForkOrder::Counts);
constexpr std::string_view kOthers = "others";

// Never destroyed, because waiting items may end while the process ends.
std::map<std::pair<Queue, std::string>, std::unique_ptr<Depth>>& all() WEFT_REQUIRES(mutex) {
  static auto* const made = new std::map<std::pair<Queue, std::string>, std::unique_ptr<Depth>>();
  return *made;
}

}  // namespace

Depth& depth(Queue queue, const std::string& of) {
  MutexLock lock(mutex);
  const auto known = all().find({queue, of});
  if (known != all().end()) return *known->second;
  const std::string name(all().size() < kMostDepths ? std::string_view(of) : kOthers);
  auto& found = all()[{queue, name}];
  if (!found) {
    found = std::make_unique<Depth>();
    found->queue = queue;
    found->of = name;
  }
  return *found;
}

std::vector<const Depth*> depths() {
  MutexLock lock(mutex);
  std::vector<const Depth*> found;
  for (const auto& [key, one] : all()) found.push_back(one.get());
  return found;
}

}  // namespace weft::trace
