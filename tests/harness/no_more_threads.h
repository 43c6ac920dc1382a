// SPDX-License-Identifier: Apache-2.0
// For tests in which no thread can be started.
#pragma once

#include <cstddef>
#include <system_error>
#include <thread>

#include <gtest/gtest.h>
#include <pthread.h>

namespace weft::harness {

// While it lives, no thread can be started, because stacks are as large as the address space.
class NoMoreThreads {
 public:
  NoMoreThreads() {
    pthread_getattr_default_np(&before_);
    pthread_attr_t huge;
    pthread_attr_init(&huge);
    pthread_attr_setstacksize(&huge, std::size_t{1} << 47);
    EXPECT_EQ(pthread_setattr_default_np(&huge), 0);
    pthread_attr_destroy(&huge);
  }
  ~NoMoreThreads() {
    pthread_setattr_default_np(&before_);
    pthread_attr_destroy(&before_);
  }
  NoMoreThreads(const NoMoreThreads&) = delete;
  NoMoreThreads& operator=(const NoMoreThreads&) = delete;

 private:
  pthread_attr_t before_;
};

// Some systems and sanitizers start threads with stacks of any size.
inline bool can_make_threads() {
  try {
    std::thread([] {}).join();
    return true;
  } catch (const std::system_error&) {
    return false;
  }
}

}  // namespace weft::harness
