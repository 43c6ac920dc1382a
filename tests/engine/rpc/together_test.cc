// SPDX-License-Identifier: Apache-2.0
// Programs build barriers, gathering and parameter servers with deferred replies.
#include <array>
#include <filesystem>
#include <map>
#include <mutex>
#include <thread>

#include <gtest/gtest.h>

#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <torch/types.h>

#include <weft/tests/engine/rpc/workers.h>

namespace together {

using namespace weft;

// Answers all callers when the last has come. Each meeting lives on the worker that is called.
template <class T>
class Meeting {
 public:
  // Combines all callers' values; called once.
  using Combine = std::function<T(const std::map<std::string, T>&)>;
  static Future<T> join(const std::string& name, int count, const std::string& who, T what,
                        const Combine& combine) {
    static std::mutex mutex;
    static std::map<std::string, Meeting> meetings;
    Promise<T> promise;
    Meeting ended;
    {
      std::lock_guard lock(mutex);
      Meeting& meeting = meetings[name];
      meeting.values_.emplace(who, std::move(what));
      meeting.waiting_.push_back(promise);
      if (static_cast<int>(meeting.waiting_.size()) < count) return promise.future();
      ended = std::move(meeting);
      meetings.erase(name);
    }
    const T result = combine(ended.values_);
    for (const auto& one : ended.waiting_) one.set(result);
    return promise.future();
  }

 private:
  std::map<std::string, T> values_;
  std::vector<Promise<T>> waiting_;
};

using Values = std::map<std::string, int>;
Future<Values> gather(std::string name, int count, std::string who, int value) {
  return Meeting<Values>::join(name, count, who, {{who, value}},
                               [](const std::map<std::string, Values>& brought) {
                                 Values all;
                                 for (const auto& [worker, values] : brought)
                                   all.insert(values.begin(), values.end());
                                 return all;
                               });
}

void barrier(const rpc::Agent& agent, const std::string& name, const std::vector<int>& ranks,
             const std::string& who = "") {
  agent.sync<&gather>(ranks.front(), name, static_cast<int>(ranks.size()), agent.self().name + who,
                      0);
}

std::atomic<int> counter{0};
void increase() { ++counter; }

std::mutex mutex;
std::map<std::string, at::Tensor> means;
at::Tensor mean_of(std::string round) {
  std::lock_guard lock(mutex);
  return means.at(round);
}
Future<at::Tensor> average(std::string round, int count, std::string who, at::Tensor gradient) {
  return Meeting<at::Tensor>::join(round, count, who, gradient,
                                   [&](const std::map<std::string, at::Tensor>& gradients) {
                                     at::Tensor sum;
                                     for (const auto& [worker, one] : gradients)
                                       sum = sum.defined() ? sum + one : one;
                                     std::lock_guard lock(mutex);
                                     return means[round] = sum / count;
                                   });
}

// Updates the model by all trainers' gradients, then answers all with the new model.
Future<at::Tensor> update(std::string round, int count, std::string who, at::Tensor gradient) {
  static at::Tensor model;
  return Meeting<at::Tensor>::join(
      round, count, who, gradient, [&](const std::map<std::string, at::Tensor>& gradients) {
        std::lock_guard lock(mutex);
        at::Tensor next = round == "batch 1" ? at::zeros({4}) : model.clone();
        for (const auto& [worker, one] : gradients) next -= 0.1 * one;
        return model = next;
      });
}

// Enters a barrier with the other worker; if `asks`, calls it first.
std::array<ProcessGroup, 2> groups;
int same(int value) { return value; }
int meet(int own, bool asks) {
  if (asks) rpc::this_agent().sync<&same>(1 - own, 1);
  groups.at(static_cast<std::size_t>(own)).barrier().wait();
  return own;
}

}  // namespace together

namespace weft {
namespace {

using harness::As;
using harness::error_of;
using harness::run_workers;
using harness::Setting;
using namespace std::chrono_literals;

class Together : public testing::TestWithParam<Setting> {};

std::vector<int> all_ranks(const rpc::Agent& agent) {
  std::vector<int> ranks;
  for (const auto& worker : agent.workers()) ranks.push_back(worker.rank);
  return ranks;
}

TEST_P(Together, EveryWorkerGathersAllValues) {
  run_workers(GetParam(), [](rpc::Agent& agent) {
    const int workers = static_cast<int>(agent.workers().size());
    const auto got =
        agent.sync<&together::gather>(0, "all", workers, agent.self().name, agent.self().rank * 10);
    together::Values expected;
    for (const auto& worker : agent.workers()) expected.emplace(worker.name, worker.rank * 10);
    EXPECT_EQ(got, expected);
  });
}

class TogetherWithMany : public Together {};

TEST_P(TogetherWithMany, BarrierSeparatesBeforeAndAfter) {
  together::counter = 0;
  run_workers(GetParam(), [](rpc::Agent& agent) {
    together::barrier(agent, "before", all_ranks(agent));
    agent.sync<&together::increase>(0);
    together::barrier(agent, "behind", all_ranks(agent));
    if (agent.self().rank == 0) {
      EXPECT_EQ(together::counter, static_cast<int>(agent.workers().size()));
    }
  });
}

TEST_P(Together, DisjointBarriersDoNotInterfere) {
  run_workers(GetParam(), [](rpc::Agent& agent) {
    std::vector<int> mine;
    for (const int rank : all_ranks(agent)) {
      if (rank % 2 == agent.self().rank % 2) mine.push_back(rank);
    }
    for (int round = 0; round < 5; ++round) {
      // Each gather returns this round's values of its own group only.
      const auto come =
          agent.sync<&together::gather>(mine.front(), "group " + std::to_string(mine.front()),
                                        static_cast<int>(mine.size()), agent.self().name, round);
      together::Values expected;
      for (const int rank : mine) expected["worker" + std::to_string(rank)] = round;
      EXPECT_EQ(come, expected);
      together::barrier(agent, "group " + std::to_string(mine.front()), mine);
    }
    together::barrier(agent, "alone " + agent.self().name, {agent.self().rank});
  });
}

// Some workers enter a barrier together, while each other worker enters one alone.
TEST_P(Together, BarrierOfSomeIgnoresTheOthers) {
  run_workers(GetParam(), [](rpc::Agent& agent) {
    std::vector<int> some;
    for (const int rank : all_ranks(agent)) {
      if (rank % 2 == 0) some.push_back(rank);
    }
    const bool is_alone = agent.self().rank % 2 == 1;
    for (int round = 0; round < 5; ++round) {
      together::barrier(agent, is_alone ? "alone" : "some",
                        is_alone ? std::vector{agent.self().rank} : some);
    }
  });
}

TEST_P(Together, ThreeThreadsEachEnterOneBarrier) {
  run_workers(GetParam(), [](rpc::Agent& agent) {
    const int count = 3 * static_cast<int>(agent.workers().size());
    std::vector<std::thread> threads;
    for (int t = 0; t < 3; ++t) {
      threads.emplace_back([&agent, t, count] {
        const auto who = agent.self().name + "/" + std::to_string(t);
        EXPECT_EQ(agent.sync<&together::gather>(0, "threads", count, who, t).size(),
                  static_cast<std::size_t>(count));
      });
    }
    for (auto& thread : threads) thread.join();
  });
}

TEST_P(Together, TrainersGetTheServersMean) {
  run_workers(GetParam(), [](rpc::Agent& agent) {
    const int workers = static_cast<int>(agent.workers().size());
    for (int round = 0; round < 10; ++round) {
      const bool is_sparse = round % 2 == 1;
      const std::string name = "mean " + std::to_string(round);
      at::Tensor gradient = at::full({3, 3}, 0.1 * (agent.self().rank + 1) + round);
      if (is_sparse) gradient = gradient.to_sparse();
      const auto mean =
          agent.sync<&together::average>(0, name, workers, agent.self().name, gradient);
      EXPECT_EQ(mean.is_sparse(), is_sparse);
      const auto kept = agent.sync<&together::mean_of>(0, name);
      EXPECT_TRUE(
          at::equal(is_sparse ? mean.to_dense() : mean, is_sparse ? kept.to_dense() : kept));
    }
  });
}

TEST_P(Together, TrainersGetTheSameNewModel) {
  run_workers(GetParam(), [](rpc::Agent& agent) {
    const int workers = static_cast<int>(agent.workers().size());
    double sum = 0;
    for (int rank = 0; rank < workers; ++rank) sum += rank + 1;
    for (int batch = 1; batch <= 4; ++batch) {
      const auto model =
          agent.sync<&together::update>(0, "batch " + std::to_string(batch), workers,
                                        agent.self().name, at::full({4}, agent.self().rank + 1.0));
      EXPECT_TRUE(at::allclose(model, at::full({4}, -0.1 * sum * batch))) << batch;
    }
  });
}

INSTANTIATE_TEST_SUITE_P(Rpc, Together, testing::ValuesIn(harness::settings()), harness::name_of);
INSTANTIATE_TEST_SUITE_P(Rpc, TogetherWithMany, testing::ValuesIn(harness::settings()),
                         harness::name_of);

TEST(TogetherLimits, IncompleteGatherTimesOut) {
  run_workers({As::Threads, "inproc", 3}, [](rpc::Agent& agent) {
    if (agent.self().rank != 2) {
      const auto error = error_of([&] {
        agent.sync<&together::gather>(rpc::to(0).timeout(50ms), "late", 3, agent.self().name, 1);
      });
      EXPECT_EQ(error.blame(), Blame::Timeout) << error.what();
      EXPECT_NE(error.text().find("gather"), std::string::npos) << error.what();
    }
    together::barrier(agent, "both know", {0, 1, 2});
    if (agent.self().rank == 2) {
      EXPECT_EQ(agent.sync<&together::gather>(0, "late", 3, agent.self().name, 1).size(), 3U);
    }
  });
}

// The only thread of worker 0 waits for worker 1, which waits for an answer of worker 0.
TEST(TogetherInGroups, WaitForACollectiveBlocksNoCalls) {
  const auto store = c10::make_intrusive<c10d::HashStore>();
  rpc::Options options;
  options.worker_threads = 1;
  run_workers(
      {As::Threads, "inproc", 2},
      [&](rpc::Agent& agent) {
        const int rank = agent.self().rank;
        ProcessGroup& group = together::groups.at(static_cast<std::size_t>(rank));
        group = init_process_group(
            {.backend = "inproc", .rank = rank, .world_size = 2, .store = store, .timeout = 20s});
        together::barrier(agent, "have groups", {0, 1});
        if (rank == 1) {
          EXPECT_EQ(agent.sync<&together::meet>(0, 0, false), 0);
        } else {
          const auto end = std::chrono::steady_clock::now() + 10s;
          while (agent.debug_info().handlers_busy == 0 && std::chrono::steady_clock::now() < end)
            std::this_thread::yield();
          EXPECT_EQ(agent.sync<&together::meet>(1, 1, true), 1);
        }
        together::barrier(agent, "have met", {0, 1});
        group = {};
      },
      options);
}

// A process group and agents that use one rendezvous address.
class Sharing : public testing::TestWithParam<std::string> {};

TEST_P(Sharing, GroupAndAgentsShareOneAddress) {
  const std::string file = testing::TempDir() + "/weft_sharing_" + std::to_string(::getpid());
  harness::Processes workers(2, [&](int rank) {
    const std::string method = GetParam() == "file" ? "file://" + file
                               : GetParam() == "tcp"
                                   ? std::string("tcp://127.0.0.1:") + std::getenv("MASTER_PORT")
                                   : "env://";
    const auto join = [&] {
      return rpc::init("worker" + std::to_string(rank),
                       {.rank = rank, .world_size = 2, .init_method = method});
    };
    const auto group_of = [&](const std::string& name) {
      return init_process_group({.backend = "tcp",
                                 .init_method = method,
                                 .rank = rank,
                                 .world_size = 2,
                                 .group_name = name});
    };
    {
      ProcessGroup group = group_of("first");
      rpc::Agent agent = join();
      group.barrier().wait();
      EXPECT_EQ(agent.sync<&together::gather>(0, "a", 2, agent.self().name, 1).size(), 2U);
      group = {};
      EXPECT_EQ(agent.sync<&together::gather>(0, "b", 2, agent.self().name, 1).size(), 2U)
          << "agents go on after the group has ended";
      EXPECT_EQ(std::filesystem::exists(file), GetParam() == "file")
          << "the file stays while the agents live";
      // A long call is under way while another group is made.
      Future<together::Values> slow;
      if (rank == 0) slow = agent.async<&together::gather>(1, "slow", 2, "zero", 1);
      ProcessGroup later = group_of("later");
      later.barrier().wait();
      if (rank == 1) agent.sync<&together::gather>(1, "slow", 2, "one", 1);
      if (rank == 0) {
        EXPECT_EQ(slow.get().size(), 2U);
      }
      later.barrier().wait();
      agent.shutdown({.timeout = 30s});
    }
  });
  workers.expect_success();
}

TEST_P(Sharing, GroupMayComeLaterAndGoFirst) {
  const std::string file =
      testing::TempDir() + "/weft_sharing_agents_" + std::to_string(::getpid());
  harness::Processes workers(2, [&](int rank) {
    const std::string method = GetParam() == "file" ? "file://" + file
                               : GetParam() == "tcp"
                                   ? std::string("tcp://127.0.0.1:") + std::getenv("MASTER_PORT")
                                   : "env://";
    rpc::Agent agent = rpc::init("worker" + std::to_string(rank),
                                 {.rank = rank, .world_size = 2, .init_method = method});
    for (const std::string name : {"first", "second"}) {
      ProcessGroup group = init_process_group({.backend = "tcp",
                                               .init_method = method,
                                               .rank = rank,
                                               .world_size = 2,
                                               .group_name = name});
      group.barrier().wait();
      EXPECT_EQ(agent.sync<&together::gather>(0, name, 2, agent.self().name, 1).size(), 2U);
      group = {};
      EXPECT_EQ(std::filesystem::exists(file), GetParam() == "file");
      EXPECT_EQ(
          agent.sync<&together::gather>(1, name + " has gone", 2, agent.self().name, 1).size(), 2U);
    }
    agent.shutdown({.timeout = 30s});
  });
  workers.expect_success();
}

INSTANTIATE_TEST_SUITE_P(Rpc, Sharing, testing::Values("file", "env", "tcp"),
                         [](const auto& method) { return method.param; });

}  // namespace
}  // namespace weft
