// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <array>
#include <atomic>

#include <pthread.h>

#include <weft/profiling/trace/description.h>
#include <weft/profiling/trace/open_ranges.h>

namespace weft::trace {

namespace {

struct Slot {
  std::atomic<bool> is_taken{false};
  std::atomic<const char*> name{nullptr};  // null until the slot is filled
  std::atomic<std::int64_t> begun{0};
  std::atomic<pthread_t> thread{};

  void clear() noexcept {
    name.store(nullptr);
    is_taken.store(false);
  }
};

constinit std::array<Slot, kMostOpenRanges> slots{};

// A forked child has one thread only. The ranges of the others never end there.
void forget_other_threads() {
  for (Slot& slot : slots) {
    if (slot.is_taken.load() && slot.thread.load() != pthread_self()) slot.clear();
  }
}

// Registered before main(): a thread that registered it during a fork() would hold up the child.
[[maybe_unused]] const int kRegistered = ::pthread_atfork(nullptr, nullptr, forget_other_threads);

// Returns kMostOpenRanges if all slots are taken.
std::size_t take_slot() noexcept {
  thread_local std::size_t first = 0;  // the slot that this thread had last is mostly free
  for (std::size_t i = 0; i < kMostOpenRanges; ++i) {
    const std::size_t place = (first + i) % kMostOpenRanges;
    if (slots[place].is_taken.load(std::memory_order_relaxed)) continue;
    if (!slots[place].is_taken.exchange(true)) return first = place;
  }
  return kMostOpenRanges;
}

}  // namespace

OpenRange::OpenRange(const char* name) noexcept : slot_(take_slot()) {
  if (slot_ == kMostOpenRanges) return;
  slots[slot_].thread.store(pthread_self());
  slots[slot_].begun.store(now());
  slots[slot_].name.store(name);
}

OpenRange::~OpenRange() {
  if (slot_ != kMostOpenRanges) slots[slot_].clear();
}

std::pmr::vector<OpenedRange> open_ranges(std::pmr::memory_resource* memory) {
  std::pmr::vector<OpenedRange> found(memory);
  for (const Slot& slot : slots) {
    if (const char* const name = slot.name.load()) found.push_back({name, slot.begun.load()});
  }
  std::ranges::sort(found, {}, &OpenedRange::begun);
  return found;
}

}  // namespace weft::trace
