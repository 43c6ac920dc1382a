// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <atomic>
#include <thread>

#include <gtest/gtest.h>

#include <torch/csrc/distributed/c10d/HashStore.hpp>

#include <weft/tests/engine/rpc/workers.h>
#include <weft/tests/harness/all_settings.h>

namespace weft::harness {

std::vector<Setting> settings(std::initializer_list<int> workers) {
  std::vector<Setting> all;
  if (!runs_all_settings()) {
    // Some tests need two workers and some more; tests that look into another worker need threads.
    const int most = std::max(workers), least = std::min(workers),
              middle = workers.begin()[workers.size() / 2];
    for (const char* transport : {"inproc", "shm", "tcp"}) {
      all.push_back({As::Threads, transport, least});
      if (most != least) all.push_back({As::Threads, transport, most});
    }
    all.push_back({As::Processes, "shm", least});
    all.push_back({As::Processes, "tcp", middle});
    return all;
  }
  for (const int count : workers) {
    for (const char* transport : {"inproc", "shm", "tcp"})
      all.push_back({As::Threads, transport, count});
    for (const char* transport : {"shm", "tcp"}) all.push_back({As::Processes, transport, count});
  }
  return all;
}

std::vector<Setting> settings_of_faults() {
  return {{As::Threads, "inproc", 3},
          {As::Threads, "shm", 3},
          {As::Threads, "tcp", 4},
          {As::Processes, "shm", 3},
          {As::Processes, "tcp", 3}};
}

rpc::WorkerInfo after(const rpc::Agent& agent, int steps) {
  const int workers = static_cast<int>(agent.workers().size());
  return agent.worker((agent.self().rank + steps) % workers);
}

namespace meeting {

std::atomic<int> others_came{0};
void come() { ++others_came; }

}  // namespace meeting

void meet_without(rpc::Agent& agent, int victim) {
  static int expected = 0;
  for (const auto& worker : agent.workers()) {
    if (worker.rank == victim || worker.rank == agent.self().rank) continue;
    ++expected;
    try {
      agent.sync<&meeting::come>(worker);
    } catch (const Error& error) {
      // It may leave once all have come, before its reply to this worker has arrived.
      EXPECT_EQ(error.blame(), Blame::PeerLost) << error.text();
    }
  }
  EXPECT_TRUE(comes_true([] { return meeting::others_came >= expected; }));
}

void run_alone(const Setting& setting, const std::function<void(rpc::Options)>& body,
               const rpc::Options& given) {
  rpc::Options options = given;
  options.transports = {setting.transport};
  options.world_size = setting.workers;
  if (setting.as == As::Threads) {
    options.store = c10::make_intrusive<c10d::HashStore>();
    run_threads(setting.workers, [&](int rank) {
      rpc::Options own = options;
      own.rank = rank;
      body(own);
    });
    return;
  }
  Processes processes(setting.workers, [&](int rank) {
    rpc::Options own = options;
    own.rank = rank;
    body(own);
  });
  processes.expect_success();
}

void run_workers(const Setting& setting, const std::function<void(rpc::Agent&)>& body,
                 const rpc::Options& options) {
  run_alone(
      setting,
      [&](const rpc::Options& own) {
        rpc::Agent agent = rpc::init("worker" + std::to_string(*own.rank), own);
        body(agent);
        agent.shutdown({.timeout = std::chrono::seconds(30)});
      },
      options);
}

std::string warnings_of(int workers, const std::function<void(rpc::Agent&)>& body) {
  const LogWatch watch;
  const auto store = c10::make_intrusive<c10d::HashStore>();
  std::vector<std::thread> threads;
  for (int rank = 0; rank < workers; ++rank) {
    threads.emplace_back([&, rank] {
      rpc::Agent agent = rpc::init(
          "worker" + std::to_string(rank),
          {.rank = rank, .world_size = workers, .store = store, .transports = {"inproc"}});
      body(agent);
      agent.shutdown({.timeout = std::chrono::seconds(30)});
    });
  }
  for (auto& thread : threads) thread.join();
  return watch.text();
}

}  // namespace weft::harness
