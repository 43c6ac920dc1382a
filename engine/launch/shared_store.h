// SPDX-License-Identifier: Apache-2.0
// The data that the weft-runs of one job share: a value that they change by compare and set, and a
// count of heartbeats for each.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include <weft/base/mutex.h>

namespace weft::launch {

// Callable from any thread. All functions throw PeerLost if the store is lost.
class SharedStore {
 public:
  SharedStore() = default;
  SharedStore(const SharedStore&) = delete;
  SharedStore& operator=(const SharedStore&) = delete;
  virtual ~SharedStore() = default;

  // The value, or "" if it was never set.
  virtual std::string get() = 0;
  // Sets the value if it equals `expected`; returns the value afterwards.
  virtual std::string compare_set(const std::string& expected, const std::string& desired) = 0;
  virtual void beat(const std::string& id) = 0;
  // The counts of heartbeats in the order of the ids; 0 for a node without any.
  virtual std::vector<std::int64_t> beats(const std::vector<std::string>& ids) = 0;
  // Whether other nodes lose the store when this process ends.
  virtual bool is_hosted_here() const = 0;
};

// The store of a job of one node.
class LocalStore final : public SharedStore {
 public:
  std::string get() override {
    MutexLock lock(mutex_);
    return value_;
  }
  std::string compare_set(const std::string& expected, const std::string& desired) override {
    MutexLock lock(mutex_);
    if (value_ == expected) value_ = desired;
    return value_;
  }
  void beat(const std::string& id) override {
    MutexLock lock(mutex_);
    ++beats_[id];
  }
  std::vector<std::int64_t> beats(const std::vector<std::string>& ids) override {
    MutexLock lock(mutex_);
    std::vector<std::int64_t> counts;
    for (const std::string& id : ids) counts.push_back(beats_[id]);
    return counts;
  }
  bool is_hosted_here() const override { return false; }

 private:
  Mutex mutex_;
  std::string value_ WEFT_GUARDED_BY(mutex_);
  std::map<std::string, std::int64_t> beats_ WEFT_GUARDED_BY(mutex_);
};

}  // namespace weft::launch
