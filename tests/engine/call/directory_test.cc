// SPDX-License-Identifier: Apache-2.0
// How workers that join, leave and die are recorded in the job's store.
#include <condition_variable>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include <gtest/gtest.h>

#include <weft/base/log.h>
#include <weft/engine/call/agent_identity.h>
#include <weft/engine/call/directory.h>
#include <weft/engine/call/fixed_job.h>
#include <weft/tests/harness/memory_bootstrap.h>

namespace weft::call {
namespace {

Directory directory_of(const std::shared_ptr<transport::Bootstrap>& store, const WorkerInfo& self) {
  return {store, self, std::nullopt, {}};
}

TEST(Directory, FindsTheWorkerThatHasTheNameNow) {
  const auto store = std::make_shared<harness::MemoryBootstrap>();
  const Deadline deadline = Deadline::in(std::chrono::seconds(20));
  auto asks = directory_of(store, {"asks", 0});
  asks.join({}, {}, deadline);
  auto first = directory_of(store, {"moves", 1});
  first.join({}, {}, deadline);
  EXPECT_EQ(asks.recipient("moves").rank, 1);
  first.leave();
  auto second = directory_of(store, {"moves", 2});  // under its name
  second.join({}, {}, deadline);
  auto other = directory_of(store, {"other", 1});  // another worker takes its rank
  other.join({}, {}, deadline);
  EXPECT_EQ(asks.workers().size(), 3U);
  EXPECT_EQ(asks.recipient("moves").rank, 2);
  EXPECT_EQ(asks.recipient("other").rank, 1);
  asks.forget(1);
  EXPECT_EQ(asks.recipient("moves").rank, 2);
  EXPECT_EQ(asks.recipient("other").generation, 1);
  asks.known().forget_before(2, 1);
  second.leave();
  EXPECT_THROW(asks.recipient("moves"), NotThere);
  EXPECT_EQ(asks.known().worker(1)->name, "other");
}

TEST(AgentIdentity, HasNoIdOfTheNextGeneration) {
  AgentIdentity first, second;
  first.self = {"first", 3};
  second.self = {"second", 3};
  second.generation = 1;
  const std::uint64_t last = (std::uint64_t{1} << 32) - 1;
  EXPECT_EQ(made_by(first.id_of(last)).generation, 0);
  EXPECT_EQ(first.id_of(last) + 1, second.id_of(0));
  try {
    static_cast<void>(first.id_of(last + 1));
    ADD_FAILURE() << "the id is the successor's";
  } catch (const Error& error) {
    EXPECT_EQ(error.blame(), Blame::Busy) << error.text();
  }
  first.world_size = 4;  // nobody takes over a rank
  EXPECT_EQ(first.id_of(last + 1), second.id_of(0));
}

TEST(Directory, LowestWaitingRankNamesTheMissing) {
  const auto store = std::make_shared<harness::MemoryBootstrap>();
  std::mutex mutex;
  std::condition_variable changed;
  std::vector<std::string> lines;
  const log::Capture capture([&](LogLevel level, std::string_view line) {
    if (level != LogLevel::Warn) return;
    {
      std::lock_guard lock(mutex);
      lines.emplace_back(line);
    }
    changed.notify_all();
  });
  std::vector<std::thread> workers;
  for (int rank = 0; rank < 3; ++rank) {
    workers.emplace_back([&, rank] {
      if (rank == 1) {
        std::unique_lock lock(mutex);
        EXPECT_TRUE(
            changed.wait_for(lock, std::chrono::seconds(20), [&] { return !lines.empty(); }));
      }
      Directory directory(store, {"worker" + std::to_string(rank), rank}, 3, {});
      directory.join({}, {}, Deadline::in(std::chrono::seconds(30)), {},
                     {std::chrono::milliseconds(100)});
    });
  }
  for (std::thread& worker : workers) worker.join();
  ASSERT_EQ(lines.size(), 1U);
  EXPECT_NE(lines[0].find("worker 'worker0' (rank 0) has waited"), std::string::npos) << lines[0];
  EXPECT_NE(lines[0].find("rank 1 has not come; all 3 workers must be started"), std::string::npos)
      << lines[0];
}

Directory of_size(const std::shared_ptr<transport::Bootstrap>& store, const WorkerInfo& self,
                  int size) {
  return {store, self, size, {}};
}

// Returns the error that join() throws.
Error refusal_of(Directory directory, std::chrono::milliseconds limit = std::chrono::seconds(20)) {
  try {
    directory.join({}, {}, Deadline::in(limit));
  } catch (const Error& error) {
    return error;
  }
  ADD_FAILURE() << "join() throws nothing";
  return Error(Blame::Cancelled, "join() throws nothing");
}

TEST(Directory, DifferentWorldSizesFailEveryJoin) {
  const auto store = std::make_shared<harness::MemoryBootstrap>();
  std::vector<std::thread> workers;
  for (int rank = 0; rank < 3; ++rank) {
    workers.emplace_back([&, rank] {
      const Error error =
          refusal_of(of_size(store, {"worker" + std::to_string(rank), rank}, rank == 1 ? 4 : 3));
      EXPECT_EQ(error.blame(), Blame::Caller) << error.text();
      EXPECT_NE(error.text().find("; all workers of a job give the same rpc::Options::world_size"),
                std::string::npos)
          << error.text();
    });
  }
  for (std::thread& worker : workers) worker.join();
}

TEST(Directory, TwoWorkersOfOneRankBothFail) {
  const auto store = std::make_shared<harness::MemoryBootstrap>();
  const auto expect_taken = [](const Error& error) {
    EXPECT_EQ(error.blame(), Blame::Caller) << error.text();
    EXPECT_NE(error.text().find("rank 0 is taken by 'holder', and 'second' asks for it"),
              std::string::npos)
        << error.text();
  };
  std::thread holder([&] { expect_taken(refusal_of(of_size(store, {"holder", 0}, 2))); });
  try {
    check_rank_is_free(*store, {"second", 0});
    ADD_FAILURE() << "a taken rank is not refused";
  } catch (const Error& error) {
    expect_taken(error);
  }
  holder.join();
  check_rank_is_free(*store, {"third", 0});  // neither has kept it
}

TEST(Directory, JoinTimeoutNamesMissingRanks) {
  const auto store = std::make_shared<harness::MemoryBootstrap>();
  const Error error = refusal_of(of_size(store, {"worker1", 1}, 3), std::chrono::milliseconds(20));
  EXPECT_EQ(error.blame(), Blame::Timeout) << error.text();
  EXPECT_EQ(error.ranks(), (std::vector<int>{0, 2})) << error.text();
  EXPECT_NE(error.text().find("ranks 0, 2 have not come"), std::string::npos) << error.text();
}

TEST(Directory, JoinTimeoutNamesRanksYetToRead) {
  const auto store = std::make_shared<harness::MemoryBootstrap>();
  store->set(slot(1), written({.name = "worker1", .rank = 1}));
  const Error error = refusal_of(of_size(store, {"worker0", 0}, 2), std::chrono::milliseconds(20));
  EXPECT_EQ(error.blame(), Blame::Timeout) << error.text();
  EXPECT_EQ(error.ranks(), std::vector<int>{1}) << error.text();
  EXPECT_NE(error.text().find("only 1 of 2 workers have joined: rank 1 has come"),
            std::string::npos)
      << error.text();
}

// A worker reads the whole list whenever it looks for one that it does not know.
TEST(Directory, RejoiningDoesNotGrowTheList) {
  const auto store = std::make_shared<harness::MemoryBootstrap>();
  const Deadline deadline = Deadline::in(std::chrono::seconds(20));
  auto stays = directory_of(store, {"stays", 0});
  stays.join({}, {}, deadline);
  for (Generation generation = 0; generation < 5; ++generation) {
    const WorkerInfo who{"worker" + std::to_string(generation), 1};
    auto comes = directory_of(store, who);
    EXPECT_EQ(comes.join({}, {}, deadline), generation);
    EXPECT_EQ(stays.recipient(who.name).generation, generation);
    EXPECT_EQ(stays.workers().size(), 2U);
    comes.leave();
    EXPECT_EQ(stays.workers().size(), 1U);
  }
  EXPECT_EQ(store->add("joined", 0), 2);
}

std::optional<Error> gone(const WorkerEntry&, Deadline) {
  return Error(Blame::PeerLost, "nobody listens");
}
std::optional<Error> lives(const WorkerEntry&, Deadline) { return std::nullopt; }

TEST(Directory, LostWorkersRankAndNameAreReused) {
  const auto store = std::make_shared<harness::MemoryBootstrap>();
  const Deadline deadline = Deadline::in(std::chrono::seconds(20));
  auto asks = directory_of(store, {"asks", 0});
  asks.join({}, {}, deadline);
  auto killed = directory_of(store, {"actor", -1});
  killed.join({}, {}, deadline, gone);
  EXPECT_EQ(killed.self().rank, 1);
  const auto first = asks.recipient("actor");
  for (const int rank : {-1, 1, 5}) {  // same name; same rank; same name, other rank
    auto refused = directory_of(store, {rank == 1 ? "other" : "actor", rank});
    EXPECT_THROW(refused.join({}, {}, deadline, lives), Error) << rank;
    refused.leave();
  }
  EXPECT_EQ(asks.workers().size(), 2U);
  auto next = directory_of(store, {"actor", -1});
  EXPECT_EQ(next.join({}, {}, deadline, gone), 1);
  EXPECT_EQ(next.self().rank, 1);
  EXPECT_EQ(asks.workers().size(), 2U);
  EXPECT_FALSE(asks.declare_lost(1, 0, "again")) << "it is lost already";
  killed.leave();  // as it does if it wakes: its rank and name are another worker's by now
  asks.forget(1);
  EXPECT_EQ(asks.recipient("actor").generation, 1);
  EXPECT_THROW(asks.find(first), NotThere);
  auto elsewhere = directory_of(store, {"actor", 5});
  EXPECT_EQ(elsewhere.join({}, {}, deadline, gone), 1)
      << "a worker that was refused had the rank first";
  EXPECT_EQ(asks.look(1)->standing, static_cast<int>(Standing::Lost));
  EXPECT_EQ(asks.workers().size(), 2U);
  elsewhere.leave();
  asks.leave();
}

TEST(Directory, WorkerKilledWhileJoiningIsReplaced) {
  const Deadline deadline = Deadline::in(std::chrono::seconds(20));
  // Lets `left` more writes succeed: a worker is killed after so many steps of joining.
  class Ends final : public harness::MemoryBootstrap {
   public:
    long left = 1000;
    void set(const std::string& key, const Bytes& value) override {
      count();
      MemoryBootstrap::set(key, value);
    }
    long add(const std::string& key, long amount) override {
      count();
      return MemoryBootstrap::add(key, amount);
    }
    bool compare_set(const std::string& key, const Bytes& expected, const Bytes& desired) override {
      count();
      return MemoryBootstrap::compare_set(key, expected, desired);
    }

   private:
    void count() {
      if (left-- <= 0) throw Error(Blame::PeerLost, "it was killed");
    }
  };
  bool has_joined = false;
  for (long steps = 0; !has_joined; ++steps) {
    const auto store = std::make_shared<Ends>();
    auto stays = directory_of(store, {"stays", 0});
    stays.join({}, {}, deadline);
    store->left = steps;
    auto killed = directory_of(store, {"actor", -1});
    try {
      killed.join({}, {}, deadline, gone);
      has_joined = true;
    } catch (const Error&) {
    }
    store->left = 1000;
    auto next = directory_of(store, {"actor", -1});
    EXPECT_GE(next.join({}, {}, deadline, gone), 0) << steps;
    EXPECT_EQ(next.self().rank, 1) << steps;
    EXPECT_EQ(stays.workers().size(), 2U) << steps;
    EXPECT_EQ(stays.recipient("actor").rank, 1) << steps;
    // A later worker finds that both have been announced.
    auto third = directory_of(store, {"third", -1});
    third.join({}, {}, deadline, gone);
    EXPECT_EQ(third.self().rank, 2) << steps;
  }
}

TEST(Directory, TellsLeftFromNeverJoined) {
  const auto store = std::make_shared<harness::MemoryBootstrap>();
  const Deadline deadline = Deadline::in(std::chrono::seconds(20));
  auto asks = directory_of(store, {"asks", 0});
  asks.join({}, {}, deadline);
  auto moves = directory_of(store, {"moves", 1});
  moves.join({}, {}, deadline);
  moves.leave();
  const auto blame_of = [&](const auto& who) {
    try {
      asks.recipient(who);
    } catch (const NotThere& error) {
      return error.blame();
    }
    return Blame::Busy;
  };
  const auto expect = [&](Blame of_name, Blame of_rank) {
    EXPECT_EQ(blame_of(std::string("moves")), of_name);
    EXPECT_EQ(blame_of(WorkerInfo{"moves", 1}), of_name);
    EXPECT_EQ(blame_of(1), of_rank);
    EXPECT_EQ(blame_of(std::string("nobody")), Blame::Caller);
    EXPECT_EQ(blame_of(WorkerInfo{"nobody", 1}), Blame::Caller);
    EXPECT_EQ(blame_of(2), Blame::Caller);
  };
  expect(Blame::PeerLost, Blame::PeerLost);
  auto other = directory_of(store, {"other", 1});
  other.join({}, {}, deadline);
  expect(Blame::PeerLost, Blame::Busy);  // another worker has the rank
  EXPECT_TRUE(asks.declare_lost(1, 1, "it was killed"));
  expect(Blame::PeerLost, Blame::PeerLost);
}

}  // namespace
}  // namespace weft::call
