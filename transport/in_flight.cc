// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <vector>

#include <weft/base/mutex.h>
#include <weft/cuda/retire.h>
#include <weft/transport/in_flight.h>

namespace weft::transport {

namespace {

// The loop goes on polling for about as long as it spins. Waking it takes a few microseconds, more
// than enqueueing does. (If it sleeps in between, for some 25 µs, it sees an operation that much
// later.)
constexpr auto kLinger = std::chrono::microseconds(80);

}  // namespace

InFlight::InFlight(std::shared_ptr<cuda::Device> device, const std::shared_ptr<EventLoop>& loop,
                   Watch watch, std::chrono::microseconds between_looks)
    : device_(std::move(device)),
      loop_(loop),
      watch_(std::move(watch)),
      between_looks_(between_looks) {}

InFlight::~InFlight() {
  for (Entry& entry : entries_) {
    Operation& operation = entry.operation;
    if (operation.done.query()) {
      end(operation.completion, device_->lost());
      continue;
    }
    operation.completion.fail(
        Error(Blame::Cancelled, operation.name + ": the loop that watched over it has ended"));
    device_->retirement().retire(operation.done, [pin = std::move(operation.pin)] {});
  }
}

void InFlight::add(Operation operation, std::shared_ptr<const void> owner) {
  const auto loop = loop_.lock();  // released without mutex_: it may be the last reference
  MutexLock lock(mutex_);
  entries_.push_back({std::move(operation), std::nullopt});
  if (const auto kept = kept_.lock()) {
    kept->owner = std::move(owner);
    return;
  }
  if (!loop) return;
  const auto kept = std::make_shared<Kept>(owner);
  kept_ = kept;
  watcher_ = loop->poll([this, kept, weak = std::weak_ptr(owner)] {
    const auto self = weak.lock();
    return self && turn(*kept);
  });
}

void InFlight::fail(const Error& why) noexcept {
  std::vector<Completion> failed;
  {
    MutexLock lock(mutex_);
    for (const Entry& entry : entries_) failed.push_back(entry.operation.completion);
  }
  for (Completion& completion : failed) completion.fail(why);
}

bool InFlight::passed() const {
  std::vector<Fence> fences;
  {
    MutexLock lock(mutex_);
    for (const Entry& entry : entries_) fences.push_back(entry.operation.done);
  }
  return std::all_of(fences.begin(), fences.end(),
                     [](const Fence& fence) { return fence.query(); });
}

std::size_t InFlight::end_of_row(std::size_t from) const {
  MutexLock lock(mutex_);
  std::size_t end = from + 1;
  while (end < entries_.size() && entries_[end].operation.is_behind) ++end;
  return end;
}

bool InFlight::has_passed(std::size_t which) const {
  UniqueLock lock(mutex_);
  if (which >= entries_.size()) return false;
  const Fence done = entries_[which].operation.done;
  lock.unlock();  // a fence may have to ask its communicator
  return done.query();
}

std::size_t InFlight::count_passed() const {
  std::size_t passed = 0;
  while (has_passed(passed)) {
    const std::size_t end = end_of_row(passed);
    ++passed;
    // Entries from `passed` up to this one are not known to have passed.
    std::size_t open = end;
    for (std::size_t asked = end - 1; passed < open; asked = passed + (open - passed) / 2) {
      if (has_passed(asked)) {
        passed = asked + 1;
      } else {
        open = asked;
      }
    }
    if (open < end) break;
  }
  return passed;
}

bool InFlight::turn(Kept& kept) {
  const auto now = Deadline::Clock::now();
  if (now < next_look_) return false;
  next_look_ = now + between_looks_;
  std::vector<Entry> ended;
  std::optional<Oldest> oldest;
  Entry* front = nullptr;  // stays valid while others are added
  const std::size_t passed = count_passed();
  {
    MutexLock lock(mutex_);
    ended.reserve(passed);
    for (; ended.size() < passed; entries_.pop_front())
      ended.push_back(std::move(entries_.front()));
    if (!entries_.empty()) front = &entries_.front();
  }
  if (front) {
    if (watch_ && !front->since && front->operation.ready.query())
      front->since = Deadline::Clock::now();
    if (watch_ && front->since) oldest = {front->operation.name, *front->since};
    if (front->operation.in_line) next_look_ = {};
  }
  const auto lost = device_->lost();  // asked after the fences, which pass when the context ends
  for (Entry& entry : ended) end(entry.operation.completion, lost);
  if (oldest) watch_(*oldest);
  rest(kept, now);
  return !ended.empty();
}

void InFlight::end(Completion& completion, const std::optional<Error>& lost) noexcept {
  if (lost) {
    completion.fail(*lost);
  } else {
    completion.finish();
  }
}

void InFlight::rest(Kept& kept, Deadline::Clock::time_point now) {
  std::shared_ptr<const void> last;  // released without mutex_
  MutexLock lock(mutex_);
  if (!entries_.empty()) return;
  if (kept.owner) {
    last = std::move(kept.owner);
    idle_ = now;
  } else if (now - idle_ >= kLinger) {
    kept_.reset();
    watcher_.reset();
  }
}

}  // namespace weft::transport
