// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <exception>
#include <string>
#include <utility>

#include <weft/base/error.h>
#include <weft/base/log.h>
#include <weft/base/mutex.h>
#include <weft/cuda/retire.h>
#include <weft/profiling/trace/trace.h>

namespace weft::cuda {

namespace {

constinit trace::Name reclaiming{trace::Layer::Cuda, "reclaim"};

struct Round {
  std::size_t ran = 0;
  std::size_t failed = 0;
};

template <class Item>
Round run(std::vector<Item> ready) {
  Round round;
  if (ready.empty()) return round;
  trace::Range range(reclaiming);
  // A task that fails must not keep the others from running.
  for (Item& item : ready) {
    ++round.ran;
    try {
      item.free();
    } catch (const std::exception& error) {
      ++round.failed;
      log::error(std::string("reclaiming a CUDA resource: ") + error.what());
    }
  }
  return round;
}

}  // namespace

void Retirement::retire(Fence last_use, Task free) noexcept {
  MutexLock lock(mutex_);
  items_.push_back({std::move(last_use), std::move(free)});
}

std::vector<Retirement::Item> Retirement::take_passed() {
  std::vector<Item> ready;
  MutexLock lock(mutex_);
  std::vector<Item> rest;
  for (Item& item : items_) (item.last_use.query() ? ready : rest).push_back(std::move(item));
  items_ = std::move(rest);
  return ready;
}

std::size_t Retirement::reclaim() { return run(take_passed()).ran; }

bool Retirement::reclaim_all(Deadline deadline) {
  // A task may retire others.
  for (;;) {
    std::vector<Fence> fences;
    {
      MutexLock lock(mutex_);
      for (const Item& item : items_) fences.push_back(item.last_use);
    }
    if (fences.empty()) return true;
    const bool passed = std::all_of(fences.begin(), fences.end(),
                                    [&](const Fence& f) { return f.synchronize(deadline); });
    const Round round = run(take_passed());
    // Stops if all tasks failed: tasks that retire themselves again would otherwise be tried
    // forever.
    const bool stuck = round.failed > 0 && round.failed == round.ran;
    if (!passed || stuck || deadline.passed()) return passed && pending() == 0;
  }
}

std::size_t Retirement::pending() const {
  MutexLock lock(mutex_);
  return items_.size();
}

}  // namespace weft::cuda
