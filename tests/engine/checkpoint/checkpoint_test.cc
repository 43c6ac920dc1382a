// SPDX-License-Identifier: Apache-2.0
// Checkpoints of several ranks: a job goes on from one as if nothing had happened, nothing is half
// saved or half loaded, and all ranks get the same error.
#include <filesystem>
#include <functional>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <torch/nn/modules/batchnorm.h>
#include <torch/optim/adam.h>
#include <torch/optim/sgd.h>
#include <torch/serialize.h>

#include <weft/tests/harness/folder.h>
#include <weft/tests/harness/killed_anywhen.h>

#include "checkpoints.h"

namespace weft::testing {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;

class Checkpoint : public ::testing::TestWithParam<harness::As> {
 protected:
  const harness::Folder folder_;
  const std::string file_ = folder_.path() + "/run.pt";
  void run(int ranks, const harness::Body& body, const ProcessGroupOptions& options = {}) {
    harness::run_ranks(GetParam(), ranks, body, options);
  }
};
INSTANTIATE_TEST_SUITE_P(As, Checkpoint,
                         ::testing::Values(harness::As::Threads, harness::As::Processes),
                         [](const auto& as) { return harness::name(as.param); });

// Has buffers, one of another dtype, and a parameter that has two names.
struct NormedImpl : torch::nn::Module {
  NormedImpl()
      : body(register_module("body", Mlp())),
        norm(register_module("norm", torch::nn::BatchNorm1d(3))),
        tied(register_parameter("tied", body->first->weight)) {
    norm->to(torch::kDouble);
  }
  torch::Tensor forward(torch::Tensor x) { return norm(body(x)) + tied.sum(); }
  Mlp body;
  torch::nn::BatchNorm1d norm;
  torch::Tensor tied;
};
TORCH_MODULE(Normed);

TEST_P(Checkpoint, ResumesExactly) {
  run(2, [&](ProcessGroup group) {
    struct Run {
      explicit Run(ProcessGroup in, std::uint64_t seed)
          : group(in),
            net(),
            ddp(filled(net, seed), in),
            sgd(net->body->parameters(), torch::optim::SGDOptions(0.01).momentum(0.9)),
            adam(net->norm->parameters(), torch::optim::AdamOptions(0.01).amsgrad(true)) {}
      static Normed& filled(Normed& some, std::uint64_t seed) {
        fill(some, seed);
        return some;
      }
      std::vector<checkpoint::Part> parts() {
        return {{"model", ddp.module()}, {"sgd", sgd},   {"adam", adam},
                {"step", step},          {"best", best}, {"done", done},
                {"name", name},          {"mean", mean}, {"moments", moments}};
      }
      void go_on(int to) {
        for (; step < to; ++step) {
          sgd.zero_grad();
          adam.zero_grad();
          ddp(part(random({8, 6}, 300 + static_cast<std::uint64_t>(step)), group.rank(), 2))
              .pow(2)
              .sum()
              .backward();
          sgd.step();
          adam.step();
          best /= 3;
          mean.add_(step);
          moments[1].mul_(2);
        }
      }
      ProcessGroup group;
      Normed net;
      DistributedDataParallel<NormedImpl> ddp;
      torch::optim::SGD sgd;
      torch::optim::Adam adam;
      int step = 0;
      double best = 1;
      bool done = false;
      std::string name;
      torch::Tensor mean = torch::zeros({2}, torch::kFloat);
      std::vector<torch::Tensor> moments = {torch::ones({}), torch::ones({2, 2}, torch::kLong)};
    };
    Run whole(group, 1);
    whole.done = true;
    whole.name = "läuft";
    whole.go_on(3);
    checkpoint::save(file_, group, whole.parts());
    const auto saved = values_of(*whole.net);
    for (const auto& value : saved)
      group.broadcast(value, 0).wait();  // each rank has buffers of its own batches
    const double best = whole.best;
    whole.go_on(6);

    Run again(group, 99);
    again.go_on(2);  // the load overwrites this state
    const void* const memory = again.net->tied.const_data_ptr();
    checkpoint::load(file_, group, again.parts());
    EXPECT_EQ(again.net->tied.const_data_ptr(), memory);
    EXPECT_EQ(again.step, 3);
    EXPECT_EQ(again.best, best);
    EXPECT_TRUE(again.done);
    EXPECT_EQ(again.name, "läuft");
    expect_equal(values_of(*again.net), saved);
    again.go_on(6);
    expect_equal(values_of(*again.net), values_of(*whole.net));
    EXPECT_TRUE(torch::equal(again.mean, whole.mean));
    expect_equal(again.moments, whole.moments);
    EXPECT_EQ(again.best, whole.best);
  });
  EXPECT_EQ(files_in(folder_.path()), std::set<std::string>{"run.pt"});
}

TEST_P(Checkpoint, ZeroStateFitsAnyNumberOfRanks) {
  using Zero = ZeroRedundancyOptimizer<torch::optim::Adam>;
  const auto options = torch::optim::AdamOptions(0.01).amsgrad(true);
  run(2, [&](ProcessGroup group) {
    Mlp net;
    fill(net);
    Zero zero(net->parameters(), group, options, {.shard_bytes = 1});
    steps(net, zero, 0, 4);
    checkpoint::save(file_, group, {{"model", net}, {"optimizer", zero}});
  });
  const auto goes_on = [&](const Mlp& net) {
    Mlp undisturbed;
    fill(undisturbed);
    torch::optim::Adam optimizer(undisturbed->parameters(), options);
    steps(undisturbed, optimizer, 0, 7);
    EXPECT_EQ(difference(net->parameters(), undisturbed->parameters()), 0);
  };
  run(3, [&](ProcessGroup group) {
    Mlp net;
    Zero zero(net->parameters(), group, torch::optim::AdamOptions(77),
              {.parameters_as_bucket_view = true});
    checkpoint::load(file_, group, {{"model", net}, {"optimizer", zero}});
    steps(net, zero, 4, 7);
    goes_on(net);
    // The state that a plain optimizer has saved fits as well.
    Mlp plain;
    fill(plain);
    torch::optim::Adam optimizer(plain->parameters(), options);
    steps(plain, optimizer, 0, 4);
    checkpoint::save(file_, group, {{"optimizer", optimizer}, {"model", plain}});
    checkpoint::load(file_, group, {{"model", net}, {"optimizer", zero}});
    steps(net, zero, 4, 7);
    goes_on(net);
  });
  run(1, [&](ProcessGroup group) {
    Mlp net;
    torch::optim::Adam optimizer(net->parameters(), torch::optim::AdamOptions(77));
    checkpoint::load(file_, group, {{"model", net}, {"optimizer", optimizer}});
    steps(net, optimizer, 4, 7);
    goes_on(net);
  });
}

TEST_P(Checkpoint, WorksOverWeftsTransports) {
  for (const char* backend : {"shm", "tcp"}) {
    run(3,
        [&](ProcessGroup group) {
          Mlp net;
          fill(net);
          ZeroRedundancyOptimizer<torch::optim::Adam> zero(net->parameters(), group,
                                                           torch::optim::AdamOptions(0.01));
          steps(net, zero, 0, 1);
          if (group.rank() != 0) fill(net, 99);
          const auto large = torch::arange(3 << 20, torch::kInt);  // travels in several pieces
          checkpoint::save(file_, group, {{"model", net}, {"optimizer", zero}, {"large", large}});
          Mlp other;
          torch::Tensor arrived;
          checkpoint::load(file_, group, {{"model", other}, {"large", arrived}});
          EXPECT_TRUE(torch::equal(arrived, large));
          Mlp rank_0;
          fill(rank_0);
          torch::optim::Adam plain(rank_0->parameters(), torch::optim::AdamOptions(0.01));
          steps(rank_0, plain, 0, 1);
          EXPECT_EQ(difference(other->parameters(), rank_0->parameters()), 0);
        },
        {.backend = backend});
  }
}

TEST_P(Checkpoint, MisfitOnOneRankChangesNothing) {
  run(2, [&](ProcessGroup group) {
    Mlp saved;
    fill(saved);
    torch::optim::SGD saved_optimizer(saved->parameters(),
                                      torch::optim::SGDOptions(0.01).momentum(0.9));
    steps(saved, saved_optimizer, 0, 2);
    int epoch = 7;
    checkpoint::save(file_, group,
                     {{"epoch", epoch}, {"model", saved}, {"optimizer", saved_optimizer}});

    Mlp net(6, group.rank() == 1 ? 4 : 5, 3);
    fill(net, 5);
    torch::optim::SGD optimizer(net->parameters(), torch::optim::SGDOptions(0.5).momentum(0.1));
    auto& options = static_cast<torch::optim::SGDOptions&>(optimizer.param_groups()[0].options());
    steps(net, optimizer, 5, 6);
    const auto before = values_of(*net);
    const std::size_t states = optimizer.state().size();
    epoch = 1;
    std::string text = refused(group, Blame::Caller, [&] {
      checkpoint::load(file_, group, {{"optimizer", optimizer}, {"epoch", epoch}, {"model", net}});
    });
    EXPECT_EQ(text,
              "the checkpoint '" + file_ +
                  "' does not fit on rank 1, and nothing was loaded: part 'optimizer': the "
                  "optimizer's parameters differ: parameter 0 of group 0 is Double [5, 6] in the "
                  "file, parameter 0 of group 0 is Double [4, 6] here");
    text = refused(group, Blame::Caller, [&] {
      checkpoint::load(file_, group, {{"epoch", epoch}, {"model", net}});
    });
    EXPECT_EQ(text, "the checkpoint '" + file_ +
                        "' does not fit on rank 1, and nothing was loaded: part 'model': parameter "
                        "'first.weight' is Double [5, 6] in the file and Double [4, 6] here");
    expect_equal(values_of(*net), before);
    EXPECT_EQ(epoch, 1);
    EXPECT_EQ(optimizer.state().size(), states);
    EXPECT_EQ(options.lr(), 0.5);
    EXPECT_EQ(&options, &optimizer.param_groups()[0].options());
    // The ranks are in step for the next load.
    checkpoint::load(file_, group, {{"epoch", epoch}});
    EXPECT_EQ(epoch, 7);
  });
}

TEST_P(Checkpoint, DamagedFileIsRefusedOnAllRanks) {
  run(2, [&](ProcessGroup group) {
    Mlp net;
    fill(net);
    checkpoint::save(file_, group, {{"model", net}});
    const std::string whole = content_of(file_);
    fill(net, 5);
    const auto before = values_of(*net);
    std::mt19937 random(3);
    for (int i = 0; i < 40; ++i) {
      harness::meet(group);
      if (group.rank() == 0) {
        std::string damaged = whole;
        if (i % 2 == 0) {
          damaged.resize(random() % whole.size());
        } else {
          char& one = damaged[random() % whole.size()];
          one = static_cast<char>(one ^ (1 << random() % 8));
        }
        put(file_, damaged);
      }
      const std::string text = refused(group, Blame::Caller, [&] {
        checkpoint::load(file_, group, {{"model", net}});
      });
      EXPECT_THAT(text,
                  AllOf(HasSubstr("the checkpoint '" + file_ + "' is "), Not(HasSubstr("miniz"))));
    }
    // A file of libtorch's own, a missing file, a folder.
    if (group.rank() == 0) torch::save(net, file_);
    EXPECT_THAT(refused(group, Blame::Caller,
                        [&] {
                          checkpoint::load(file_, group, {{"model", net}});
                        }),
                HasSubstr("is not a Weft checkpoint, or is truncated"));
    EXPECT_THAT(
        refused(group, Blame::Caller,
                [&] {
                  checkpoint::load(file_ + "x", group, {{"model", net}});
                }),
        HasSubstr("the checkpoint '" + file_ +
                  "x' cannot be read: No such file or directory; checkpoint::exists() says"));
    EXPECT_THAT(
        refused(group, Blame::Caller,
                [&] {
                  checkpoint::load("no_such.pt", group, {{"model", net}});
                }),
        HasSubstr("No such file or directory in " + std::filesystem::current_path().string()));
    EXPECT_THAT(refused(group, Blame::Caller,
                        [&] {
                          checkpoint::load(folder_.path(), group, {{"model", net}});
                        }),
                HasSubstr("' has no whole checkpoint"));
    // A whole file with other content.
    if (group.rank() == 0) write_file(file_, "no archive");
    EXPECT_THAT(refused(group, Blame::Caller,
                        [&] {
                          checkpoint::load(file_, group, {{"model", net}});
                        }),
                Not(HasSubstr("\n")));
    expect_equal(values_of(*net), before);
  });
}

TEST_P(Checkpoint, FailedWriteKeepsTheOldFile) {
  run(2, [&](ProcessGroup group) {
    int epoch = 1;
    checkpoint::save(file_, group, {{"epoch", epoch}});
    for (const std::string& file :
         {folder_.path() + "/missing/run.pt", std::string("/proc/run.pt"), folder_.path()}) {
      EXPECT_THAT(refused(group, Blame::Caller,
                          [&] {
                            checkpoint::save(file, group, {{"epoch", 2}});
                          }),
                  HasSubstr("the checkpoint '" + file + "' cannot be written: "));
    }
    checkpoint::check_writable(file_, group);
    checkpoint::check_writable(folder_.path() + "/other.pt", group);
    const torch::Tensor undefined;
    EXPECT_EQ(refused(group, Blame::Caller,
                      [&] {
                        checkpoint::save(file_, group, {{"epoch", 2}, {"loss", undefined}});
                      }),
              "part 'loss' of the checkpoint cannot be saved: a tensor is undefined");
    epoch = 0;
    checkpoint::load(file_, group, {{"epoch", epoch}});
    EXPECT_EQ(epoch, 1);
  });
  EXPECT_EQ(files_in(folder_.path()), std::set<std::string>{"run.pt"});
}

TEST_P(Checkpoint, ExistsForAllRanksOrNone) {
  run(2, [&](ProcessGroup group) {
    EXPECT_FALSE(checkpoint::exists(file_, group));
    EXPECT_FALSE(checkpoint::exists(folder_.path() + "/missing/run.pt", group));
    harness::meet(group);
    checkpoint::save(file_, group, {});
    EXPECT_TRUE(checkpoint::exists(file_, group));
    // Only rank 0 looks for its file.
    EXPECT_TRUE(checkpoint::exists(group.rank() == 0 ? file_ : "elsewhere", group));
  });
}

TEST_P(Checkpoint, DifferentPartsAreRefused) {
  run(3, [&](ProcessGroup group) {
    int a = 1;
    EXPECT_THAT(refused(group, Blame::Caller,
                        [&] {
                          checkpoint::save(file_, group, {{group.rank() == 2 ? "b" : "a", a}});
                        }),
                HasSubstr("rank 2 has 'b', a variable (an integer), where rank 0 has 'a', a "
                          "variable (an integer); name "
                          "the same on all"));
    double real = 1;
    EXPECT_THAT(refused(group, Blame::Caller,
                        [&] {
                          checkpoint::save(file_, group,
                                           {group.rank() == 1 ? checkpoint::Part("a", real)
                                                              : checkpoint::Part("a", a)});
                        }),
                HasSubstr("rank 1 has 'a', a variable (a float or double), where rank 0 has 'a', a "
                          "variable (an integer)"));
    std::vector<checkpoint::Part> parts = {{"a", a}};
    torch::Tensor tensor = torch::ones({1});
    if (group.rank() != 1) parts.emplace_back("b", tensor);
    EXPECT_THAT(refused(group, Blame::Caller, [&] { checkpoint::save(file_, group, parts); }),
                HasSubstr("rank 1 has no more parts, where rank 0 has 'b', a tensor"));
    EXPECT_EQ(refused(group, Blame::Caller,
                      [&] {
                        checkpoint::save(file_, group, {{"a", a}, {"a", a}});
                      }),
              "two parts of the checkpoint have the name 'a'");
    if (group.rank() == 1) a = 2;
    EXPECT_EQ(refused(group, Blame::Caller,
                      [&] {
                        checkpoint::save(file_, group, {{group.rank() == 1 ? "" : "a", a}});
                      }),
              "a part of the checkpoint has no name");
    const std::shared_ptr<MlpImpl> none;
    const Mlp empty(nullptr);
    torch::optim::SGD* const no_optimizer = nullptr;
    for (const auto& part :
         std::vector<checkpoint::Part>{{"a", none}, {"a", empty}, {"a", no_optimizer}}) {
      EXPECT_EQ(refused(group, Blame::Caller,
                        [&] {
                          checkpoint::save(file_, group,
                                           {group.rank() == 1 ? part : checkpoint::Part("a", a)});
                        }),
                "part 'a' of the checkpoint is a null pointer; make the object first");
    }
  });
  EXPECT_TRUE(files_in(folder_.path()).empty());
}

// Whichever rank is killed, and whenever: the others get an error, and a whole file remains.
TEST(CheckpointKilled, OthersThrowAndFileStaysWhole) {
  for (int seed = 0; seed < 6; ++seed) {
    const harness::Folder folder;
    const std::string file = folder.path() + "/run.pt";
    constexpr int kRanks = 3;
    harness::Processes processes(kRanks, [&](int) {
      ProcessGroup group =
          init_process_group({.backend = "gloo", .timeout = std::chrono::seconds(20)});
      Mlp net;
      std::int64_t round = 0;
      checkpoint::save(file, group, {{"model", net}, {"round", round}});
      harness::Processes::say("ready");
      const Error error = harness::error_of([&] {
        for (;; ++round) {
          checkpoint::save(file, group, {{"model", net}, {"round", round}});
          checkpoint::load(file, group, {{"model", net}, {"round", round}});
        }
      });
      EXPECT_EQ(error.blame(), Blame::PeerLost) << error.what();
    });
    harness::kill_anywhen(processes, kRanks, seed % kRanks, seed, std::chrono::milliseconds(30));
    EXPECT_FALSE(read_file(file).empty());
  }
}

}  // namespace
}  // namespace weft::testing
