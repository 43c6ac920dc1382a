// SPDX-License-Identifier: Apache-2.0
// Checkpoints that all ranks write while training goes on: what is loaded equals what was saved, on
// any number of ranks, and there is always a whole checkpoint.
#include <fstream>
#include <limits>

#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/file.h>

#include <torch/nn/modules/linear.h>
#include <torch/optim/adam.h>
#include <torch/optim/sgd.h>

#include <weft/base/descriptor.h>
#include <weft/tests/harness/folder.h>

#include "checkpoints.h"

namespace weft::testing {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

class SaveAsync : public ::testing::Test {
 protected:
  const harness::Folder temporary_;
  const std::string folder_ = temporary_.path() + "/run";
  static void run(int ranks, const harness::Body& body, const ProcessGroupOptions& options = {}) {
    harness::run_ranks(harness::As::Threads, ranks, body, options);
  }
};

TEST_F(SaveAsync, ModelAndNumbersComeBack) {
  run(2, [&](ProcessGroup group) {
    Mlp net;
    fill(net);
    std::vector<int> losses = {3, 1, 2};
    checkpoint::Saving saving =
        checkpoint::save_async(folder_, group, {{"model", net}, {"losses", losses}});
    const auto saved = values_of(*net);
    fill(net, 7);  // training goes on at once
    losses = {};
    saving.wait();
    EXPECT_TRUE(saving.query());
    EXPECT_TRUE(checkpoint::exists(folder_, group));
    checkpoint::load(folder_, group, {{"model", net}, {"losses", losses}});
    expect_equal(values_of(*net), saved);
    EXPECT_THAT(losses, ElementsAre(3, 1, 2));
  });
  EXPECT_EQ(files_in(folder_), std::set<std::string>{"1"});
  EXPECT_EQ(files_in(folder_ + "/1"),
            (std::set<std::string>{"manifest", "rank00000.safetensors", "rank00001.safetensors"}));
}

// Large enough that its parameters are cut into rows.
struct WideImpl : torch::nn::Module {
  WideImpl()
      : wide(register_module("wide", torch::nn::Linear(16, 1001))),
        odd(register_parameter("odd", torch::zeros({3, 3'000}))),
        seen(register_buffer("seen", torch::zeros({20'000}))) {
    to(torch::kDouble);
  }
  torch::nn::Linear wide;
  torch::Tensor odd, seen;
};
TORCH_MODULE(Wide);

void fill_all(const Wide& net, int seed) {
  const torch::NoGradGuard no_grad;
  for (auto& parameter : net->parameters())
    parameter.copy_(random(parameter.sizes(), static_cast<std::uint64_t>(seed++)));
  net->seen.fill_(seed);
}

using Zero = ZeroRedundancyOptimizer<torch::optim::Adam>;
using torch::optim::Adam;
using torch::optim::AdamOptions;

template <class Optimizer>
void step_on(const Wide& net, Optimizer& optimizer, int from, int to) {
  for (int step = from; step < to; ++step) {
    set_gradients(net->parameters(), step);
    optimizer.step();
  }
}

// The model after `steps` steps, on one rank.
std::vector<torch::Tensor> undisturbed(int steps) {
  Wide net;
  fill_all(net, 1);
  Adam optimizer(net->parameters(), AdamOptions(0.01));
  step_on(net, optimizer, 0, steps);
  return values_of(*net);
}

template <class Optimizer, class... Group>
void save_after_two_steps(const std::string& folder, ProcessGroup& group, Group... more) {
  Wide net;
  fill_all(net, 1);
  Optimizer optimizer(net->parameters(), more..., AdamOptions(0.01));
  step_on(net, optimizer, 0, 2);
  if (group.rank() != 0) net->seen.fill_(99);  // buffers are rank 0's
  checkpoint::Saving saving =
      checkpoint::save_async(folder, group, {{"model", net}, {"optimizer", optimizer}});
  step_on(net, optimizer, 2, 3);
  saving.wait();
}

template <class Optimizer, class... Group>
void go_on_from(const std::string& folder, ProcessGroup& group, Group... more) {
  Wide net;
  fill_all(net, 5);
  Optimizer optimizer(net->parameters(), more..., AdamOptions(7));
  checkpoint::load(folder, group, {{"model", net}, {"optimizer", optimizer}});
  step_on(net, optimizer, 2, 4);
  expect_equal(values_of(*net), undisturbed(4));
}

TEST_F(SaveAsync, LoadsEqualBitsOnAnyNumberOfRanks) {
  for (const bool is_sharded : {false, true}) {
    run(4, [&](ProcessGroup group) {
      is_sharded ? save_after_two_steps<Zero>(folder_, group, group)
                 : save_after_two_steps<Adam>(folder_, group);
    });
    for (const int ranks : {1, 3, 4}) {
      run(ranks, [&](ProcessGroup group) {
        go_on_from<Adam>(folder_, group);
        go_on_from<Zero>(folder_, group, group);
      });
    }
  }
}

TEST_F(SaveAsync, EachRankWritesItsShare) {
  run(4, [&](ProcessGroup group) { save_after_two_steps<Adam>(folder_, group); });
  std::uintmax_t most = 0;
  std::uintmax_t least = std::numeric_limits<std::uintmax_t>::max();
  for (int rank = 0; rank < 4; ++rank) {
    const auto bytes =
        std::filesystem::file_size(folder_ + "/1/rank0000" + std::to_string(rank) + ".safetensors");
    most = std::max(most, bytes);
    least = std::min(least, bytes);
  }
  EXPECT_LT(most, 3 * least);  // `odd` has fewer rows than there are ranks
}

TEST_F(SaveAsync, NewestOrNumberedIsLoaded) {
  run(2, [&](ProcessGroup group) {
    int round = 0;
    EXPECT_FALSE(checkpoint::exists(folder_, group));
    harness::meet(group);
    for (round = 1; round <= 4; ++round)
      checkpoint::save_async(folder_, group, {{"round", round}}, {.keep = 2}).wait();
    checkpoint::load(folder_ + "/3", group, {{"round", round}});
    EXPECT_EQ(round, 3);
    checkpoint::load(folder_ + "/", group, {{"round", round}});
    EXPECT_EQ(round, 4);
    EXPECT_TRUE(checkpoint::exists(folder_ + "/3", group));
    EXPECT_FALSE(checkpoint::exists(folder_ + "/2", group));
    checkpoint::check_writable(folder_, group);
  });
  EXPECT_EQ(files_in(folder_), (std::set<std::string>{"3", "4"}));
}

TEST_F(SaveAsync, CutOffIsPassedOver) {
  run(2, [&](ProcessGroup group) {
    int round = 1;
    checkpoint::save_async(folder_, group, {{"round", round}}, {.keep = 5}).wait();
    checkpoint::save_async(folder_, group, {{"round", ++round}}, {.keep = 5}).wait();
    if (group.rank() == 0) std::filesystem::remove(folder_ + "/2/manifest");
    if (group.rank() == 0) std::filesystem::create_directory(folder_ + "/7");
    if (group.rank() == 0) std::filesystem::create_directories(folder_ + "/5/of the user");
    harness::meet(group);
    checkpoint::load(folder_, group, {{"round", round}});
    EXPECT_EQ(round, 1);
    EXPECT_TRUE(checkpoint::exists(folder_, group));
    EXPECT_FALSE(checkpoint::exists(folder_ + "/2", group));
    EXPECT_THAT(harness::LogWatch::current().text(),
                HasSubstr("'" + folder_ + "/2' was cut off while it was written"));
    EXPECT_THAT(refused(group, Blame::Caller,
                        [&] {
                          checkpoint::load(folder_ + "/2", group, {{"round", round}});
                        }),
                HasSubstr("the folder '" + folder_ + "/2' has no whole checkpoint"));
    checkpoint::save_async(folder_, group, {{"round", round}}, {.keep = 5}).wait();
  });
  EXPECT_EQ(files_in(folder_), (std::set<std::string>{"1", "5", "8"}));
}

TEST_F(SaveAsync, DamageIsFound) {
  run(2, [&](ProcessGroup group) {
    Mlp net;
    fill(net);
    checkpoint::save_async(folder_, group, {{"model", net}}).wait();
    const auto before = values_of(*net);
    const auto error_after = [&](const std::string& name,
                                 const std::function<void(std::string&)>& change) {
      const std::string file = folder_ + "/1/" + name;
      harness::meet(group);
      const std::string whole = content_of(file);
      std::string changed = whole;
      change(changed);
      harness::meet(group);
      if (group.rank() == 0) put(file, changed);
      harness::meet(group);
      const std::string text = refused(group, Blame::Caller, [&] {
        checkpoint::load(folder_, group, {{"model", net}});
      });
      if (group.rank() == 0) put(file, whole);
      harness::meet(group);
      return text;
    };
    const std::string file = "rank00001.safetensors";
    const std::string path = "'" + folder_ + "/1/" + file + "'";
    EXPECT_THAT(error_after(file, [](std::string& bytes) { bytes.back() ^= 1; }),
                AllOf(HasSubstr(path + " is damaged: the checksum of 'model."),
                      HasSubstr("load another checkpoint")));
    EXPECT_THAT(error_after(file, [](std::string& bytes) { bytes[20] ^= 1; }),
                HasSubstr(path + " is damaged: the checksum of its header differs"));
    EXPECT_THAT(error_after(file, [](std::string& bytes) { bytes.pop_back(); }),
                HasSubstr(path + " is damaged: it has "));
    EXPECT_THAT(error_after("manifest", [](std::string& bytes) { bytes[20] ^= 1; }),
                AllOf(HasSubstr(folder_ + "/1/manifest' is damaged")));
    EXPECT_THAT(error_after("manifest", [](std::string& bytes) { bytes.resize(40); }),
                HasSubstr(folder_ + "/1/manifest' is not a Weft checkpoint, or is truncated"));
    if (group.rank() == 0) std::filesystem::remove(folder_ + "/1/" + file);
    EXPECT_THAT(refused(group, Blame::Caller,
                        [&] {
                          checkpoint::load(folder_, group, {{"model", net}});
                        }),
                HasSubstr("the checkpoint's file " + path + " is missing: put it back"));
    expect_equal(values_of(*net), before);
  });
}

TEST_F(SaveAsync, EachChunkHasAChecksum) {
  run(1, [&](ProcessGroup group) {
    torch::Tensor large = torch::zeros({65 << 20}, torch::kByte);
    checkpoint::save_async(folder_, group, {{"large", large}}).wait();
    const std::string file = folder_ + "/1/rank00000.safetensors";
    const auto change = [&](std::size_t from_end) {
      std::fstream stream(file, std::ios::binary | std::ios::in | std::ios::out);
      stream.seekp(-static_cast<std::streamoff>(from_end), std::ios::end);
      stream.put(1);
    };
    checkpoint::load(folder_, group, {{"large", large}});
    change(1);  // in the second chunk
    EXPECT_THAT(refused(group, Blame::Caller,
                        [&] {
                          checkpoint::load(folder_, group, {{"large", large}});
                        }),
                HasSubstr("the checksum of 'large' differs in the file's bytes 67112960 to "
                          "68161536"));
  });
}

TEST_F(SaveAsync, MisfitOnOneRankChangesNothing) {
  run(2, [&](ProcessGroup group) {
    Mlp saved;
    fill(saved);
    int epoch = 7;
    checkpoint::save_async(folder_, group, {{"epoch", epoch}, {"model", saved}}).wait();
    Mlp net(6, group.rank() == 1 ? 4 : 5, 3);
    fill(net, 5);
    const auto before = values_of(*net);
    epoch = 1;
    EXPECT_EQ(refused(group, Blame::Caller,
                      [&] {
                        checkpoint::load(folder_, group, {{"epoch", epoch}, {"model", net}});
                      }),
              "the checkpoint '" + folder_ +
                  "/1' does not fit on rank 1, and nothing was loaded: part 'model': parameter "
                  "'first.weight' is Double [5, 6] in the file and Double [4, 6] here");
    EXPECT_EQ(epoch, 1);
    expect_equal(values_of(*net), before);
    EXPECT_THAT(
        refused(group, Blame::Caller,
                [&] {
                  checkpoint::load(folder_, group, {{"other", epoch}});
                }),
        HasSubstr(
            "part 'other': the checkpoint has no part of that name; it has 'epoch', 'model'"));
    EXPECT_THAT(refused(group, Blame::Caller,
                        [&] {
                          checkpoint::load(folder_, group, {{"model", epoch}});
                        }),
                HasSubstr("part 'model' is a module in the checkpoint and a variable here"));
  });
}

TEST_F(SaveAsync, WrongCallsAreRefused) {
  run(2, [&](ProcessGroup group) {
    int epoch = 1;
    const auto text_of = [&](const std::string& folder, const std::vector<checkpoint::Part>& parts,
                             int keep = 1) {
      return refused(group, Blame::Caller,
                     [&] { checkpoint::save_async(folder, group, parts, {.keep = keep}).wait(); });
    };
    EXPECT_EQ(text_of(folder_, {{"a", epoch}}, 0),
              "SaveOptions::keep is 0; keep at least 1 checkpoint");
    EXPECT_THAT(text_of(folder_, {{group.rank() == 1 ? "b" : "a", epoch}}),
                HasSubstr("the ranks name different parts"));
    EXPECT_THAT(text_of(folder_ + "/missing/run", {{"a", epoch}}),
                HasSubstr("the folder that it would be in is missing; make that first"));
    EXPECT_THAT(text_of("/proc/run", {{"a", epoch}}),
                HasSubstr("the checkpoint's folder '/proc/run' cannot be written"));
    if (group.rank() == 0) put(temporary_.path() + "/file", "x");
    EXPECT_THAT(text_of(temporary_.path() + "/file", {{"a", epoch}}),
                HasSubstr("it is not a folder; name another one"));
    EXPECT_THAT(text_of(group.rank() == 0 ? folder_ : "/elsewhere", {{"a", epoch}}),
                HasSubstr("rank 1 does not see the folder '/elsewhere/1' that rank 0 has made"));
    torch::Tensor sparse = torch::eye(3).to_sparse();
    EXPECT_THAT(text_of(folder_, {{"a", sparse}}),
                HasSubstr("part 'a' of the checkpoint cannot be saved: 'a' is sparse"));
    std::vector<torch::Tensor> list = {torch::ones({1})};
    EXPECT_THAT(text_of(folder_, {{"a", list}, {"a.0", epoch}}),
                HasSubstr("the values of the part 'a.0' would have names like those of 'a'"));
  });
  EXPECT_TRUE(files_in(folder_).empty());
}

TEST_F(SaveAsync, TensorWithoutValuesIsRefused) {
  run(2, [&](ProcessGroup group) {
    torch::Tensor meta = torch::empty({3}, at::kMeta);
    EXPECT_THAT(refused(group, Blame::Caller,
                        [&] {
                          checkpoint::save_async(folder_, group, {{"a", meta}}).wait();
                        }),
                AllOf(HasSubstr("part 'a' of the checkpoint cannot be saved: 'a' has no values"),
                      HasSubstr("weft::materialize(model, seed)")));
  });
}

TEST_F(SaveAsync, SlashAtTheEndChangesNothing) {
  run(2, [&](ProcessGroup group) {
    const std::string folder = folder_ + "/";
    int round = 1;
    checkpoint::check_writable(folder, group);
    checkpoint::save_async(folder, group, {{"round", round}}).wait();
    EXPECT_TRUE(checkpoint::exists(folder, group));
    round = 2;
    checkpoint::load(folder, group, {{"round", round}});
    EXPECT_EQ(round, 1);
  });
  EXPECT_EQ(files_in(folder_), std::set<std::string>{"1"});
}

TEST_F(SaveAsync, ModelsThatDifferAreRefused) {
  run(2, [&](ProcessGroup group) {
    int round = 1;
    checkpoint::save_async(folder_, group, {{"round", round}}).wait();
    Mlp net(group.rank() == 0 ? 6 : 7, 5, 3);
    torch::optim::SGD sgd(net->parameters(), torch::optim::SGDOptions(0.1).momentum(0.9));
    set_gradients(net->parameters(), 1);
    if (group.rank() == 0) sgd.step();  // only rank 0 has state
    EXPECT_THAT(refused(group, Blame::Caller,
                        [&] {
                          checkpoint::save_async(folder_, group, {{"sgd", sgd}}).wait();
                        }),
                HasSubstr("the ranks have different parameters or optimizer states for one "
                          "checkpoint: rank 1 has no more of them, where rank 0 has 'sgd.state."));
    EXPECT_THAT(refused(group, Blame::Caller,
                        [&] {
                          checkpoint::save_async(folder_, group, {{"net", net}}).wait();
                        }),
                HasSubstr("rank 1 has 'net.first.weight', Double [5, 7], where rank 0 has "
                          "'net.first.weight', Double [5, 6]"));
    checkpoint::load(folder_, group, {{"round", round}});
  });
  EXPECT_EQ(files_in(folder_), std::set<std::string>{"1"});
}

TEST_F(SaveAsync, SecondWaitsForFirst) {
  run(2, [&](ProcessGroup group) {
    torch::Tensor large = torch::zeros({1 << 20});
    checkpoint::Saving saving;
    EXPECT_TRUE(saving.query());
    saving.wait();
    for (int i = 0; i < 4; ++i) {
      large.fill_(i);
      saving = checkpoint::save_async(folder_, group, {{"large", large}});
    }
    checkpoint::Saving moved = std::move(saving);
    moved.wait();
    checkpoint::load(folder_, group, {{"large", large}});
    EXPECT_TRUE(torch::equal(large, torch::full({1 << 20}, 3.0F)));
    { const auto dropped = checkpoint::save_async(folder_, group, {{"large", large}}); }
    harness::meet(group);
    EXPECT_TRUE(checkpoint::exists(folder_ + "/5", group));
  });
}

TEST_F(SaveAsync, LoadWaitsForTheRunningSave) {
  run(2, [&](ProcessGroup group) {
    torch::Tensor large = torch::zeros({1 << 20});
    checkpoint::Saving saving;
    for (int i = 0; i < 4; ++i) {
      large.fill_(i);
      saving = checkpoint::save_async(folder_, group, {{"large", large}});
      large.fill_(-1);
      checkpoint::load(folder_, group, {{"large", large}});
      EXPECT_TRUE(torch::equal(large, torch::full({1 << 20}, static_cast<float>(i))));
    }
  });
}

TEST_F(SaveAsync, FolderOfAnotherWriterIsBusy) {
  run(1, [&](ProcessGroup group) {
    int round = 1;
    checkpoint::save_async(folder_, group, {{"round", round}}).wait();
    const Descriptor other(::open(folder_.c_str(), O_RDONLY | O_DIRECTORY));
    ASSERT_EQ(::flock(other.get(), LOCK_EX), 0);
    EXPECT_THAT(refused(group, Blame::Busy,
                        [&] {
                          checkpoint::save_async(folder_, group, {{"round", round}}).wait();
                        }),
                HasSubstr("another process or group is writing a checkpoint there"));
  });
}

}  // namespace
}  // namespace weft::testing
