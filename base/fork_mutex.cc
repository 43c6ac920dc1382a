#include <atomic>

#include <pthread.h>

#include <weft/base/error.h>
#include <weft/base/fork_mutex.h>

namespace weft {

namespace {

std::atomic<bool> off{false};

constinit ForkMutex* first = nullptr;  // that with the lowest order
constinit std::mutex enrolling;

}  // namespace

void ForkMutex::enroll() {
  static const int registered = ::pthread_atfork(lock_all, unlock_all, unlock_all);
  if (registered != 0) broken("pthread_atfork has no memory");
  std::lock_guard lock(enrolling);
  if (enrolled_.load(std::memory_order_relaxed)) return;
  ForkMutex** place = &first;
  while (*place != nullptr && (*place)->order_ <= order_) place = &(*place)->next_;
  next_ = *place;
  *place = this;
  enrolled_.store(true, std::memory_order_release);
}

void ForkMutex::lock_all() {
  enrolling.lock();
  for (ForkMutex* one = first; one != nullptr; one = one->next_) one->lock();
}

void ForkMutex::unlock_all() {
  for (ForkMutex* one = first; one != nullptr; one = one->next_) one->unlock();
  enrolling.unlock();
}

void ForkMutex::switch_all_off() noexcept { off.store(true, std::memory_order_relaxed); }

bool ForkMutex::is_off() noexcept { return off.load(std::memory_order_relaxed); }

}  // namespace weft
