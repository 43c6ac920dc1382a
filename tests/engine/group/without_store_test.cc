// SPDX-License-Identifier: Apache-2.0
// Once the ranks have joined, they make groups without the job's store, so its host may be lost.
#include <atomic>
#include <thread>
#include <vector>

#include <gtest/gtest.h>

#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <torch/types.h>

#include <weft/group.h>
#include <weft/mesh.h>
#include <weft/tests/harness/ranks.h>

namespace weft {
namespace {

constexpr int kRanks = 4;

// A store that counts its requests, and can be closed.
class CountedStore final : public c10d::HashStore {
 public:
  using Value = std::vector<std::uint8_t>;
  using HashStore::compareSet;
  using HashStore::set;
  void set(const std::string& key, const Value& value) override {
    count();
    HashStore::set(key, value);
  }
  Value compareSet(const std::string& key, const Value& expected, const Value& desired) override {
    count();
    return HashStore::compareSet(key, expected, desired);
  }
  Value get(const std::string& key) override {
    count();
    return HashStore::get(key);
  }
  std::int64_t add(const std::string& key, std::int64_t value) override {
    count();
    return HashStore::add(key, value);
  }
  bool check(const std::vector<std::string>& keys) override {
    count();
    return HashStore::check(keys);
  }
  bool deleteKey(const std::string& key) override {
    count();
    return HashStore::deleteKey(key);
  }
  void wait(const std::vector<std::string>& keys) override {
    count();
    HashStore::wait(keys);
  }
  void wait(const std::vector<std::string>& keys, const std::chrono::milliseconds& limit) override {
    count();
    HashStore::wait(keys, limit);
  }
  int requests() const { return requests_; }
  void close() { is_closed_ = true; }

 private:
  void count() {
    ++requests_;
    if (is_closed_) throw std::runtime_error("the store is closed");
  }
  std::atomic<int> requests_{0};
  std::atomic<bool> is_closed_{false};
};

TEST(GroupsWithoutStore, AreMadeAfterJoining) {
  const auto store = c10::make_intrusive<CountedStore>();
  std::atomic<int> joined{0}, over{0};
  std::vector<std::thread> ranks;
  for (int rank = 0; rank < kRanks; ++rank) {
    ranks.emplace_back([&, rank] {
      auto group = init_process_group(
          {.backend = "weft", .rank = rank, .world_size = kRanks, .store = store});
      const auto meet = [&](std::atomic<int>& count) {
        ++count;
        while (count < kRanks) std::this_thread::yield();
      };
      meet(joined);
      if (rank == 0) store->close();
      const int before = store->requests();
      const auto sum_of_ones = [](ProcessGroup& of) {
        const auto ones = torch::ones({10});
        of.all_reduce(ones).wait();
        return ones[9].item<float>();
      };
      auto some = group.new_group({3, 1});
      if (some) {
        EXPECT_EQ(sum_of_ones(some), 2);
        auto one = some.split(some.rank(), 0);
        EXPECT_EQ(sum_of_ones(one), 1);
      }
      auto half = group.split(rank % 2, -rank);
      EXPECT_EQ(half.rank(), 1 - rank / 2);
      EXPECT_EQ(sum_of_ones(half), 2);
      const Mesh mesh(group, {{"replicate", 2}, {"shard", 2}});
      auto shard = mesh["shard"];
      EXPECT_EQ(sum_of_ones(shard), 2);
      group.monitored_barrier(harness::kLimit);
      meet(over);
      EXPECT_EQ(store->requests(), before);
    });
  }
  for (auto& thread : ranks) thread.join();
}

}  // namespace
}  // namespace weft
