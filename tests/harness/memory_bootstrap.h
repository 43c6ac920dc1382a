// SPDX-License-Identifier: Apache-2.0
// A Bootstrap for ranks that are threads of one process.
#pragma once

#include <condition_variable>
#include <map>
#include <mutex>

#include <weft/base/error.h>
#include <weft/transport/bootstrap.h>

namespace weft::harness {

class MemoryBootstrap : public transport::Bootstrap {
 public:
  void set(const std::string& key, const Bytes& value) override {
    {
      std::lock_guard lock(mutex_);
      values_[key] = value;
    }
    changed_.notify_all();
  }
  Bytes get(const std::string& key, Deadline deadline) override {
    std::unique_lock lock(mutex_);
    const auto there = [&] { return values_.contains(key); };
    if (deadline.is_never()) {
      changed_.wait(lock, there);
    } else if (!changed_.wait_until(lock, deadline.point(), there)) {
      throw Error(Blame::Timeout, "no rank set '" + key + "'");
    }
    return values_.at(key);
  }
  // As in c10d's stores, the counter is stored as decimal digits.
  long add(const std::string& key, long amount) override {
    long sum = 0;
    {
      std::lock_guard lock(mutex_);
      Bytes& value = values_[key];
      if (!value.empty())
        sum = std::stol(std::string(reinterpret_cast<const char*>(value.data()), value.size()));
      sum += amount;
      const std::string text = std::to_string(sum);
      const auto* const bytes = reinterpret_cast<const std::byte*>(text.data());
      value.assign(bytes, bytes + text.size());
    }
    changed_.notify_all();
    return sum;
  }
  bool exists(const std::string& key) override {
    std::lock_guard lock(mutex_);
    return values_.contains(key);
  }
  bool compare_set(const std::string& key, const Bytes& expected, const Bytes& desired) override {
    {
      std::lock_guard lock(mutex_);
      const auto found = values_.find(key);
      if (found == values_.end() ? !expected.empty() : found->second != expected) return false;
      values_[key] = desired;
    }
    changed_.notify_all();
    return true;
  }
  void erase(const std::string& key) override {
    std::lock_guard lock(mutex_);
    values_.erase(key);
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  std::map<std::string, Bytes> values_;
};

}  // namespace weft::harness
