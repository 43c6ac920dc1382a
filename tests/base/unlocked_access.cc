// SPDX-License-Identifier: Apache-2.0
// The test ThreadSafety.UnlockedAccessIsRefused compiles this file and expects a warning.
#include <weft/base/mutex.h>

class Counter {
 public:
  void add() {
    weft::MutexLock lock(mutex_);
    ++count_;
  }
  int without_lock() const { return count_; }

 private:
  weft::Mutex mutex_;
  int count_ WEFT_GUARDED_BY(mutex_) = 0;
};

int main() {
  Counter counter;
  counter.add();
  return counter.without_lock();
}
