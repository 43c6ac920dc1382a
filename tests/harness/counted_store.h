// SPDX-License-Identifier: Apache-2.0
// One rank's view of a store that ranks share, which counts what the rank asks.
#pragma once

#include <atomic>
#include <chrono>
#include <map>
#include <mutex>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include <torch/csrc/distributed/c10d/Store.hpp>

namespace weft::harness {

class CountedStore final : public c10d::Store {
 public:
  using Value = std::vector<std::uint8_t>;
  explicit CountedStore(c10::intrusive_ptr<c10d::Store> shared) : shared_(std::move(shared)) {}

  c10::intrusive_ptr<Store> clone() override {
    return c10::make_intrusive<CountedStore>(shared_->clone());
  }
  using Store::compareSet;
  using Store::set;
  void set(const std::string& key, const Value& value) override {
    count("set " + key);
    shared_->set(key, value);
  }
  // A question that changes nothing and finds no value is a look.
  Value compareSet(const std::string& key, const Value& expected, const Value& desired) override {
    Value value = shared_->compareSet(key, expected, desired);
    count("compareSet " + key, expected == desired && value == expected);
    return value;
  }
  Value get(const std::string& key) override {
    count("get " + key);
    return shared_->get(key);
  }
  std::int64_t add(const std::string& key, std::int64_t value) override {
    count("add " + key);
    return shared_->add(key, value);
  }
  bool check(const std::vector<std::string>& keys) override {
    count("check " + keys.front(), true);
    return shared_->check(keys);
  }
  bool deleteKey(const std::string& key) override {
    count("delete " + key);
    return shared_->deleteKey(key);
  }
  void wait(const std::vector<std::string>& keys) override { wait(keys, getTimeout()); }
  void wait(const std::vector<std::string>& keys, const std::chrono::milliseconds& limit) override {
    count("wait " + keys.front());
    shared_->wait(keys, limit);
  }
  std::vector<Value> multiGet(const std::vector<std::string>& keys) override {
    count("multiGet " + keys.front() + " of " + std::to_string(keys.size()));
    return shared_->multiGet(keys);
  }
  void multiSet(const std::vector<std::string>& keys, const std::vector<Value>& values) override {
    count("multiSet " + keys.front() + " of " + std::to_string(keys.size()));
    shared_->multiSet(keys, values);
  }
  bool hasExtendedApi() const override { return true; }
  std::int64_t getNumKeys() override { return shared_->getNumKeys(); }

  int requests() const { return static_cast<int>(asked().size()); }
  // Returns the requests without the looks. A rank looks while it waits for others, and more often
  // if they come late.
  std::vector<std::string> asked() const {
    std::lock_guard lock(mutex_);
    return asked_;
  }
  int looks() const { return looks_; }
  void close() { is_closed_ = true; }

 private:
  void count(std::string request, bool is_look = false) {
    if (is_look) {
      ++looks_;
    } else {
      std::lock_guard lock(mutex_);
      asked_.push_back(std::move(request));
    }
    if (is_closed_) throw std::runtime_error("the store is closed");
  }

  const c10::intrusive_ptr<c10d::Store> shared_;
  mutable std::mutex mutex_;
  std::vector<std::string> asked_;
  std::atomic<int> looks_{0};
  std::atomic<bool> is_closed_{false};
};

}  // namespace weft::harness
