// SPDX-License-Identifier: Apache-2.0
// Counts the steps that the ranks of a group take in the same order, so that they agree on a number
// without sending anything. Thread-safe; nothing blocks.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <utility>

#include <weft/base/mutex.h>

namespace weft::group {

// Counts the calls of one kind that all ranks make in the same order. The group's Core owns it.
class CallNumbers {
 public:
  int next(const std::string& kind) {  // 1, 2, …
    MutexLock lock(mutex_);
    return ++numbers_[kind];
  }

 private:
  Mutex mutex_;
  std::map<std::string, int> numbers_ WEFT_GUARDED_BY(mutex_);
};

// Counts the messages to or from a rank with a tag. The group's Operations owns it.
class MessageNumbers {
 public:
  std::uint64_t next(bool is_send, int peer, int tag) {  // 1, 2, …
    MutexLock lock(mutex_);
    return ++(is_send ? sent_ : received_)[{peer, tag}];
  }

 private:
  Mutex mutex_;
  // Numbers of messages, by peer and tag.
  std::map<std::pair<int, int>, std::uint64_t> sent_ WEFT_GUARDED_BY(mutex_);
  std::map<std::pair<int, int>, std::uint64_t> received_ WEFT_GUARDED_BY(mutex_);
};

}  // namespace weft::group
