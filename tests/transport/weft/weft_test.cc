// SPDX-License-Identifier: Apache-2.0
// The ranks of a group agree on one transport. Ranks are threads here; a store made by the test
// replaces a rank's offer with that of a rank on another host, or of one without shm.
#include <functional>
#include <thread>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <weft/tests/harness/interface.h>
#include <weft/tests/harness/memory_bootstrap.h>
#include <weft/transport/registry.h>

namespace weft::transport {
namespace {

using testing::AllOf;
using testing::HasSubstr;
using testing::Not;
using Bytes = Bootstrap::Bytes;

Bytes bytes_of(const std::string& text) {
  const auto* const bytes = reinterpret_cast<const std::byte*>(text.data());
  return {bytes, bytes + text.size()};
}

std::string text_of(const Bytes& bytes) {
  return {reinterpret_cast<const char*>(bytes.data()), bytes.size()};
}

// Stores each value as `change` returns it.
class ChangingStore final : public Bootstrap {
 public:
  using Change = std::function<std::string(const std::string& key, std::string value)>;
  explicit ChangingStore(Change change) : change_(std::move(change)) {}

  void set(const std::string& key, const Bytes& value) override {
    inner_.set(key, change_ ? bytes_of(change_(key, text_of(value))) : value);
    std::lock_guard lock(mutex_);
    keys_.push_back(key);
  }
  Bytes get(const std::string& key, Deadline deadline) override {
    return inner_.get(key, deadline);
  }
  long add(const std::string& key, long amount) override { return inner_.add(key, amount); }
  bool compare_set(const std::string& key, const Bytes& expected, const Bytes& desired) override {
    return inner_.compare_set(key, expected, desired);
  }
  bool exists(const std::string& key) override { return inner_.exists(key); }
  void erase(const std::string& key) override { inner_.erase(key); }

  std::vector<std::string> left() {
    std::lock_guard lock(mutex_);
    std::vector<std::string> keys;
    for (const auto& key : keys_) {
      if (inner_.exists(key)) keys.push_back(key);
    }
    return keys;
  }

 private:
  const Change change_;
  harness::MemoryBootstrap inner_;
  std::mutex mutex_;
  std::vector<std::string> keys_;
};

std::shared_ptr<Communicator> join(int rank, int ranks, const std::shared_ptr<Bootstrap>& store,
                                   const std::shared_ptr<EventLoop>& loop,
                                   std::chrono::milliseconds timeout = std::chrono::seconds(60)) {
  JoinOptions options;
  options.rank = rank;
  options.size = ranks;
  options.group_name = "test";
  options.store = store;
  options.timeout = timeout;
  options.loop = loop;
  options.interface_address = harness::interface_or("127.0.0.1");
  return open("weft")->join(options);
}

// Returns, by rank, the transport of its communicator, after a barrier of all ranks.
std::vector<std::string> taken_by(int ranks, const std::shared_ptr<ChangingStore>& store) {
  std::vector<std::string> taken(static_cast<std::size_t>(ranks));
  std::vector<std::thread> threads;
  for (int rank = 0; rank < ranks; ++rank) {
    threads.emplace_back([&, rank] {
      try {
        const auto loop = std::make_shared<EventLoop>("rank " + std::to_string(rank));
        const auto communicator = join(rank, ranks, store, loop);
        const Op met = communicator->barrier(Fence());
        EXPECT_TRUE(met.done().synchronize(Deadline::in(std::chrono::seconds(60))));
        EXPECT_FALSE(met.error());
        taken[static_cast<std::size_t>(rank)] = communicator->backend();
        store->set("end/" + std::to_string(rank), {});  // no rank closes before all have read
        for (int other = 0; other < ranks; ++other) {
          store->get("end/" + std::to_string(other), Deadline::in(std::chrono::seconds(60)));
        }
      } catch (const std::exception& error) {
        ADD_FAILURE() << "rank " << rank << ": " << error.what();
        store->set("end/" + std::to_string(rank), {});
      }
    });
  }
  for (auto& thread : threads) thread.join();
  return taken;
}

std::string address_of_another_host(const std::string& offer) {
  const auto slash = offer.find('/');
  return "+00000000-0000-0000-0000-000000000000" + offer.substr(slash);
}

TEST(WeftBackend, TakesShmIfAllRanksShareAHost) {
  const auto store = std::make_shared<ChangingStore>(nullptr);
  EXPECT_THAT(taken_by(3, store), testing::Each("shm"));
}

TEST(WeftBackend, TakesTcpIfARankIsOnAnotherHost) {
  const auto store = std::make_shared<ChangingStore>([](const std::string& key, std::string value) {
    return key == "weft/shm/2" ? address_of_another_host(value) : value;
  });
  EXPECT_THAT(taken_by(3, store), testing::Each("tcp"));
}

TEST(WeftBackend, TakesTcpIfARankHasNoShm) {
  for (const std::string offer : {"-no /proc here", "-", ""}) {
    const auto store =
        std::make_shared<ChangingStore>([&offer](const std::string& key, std::string value) {
          return key == "weft/shm/1" ? offer : value;
        });
    EXPECT_THAT(taken_by(2, store), testing::Each("tcp")) << "'" << offer << "'";
  }
}

TEST(WeftBackend, TakesTcpForAnOfferOfGarbage) {
  for (const std::string offer : {"+", "+garbage", "++//", "\xff\xfe"}) {
    const auto store =
        std::make_shared<ChangingStore>([&offer](const std::string& key, std::string value) {
          return key == "weft/shm/1" ? offer : value;
        });
    EXPECT_THAT(taken_by(2, store), testing::Each("tcp"));
  }
}

TEST(WeftBackend, LeavesNothingOfItsOwnInTheStore) {
  const auto store = std::make_shared<ChangingStore>(nullptr);
  taken_by(2, store);
  EXPECT_THAT(store->left(), testing::Each(testing::StartsWith("end/")));
}

TEST(WeftBackend, NamesTheMissingRanks) {
  for (const int rank : {0, 1}) {
    const auto store = std::make_shared<ChangingStore>(nullptr);
    if (rank != 0) store->set("weft/shm/0", bytes_of("-it came, and then nothing more"));
    try {
      join(rank, 4, store, std::make_shared<EventLoop>("late"), std::chrono::milliseconds(100));
      FAIL() << "it joined alone";
    } catch (const Error& error) {
      EXPECT_EQ(error.blame(), Blame::Timeout);
      const char* const missing = rank == 0 ? "missing: rank 1, 2, 3" : "missing: rank 2, 3";
      EXPECT_THAT(error.text(),
                  AllOf(HasSubstr("on group 'test' (weft, rank"), HasSubstr(missing)));
    }
  }
}

TEST(WeftBackend, SaysThatRankZeroHasNotDecided) {
  const auto store = std::make_shared<ChangingStore>(nullptr);
  store->set("weft/shm/0", bytes_of("-it came, and then nothing more"));
  try {
    join(1, 2, store, std::make_shared<EventLoop>("late"), std::chrono::milliseconds(100));
    FAIL() << "it joined alone";
  } catch (const Error& error) {
    EXPECT_EQ(error.blame(), Blame::Timeout);
    EXPECT_THAT(error.text(), HasSubstr("rank 0, which has not announced the chosen transport"));
  }
}

TEST(WeftBackend, RefusesAnUnknownDecision) {
  const auto store = std::make_shared<ChangingStore>(nullptr);
  store->set("weft/transport", bytes_of("pigeon"));
  try {
    join(1, 2, store, std::make_shared<EventLoop>("other"));
    FAIL() << "it joined";
  } catch (const Error& error) {
    EXPECT_EQ(error.blame(), Blame::PeerLost);
    EXPECT_THAT(error.text(),
                AllOf(HasSubstr("the same version of Weft"), Not(HasSubstr("pigeon"))));
  }
}

TEST(WeftBackend, JoinsAloneWithoutAStore) {
  const auto alone = join(0, 1, nullptr, std::make_shared<EventLoop>("alone"));
  EXPECT_EQ(alone->size(), 1);
  EXPECT_TRUE(alone->barrier(Fence()).done().synchronize(Deadline::in(std::chrono::seconds(60))));
}

}  // namespace
}  // namespace weft::transport
