// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <utility>
#include <vector>

#include <weft/base/log.h>
#include <weft/base/mutex.h>
#include <weft/cuda/flag_pool.h>
#include <weft/cuda/pinned.h>
#include <weft/cuda/poll.h>
#include <weft/cuda/retire.h>
#include <weft/cuda/stream_memops.h>

namespace weft::cuda {

namespace {

constexpr std::size_t kPageBytes = std::size_t{64} << 10;
constexpr std::size_t kSpacing = 128;  // two cache lines: the prefetcher fetches pairs

}  // namespace

class FlagWords {
 public:
  explicit FlagWords(Device& device) : device_(device.shared_from_this()) { grow(); }
  ~FlagWords();

  FlagSlot take();
  void give_back(FlagSlot slot) noexcept;
  FlagPool::Usage usage() const;

  Device& device() const { return *device_; }
  // Remembers a device whose streams may still read the words when the pages are freed.
  void note_waiter(Device& device);

 private:
  void grow() WEFT_REQUIRES(mutex_);

  std::shared_ptr<Device> device_;
  mutable Mutex mutex_;
  std::vector<PinnedSlab> pages_ WEFT_GUARDED_BY(mutex_);
  std::vector<FlagSlot> free_ WEFT_GUARDED_BY(mutex_);  // with the value of the last use
  // Given back before the stream raised them.
  std::vector<FlagSlot> unraised_ WEFT_GUARDED_BY(mutex_);
  std::vector<std::weak_ptr<Device>> other_waiters_ WEFT_GUARDED_BY(mutex_);
};

namespace {

// The pages, once all flags are raised. Streams may not yet have reached their waits, so every
// device that may read the words is drained before anything is freed. If that fails, the next
// reclaim tries again.
struct Pages {
  Device& device;  // the device whose retirement keeps the pages
  std::vector<std::weak_ptr<Device>> other_waiters;
  std::vector<std::byte*> all;

  static void drain(Device& waiter) {
    if (waiter.is_lost()) return;  // its streams no longer wait
    DeviceGuard guard(waiter);
    waiter.check(waiter.driver().ctx_synchronize(), "cuCtxSynchronize");
  }
  void free() {
    const RelaxedCapture relaxed(device.driver());
    drain(device);
    for (const auto& other : other_waiters) {
      if (const auto waiter = other.lock()) drain(*waiter);
    }
    if (device.is_lost()) return;  // memory of a lost device cannot be freed
    DeviceGuard guard(device);
    for (; !all.empty(); all.pop_back())
      device.check(device.driver().mem_free_host(all.back()), "cuMemFreeHost");
  }
};

void retire(Pages pages) noexcept {
  Retirement& retirement = pages.device.retirement();
  retirement.retire(Fence(), [pages = std::move(pages)]() mutable {
    try {
      pages.free();
    } catch (...) {
      retire(std::move(pages));
      throw;
    }
  });
}

}  // namespace

FlagWords::~FlagWords() {
  Pages pages{*device_, std::move(other_waiters_), {}};
  for (PinnedSlab& page : pages_) pages.all.push_back(page.release());
  retire(std::move(pages));
}

void FlagWords::grow() {
  const PinnedSlab& page = pages_.emplace_back(*device_, kPageBytes);
  for (std::size_t offset = 0; offset < page.bytes(); offset += kSpacing) {
    auto* word = new (page.data() + offset) std::atomic<std::uint32_t>(0);
    free_.push_back({word, page.address() + offset, 0});
  }
}

FlagSlot FlagWords::take() {
  MutexLock lock(mutex_);
  if (free_.empty()) {
    const auto done = std::partition(unraised_.begin(), unraised_.end(),
                                     [](const FlagSlot& slot) { return !slot.raised(); });
    free_.assign(done, unraised_.end());
    unraised_.erase(done, unraised_.end());
  }
  if (free_.empty()) grow();
  FlagSlot slot = free_.back();
  free_.pop_back();
  ++slot.value;
  return slot;
}

void FlagWords::give_back(FlagSlot slot) noexcept {
  MutexLock lock(mutex_);
  // A word that a stream has yet to write must not serve a later flag, because the late write would
  // lower it.
  (slot.raised() ? free_ : unraised_).push_back(slot);
}

FlagPool::Usage FlagWords::usage() const {
  MutexLock lock(mutex_);
  return {pages_.size() * (kPageBytes / kSpacing), free_.size()};
}

void FlagWords::note_waiter(Device& device) {
  if (&device == device_.get()) return;
  MutexLock lock(mutex_);
  const bool known = std::any_of(other_waiters_.begin(), other_waiters_.end(),
                                 [&](const auto& other) { return other.lock().get() == &device; });
  if (!known) other_waiters_.push_back(device.weak_from_this());
}

MappedFlag::MappedFlag(std::shared_ptr<FlagWords> words, FlagSlot slot)
    : HostFlag(slot.word, slot.value), words_(std::move(words)), slot_(slot) {}

MappedFlag::~MappedFlag() {
  if (!query()) {
    if (awaited_.load(std::memory_order_relaxed)) {
      log::error(
          "a flag that a stream of " + describe(words_->device().id()) +
          " waits for was dropped without being raised; raised now, so that the stream goes on");
    }
    raise();
  }
  words_->give_back(slot_);
}

void MappedFlag::wait(const StreamRef& stream) const {
  if (query()) return;
  words_->note_waiter(stream.device());
  awaited_.store(true, std::memory_order_relaxed);
  wait_value(stream, slot_.address, slot_.value);
}

namespace {

// The other direction: a stream raises the flag, the host polls it.
class StreamFlag final : public Fence::Source {
 public:
  StreamFlag(std::shared_ptr<FlagWords> words, const StreamRef& stream)
      : words_(std::move(words)),
        raiser_(stream.device().shared_from_this()),
        slot_(words_->take()) {
    try {
      write_value(stream, slot_.address, slot_.value);
    } catch (...) {
      slot_.word->store(slot_.value, std::memory_order_release);  // the stream will not
      words_->give_back(slot_);
      throw;
    }
    words_->note_waiter(stream.device());
  }
  ~StreamFlag() override { words_->give_back(slot_); }

  bool query() const noexcept override {
    if (slot_.raised()) return true;
    // The word alone would never show that the context has ended.
    constexpr std::uint32_t kProbeEvery = 256;
    const bool ask =
        polls_.fetch_add(1, std::memory_order_relaxed) % kProbeEvery == kProbeEvery - 1;
    if (ask ? raiser_->probe() : !raiser_->is_lost()) return false;
    // Releases streams of other devices that wait for the word.
    slot_.word->store(slot_.value, std::memory_order_release);
    return true;
  }
  bool synchronize(Deadline deadline) const noexcept override {
    return poll_until([this] { return query(); }, deadline);
  }
  void wait(const StreamRef& stream) const override {
    if (query()) return;
    words_->note_waiter(stream.device());
    wait_value(stream, slot_.address, slot_.value);
  }
  bool on_passed(Task&) const override { return false; }

 private:
  std::shared_ptr<FlagWords> words_;
  std::shared_ptr<Device> raiser_;
  FlagSlot slot_;
  mutable std::atomic<std::uint32_t> polls_{0};
};

}  // namespace

FlagPool::FlagPool(Device& device) : words_(std::make_shared<FlagWords>(device)) {}

std::shared_ptr<MappedFlag> FlagPool::make() {
  return std::make_shared<MappedFlag>(words_, words_->take());
}

Fence FlagPool::signal(const StreamRef& stream) {
  return Fence(std::make_shared<StreamFlag>(words_, stream));
}

FlagPool::Usage FlagPool::usage() const { return words_->usage(); }

}  // namespace weft::cuda
