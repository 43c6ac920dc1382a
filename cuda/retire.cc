#include <algorithm>
#include <iterator>

#include <weft/base/error.h>
#include <weft/base/log.h>
#include <weft/cuda/retire.h>
#include <weft/profiling/trace/trace.h>

namespace weft::cuda {

namespace {

constinit trace::Name reclaiming{trace::Layer::Cuda, "reclaim"};

}  // namespace

void Retirement::retire(Fence last_use, Task free) noexcept {
  std::lock_guard lock(mutex_);
  items_.push_back({std::move(last_use), std::move(free)});
}

std::size_t Retirement::reclaim() {
  std::vector<Item> ready;
  {
    std::lock_guard lock(mutex_);
    const auto rest =
        std::stable_partition(items_.begin(), items_.end(), [](const Item& i) { return !i.last_use.query(); });
    ready.assign(std::make_move_iterator(rest), std::make_move_iterator(items_.end()));
    items_.erase(rest, items_.end());
  }
  if (ready.empty()) return 0;
  trace::Range range(reclaiming);
  // One that fails must not keep the others from being freed.
  for (Item& item : ready) {
    try {
      item.free();
    } catch (const std::exception& error) {
      log::error(std::string("reclaiming a CUDA resource: ") + error.what());
    }
  }
  return ready.size();
}

bool Retirement::reclaim_all(Deadline deadline) {
  // Freeing one may retire others.
  for (;;) {
    std::vector<Fence> fences;
    {
      std::lock_guard lock(mutex_);
      for (const Item& item : items_) fences.push_back(item.last_use);
    }
    if (fences.empty()) return true;
    const bool passed = std::all_of(fences.begin(), fences.end(), [&](const Fence& f) { return f.synchronize(deadline); });
    reclaim();
    if (!passed || deadline.passed()) return passed && pending() == 0;
  }
}

std::size_t Retirement::pending() const {
  std::lock_guard lock(mutex_);
  return items_.size();
}

}  // namespace weft::cuda
