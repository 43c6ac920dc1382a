// SPDX-License-Identifier: Apache-2.0
// Training goes on after a rank is lost, as docs/data-parallel.md tells a user to do: the others
// make a group of the living ranks, wrap the model and the parameters again, and end with the
// results of an undisturbed run.
#include <csignal>
#include <functional>
#include <memory>
#include <optional>

#include <gtest/gtest.h>
#include <unistd.h>

#include <torch/optim/adam.h>
#include <torch/optim/sgd.h>

#include <weft/tests/harness/folder.h>
#include <weft/tests/harness/killed_anywhen.h>
#include <weft/weft.h>

#include "models.h"

namespace weft::testing {
namespace {

using harness::Processes;

constexpr int kRanks = 3;
constexpr int kVictim = 1;
constexpr int kSteps = 9;
// Longer than each rank may run (harness::kLimit), so nothing here ends by it.
constexpr std::chrono::seconds kForever{1000};
// Each parameter travels by itself: if a rank dies in a backward, some have been averaged and
// others have not.
constexpr DdpOptions kBucketOfEach{.bucket_bytes = 1, .first_bucket_bytes = 1};

// The batch that all ranks together process in a step, however many they are.
torch::Tensor batch(int step) { return random({12, 6}, 100 + static_cast<std::uint64_t>(step)); }
torch::Tensor loss_of(const torch::Tensor& output) { return output.pow(2).mean(); }

enum class Death { Exit, Kill };
[[noreturn]] void die(Death death) {
  if (death == Death::Exit) ::_exit(0);
  ::raise(SIGKILL);
  ::abort();
}

// docs/data-parallel.md shows this function.
ProcessGroup group_of_the_living(ProcessGroup& group) {
  for (auto living = group.living_ranks();;) {
    try {
      return group.new_group(living);
    } catch (const Error& error) {
      const auto before =
          std::exchange(living, group.living_ranks());  // another may have been lost meanwhile
      if (error.blame() != Blame::PeerLost || living == before) throw;
    }
  }
}

void expect_lost(const Error& error, int rank) {
  EXPECT_EQ(error.blame(), Blame::PeerLost) << error.what();
  EXPECT_NE(error.text().find("rank " + std::to_string(rank) + " is lost"), std::string::npos)
      << error.text();
}

// The victim waits until the other ranks are in the step in which it dies: messages that it has
// sent for the step before may be lost with it.
void come_to_the_last_step(const ProcessGroup& group, int victim) {
  const auto key_of = [](int rank) { return "in the last step/" + std::to_string(rank); };
  if (group.rank() != victim)
    return group.store()->set(key_of(group.rank()), std::vector<std::uint8_t>());
  for (int rank = 0; rank < group.size(); ++rank) {
    if (rank != victim) group.store()->wait({key_of(rank)});
  }
}

// Expects that all ranks have the same parameters, equal to those that one process computes.
void expect_trained(ProcessGroup& group, const Mlp& net,
                    const std::vector<torch::Tensor>& expected) {
  EXPECT_LT(difference(net->parameters(), expected), 1e-9);
  for (const auto& parameter : net->parameters()) {
    const auto of_first = parameter.detach().clone();
    group.broadcast(of_first, 0).wait();
    EXPECT_TRUE(torch::equal(parameter, of_first));
  }
}

template <class Optimizer, class Options>
std::vector<torch::Tensor> trained_alone(const Options& options) {
  Mlp net;
  fill(net);
  Optimizer optimizer(net->parameters(), options);
  for (int step = 0; step < kSteps; ++step) {
    optimizer.zero_grad();
    loss_of(net(batch(step))).backward();
    optimizer.step();
  }
  return net->parameters();
}

class Survivors : public ::testing::TestWithParam<std::tuple<const char*, Death>> {
 protected:
  const harness::Folder folder_;
  const std::string file_ = folder_.path() + "/run.pt";
};
INSTANTIATE_TEST_SUITE_P(Of, Survivors,
                         ::testing::Combine(::testing::Values("gloo", "shm", "tcp"),
                                            ::testing::Values(Death::Exit, Death::Kill)),
                         [](const auto& given) {
                           return std::string(std::get<0>(given.param)) +
                                  (std::get<1>(given.param) == Death::Exit ? "Exit" : "Kill");
                         });

// --- DistributedDataParallel, from the state of the living ranks

struct Replicated {
  Replicated() { fill(net); }
  void join(ProcessGroup of) {
    group = std::move(of);
    before = std::move(
        ddp);  // may be destroyed before or after the next one is made: it takes no part any more
    if (group.rank() == 0) before.reset();
    ddp = std::make_unique<DistributedDataParallel<MlpImpl>>(net, group, kBucketOfEach);
  }
  void go_on(int to) {
    for (; step < to; ++step) {
      optimizer.zero_grad();
      loss_of((*ddp)(part(batch(step), group.rank(), group.size()))).backward();
      optimizer.step();
    }
  }
  static torch::optim::SGDOptions options() { return torch::optim::SGDOptions(0.1).momentum(0.9); }
  Mlp net;
  torch::optim::SGD optimizer{net->parameters(), options()};
  int step = 0;
  ProcessGroup group;
  std::unique_ptr<DistributedDataParallel<MlpImpl>> before, ddp;
};

// Gives rank 0's state to all ranks: the constructor copies the model, the file the rest.
void go_on_without(int lost, ProcessGroup& group, Replicated& run, const std::string& file) {
  auto rest = group_of_the_living(group);
  EXPECT_EQ(rest.ranks(), (std::vector<int>{0, 3 - lost}));
  run.join(rest);
  const std::vector<checkpoint::Part> parts = {{"optimizer", run.optimizer}, {"step", run.step}};
  checkpoint::save(file, rest, parts);
  checkpoint::load(file, rest, parts);
  run.go_on(kSteps);
  expect_trained(rest, run.net, trained_alone<torch::optim::SGD>(Replicated::options()));
}

TEST_P(Survivors, OfABackwardGoOnFromRankZero) {
  const auto& [backend, death] = GetParam();
  Processes ranks(kRanks, [backend, death, file = file_](int rank) {
    at::set_num_threads(1);
    auto group = init_process_group({.backend = backend, .timeout = kForever});
    Replicated run;
    run.join(group);
    EXPECT_EQ(group.living_ranks(), (std::vector<int>{0, 1, 2}));
    run.net->second->weight.register_hook([&run, group, rank, death](const torch::Tensor&) {
      if (run.step != 4) return;
      come_to_the_last_step(group, kVictim);
      if (rank == kVictim) die(death);
    });
    expect_lost(harness::error_of([&] { run.go_on(kSteps); }), kVictim);
    EXPECT_EQ(run.step, 4);
    EXPECT_EQ(group.living_ranks(), (std::vector<int>{0, 2}));
    go_on_without(kVictim, group, run, file);
  });
  ranks.expect_success({kVictim});
}

// Two of four ranks die, one after the other: the second while the others replace the group.
TEST_P(Survivors, OfTwoLossesGoOn) {
  const auto& [backend, death] = GetParam();
  Processes ranks(kRanks + 1, [backend, death, file = file_](int rank) {
    at::set_num_threads(1);
    auto group = init_process_group({.backend = backend, .timeout = kForever});
    Replicated run;
    run.join(group);
    run.go_on(2);
    harness::meet(group);
    if (rank == kVictim) die(death);
    expect_lost(harness::error_of([&] { run.go_on(kSteps); }), kVictim);
    if (rank == 3) die(death);
    go_on_without(kVictim, group, run, file);
  });
  ranks.expect_success({kVictim, 3});
}

// --- ZeroRedundancyOptimizer, from a checkpoint

// Dies in a step, between two shards that it owns.
struct Mortal : torch::optim::Adam {
  using Adam::Adam;
  torch::Tensor step(LossClosure closure) override {
    if (death && --steps_left == 0) die(*death);
    return Adam::step(std::move(closure));
  }
  inline static std::optional<Death> death;
  inline static int steps_left = 0;
};

// The loop of docs/data-parallel.md.
struct Sharded {
  using Optimizer = ZeroRedundancyOptimizer<Mortal>;
  Sharded(std::string kept_in, bool steps_in_backward)
      : file(std::move(kept_in)), overlaps(steps_in_backward) {
    fill(net);
  }
  void run(ProcessGroup group) {
    for (;;) {
      try {
        DistributedDataParallel ddp(net, group, kBucketOfEach);
        Optimizer optimizer(net->parameters(), group, options(), ZeroOptions{.shard_bytes = 1});
        if (overlaps) optimizer.overlap_with(ddp);
        const std::vector<checkpoint::Part> parts = {
            {"model", net}, {"optimizer", optimizer}, {"step", step}};
        if (!checkpoint::exists(file, group)) checkpoint::save(file, group, parts);
        checkpoint::load(file, group, parts);
        while (step < kSteps) {
          if (step % 2 == 0) checkpoint::save(file, group, parts);
          if (before_step) before_step(group, optimizer);
          optimizer.zero_grad();
          loss_of(ddp(part(batch(step), group.rank(), group.size()))).backward();
          optimizer.step();
          ++step;
        }
        return expect_trained(group, net, trained_alone<torch::optim::Adam>(options()));
      } catch (const Error& error) {
        if (error.blame() != Blame::PeerLost) throw;
        losses.push_back(error);
      }
      group = group_of_the_living(group);
    }
  }
  static torch::optim::AdamOptions options() { return torch::optim::AdamOptions(0.01); }
  const std::string file;
  const bool overlaps;
  Mlp net;
  int step = 0;
  std::vector<Error> losses;
  std::function<void(ProcessGroup& group, const Optimizer& optimizer)> before_step;
};

TEST_P(Survivors, OfAZeroStepGoOnFromACheckpoint) {
  const auto& [backend, death] = GetParam();
  for (const bool overlaps : {false, true}) {
    Processes ranks(kRanks, [backend, death, overlaps, folder = folder_.path()](int rank) {
      at::set_num_threads(1);
      auto group = init_process_group({.backend = backend, .timeout = kForever});
      Sharded one(folder + (overlaps ? "/overlapping.pt" : "/run.pt"), overlaps);
      one.before_step = [&](ProcessGroup&, const Sharded::Optimizer& optimizer) {
        if (rank != kVictim || one.step != 5) return;
        ASSERT_GE(optimizer.local_optimizers().size(), 2U);
        Mortal::steps_left = 2;
        Mortal::death = death;
      };
      one.run(group);
      ASSERT_EQ(one.losses.size(), 1U);
      expect_lost(one.losses.front(), kVictim);
    });
    ranks.expect_success({kVictim});
  }
}

TEST_P(Survivors, OfACheckpointUseTheOneBefore) {
  const auto& [backend, death] = GetParam();
  Processes ranks(kRanks, [backend, death, file = file_](int rank) {
    at::set_num_threads(1);
    auto group = init_process_group({.backend = backend, .timeout = kForever});
    Sharded one(file, false);
    one.before_step = [&](ProcessGroup& all, const Sharded::Optimizer&) {
      if (all.size() < kRanks || one.step != 5) return;
      harness::meet(all);  // the steps of all ranks have ended
      if (rank == kVictim) die(death);
      checkpoint::save(file, all, {{"step", one.step}});
    };
    one.run(group);
    ASSERT_EQ(one.losses.size(), 1U);
    expect_lost(one.losses.front(), kVictim);
  });
  ranks.expect_success({kVictim});
}

// Rank 0 hosts the store, and is the root of the tree through which ranks hear of each other.
TEST_P(Survivors, OfRankZeroGoOn) {
  const auto& [backend, death] = GetParam();
  Processes ranks(kRanks, [backend, death, file = file_](int rank) {
    at::set_num_threads(1);
    auto group = init_process_group({.backend = backend, .timeout = kForever});
    Sharded one(file, false);
    one.before_step = [&](ProcessGroup& ranks, const Sharded::Optimizer&) {
      if (one.step != 5 || ranks.size() != kRanks) return;
      come_to_the_last_step(ranks, 0);
      if (rank == 0) die(death);
    };
    one.run(group);
    ASSERT_EQ(one.losses.size(), 1U);
    expect_lost(one.losses.front(), 0);
    EXPECT_EQ(one.step, kSteps);
    EXPECT_NE(group.living_ranks().front(), 0);  // the other may have ended
  });
  ranks.expect_success({0});
}

// --- at any moment

class SurvivorsOfAnyMoment : public ::testing::TestWithParam<harness::KilledCase> {
 protected:
  const harness::Folder folder_;
};
INSTANTIATE_TEST_SUITE_P(Of, SurvivorsOfAnyMoment,
                         ::testing::Combine(::testing::Values("gloo", "shm", "tcp"),
                                            ::testing::Range(0, 4)),
                         harness::killed_name);

TEST_P(SurvivorsOfAnyMoment, GoOn) {
  const auto& [backend, seed] = GetParam();
  const int victim = seed % kRanks;
  Processes ranks(kRanks, [backend, seed, victim, folder = folder_.path()](int) {
    at::set_num_threads(1);
    auto group = init_process_group({.backend = backend, .timeout = kForever});
    group.barrier().wait();
    Processes::say("ready");
    // Repeats until the victim has been killed; some ranks may have begun another run by then.
    for (int runs = 0;; ++runs) {
      Sharded one(folder + "/" + std::to_string(runs) + ".pt", seed / 2 % 2 == 1);
      one.run(group);
      if (one.losses.empty()) continue;
      EXPECT_EQ(one.losses.size(), 1U);
      expect_lost(one.losses.front(), victim);
      break;
    }
  });
  harness::kill_anywhen(ranks, kRanks, victim, seed, std::chrono::milliseconds(100));
}

}  // namespace
}  // namespace weft::testing
