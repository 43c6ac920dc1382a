// While it lives, no thread can be made: the stacks are as large as the address space.
#pragma once

#include <cstddef>
#include <thread>

#include <gtest/gtest.h>
#include <pthread.h>
#include <system_error>

namespace weft::harness {

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

  // False on a system, or with a sanitizer, that makes threads with stacks of any size: a reason to skip.
  static bool works() {
    try {
      std::thread([] {}).join();
      return false;
    } catch (const std::system_error&) {
      return true;
    }
  }

 private:
  pthread_attr_t before_;
};

}  // namespace weft::harness
