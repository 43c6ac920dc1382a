// SPDX-License-Identifier: Apache-2.0
#include <atomic>
#include <utility>
#include <vector>

#include <pthread.h>
#include <unistd.h>

#include <weft/base/error.h>
#include <weft/base/inheritance.h>
#include <weft/base/mutex.h>

namespace weft {

namespace {

std::atomic<unsigned> forks{0};

}  // namespace

unsigned forks_before() noexcept {
  static const int registered = ::pthread_atfork(nullptr, nullptr, [] { ++forks; });
  static_cast<void>(registered);
  return forks.load(std::memory_order_relaxed);
}

MadeIn::MadeIn() : forks_(forks_before()), process_(::getpid()) {}

bool MadeIn::is_inherited() const noexcept {
  return forks_ != forks.load(std::memory_order_relaxed);
}

void MadeIn::throw_inherited(const std::string& what) const {
  throw Error(
      Blame::Caller,
      what + " belongs to process " + std::to_string(process_) + "; this process, " +
          std::to_string(::getpid()) +
          ", was forked from it and may destroy the object, but not use it. Fork before the object "
          "is made, or start the child's program with exec (posix_spawn)");
}

void keep_inherited(std::shared_ptr<const void> object) {
  // Never destroyed: static variables end before some objects.
  static auto* const mutex = new Mutex;
  static auto* const kept WEFT_POINTEE_GUARDED_BY(*mutex) =
      new std::vector<std::shared_ptr<const void>>;
  MutexLock lock(*mutex);
  kept->push_back(std::move(object));
}

}  // namespace weft
