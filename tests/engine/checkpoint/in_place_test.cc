// SPDX-License-Identifier: Apache-2.0
// Values that all ranks load are read to where the program has them, after the ranks have compared
// them with their checksums.
#include <filesystem>
#include <fstream>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <torch/nn/modules/linear.h>
#include <torch/optim/adam.h>
#include <torch/serialize/archive.h>

#include <weft/tests/harness/folder.h>

#include "checkpoints.h"

namespace weft::testing {
namespace {

using ::testing::HasSubstr;

struct LargeImpl : torch::nn::Module {
  LargeImpl()
      : wide(register_module("wide", torch::nn::Linear(300, 301))),
        seen(register_buffer("seen", torch::ones({20'000}))),
        turned(register_buffer("turned", torch::ones({150, 200}).t())) {
    to(torch::kDouble);
  }
  torch::nn::Linear wide;
  torch::Tensor seen, turned;
};
TORCH_MODULE(Large);

// A model and an optimizer with state; all values depend on `seed`.
struct Trained {
  explicit Trained(int seed) {
    const torch::NoGradGuard no_grad;
    for (auto& parameter : net->parameters())
      parameter.copy_(random(parameter.sizes(), static_cast<std::uint64_t>(seed)));
    set_gradients(net->parameters(), seed);
    optimizer.step();
    net->seen.fill_(seed);
    net->turned.fill_(-seed);
    list[0].fill_(seed);
  }
  std::vector<torch::Tensor> values() {
    std::vector<torch::Tensor> all = values_of(*net);
    for (const auto& tensor : moments()) all.push_back(tensor.clone());
    all.push_back(list[0].clone());
    return all;
  }
  std::vector<torch::Tensor> moments() {
    std::vector<torch::Tensor> all;
    for (const auto& parameter : net->parameters()) {
      auto& state = static_cast<torch::optim::AdamParamState&>(
          *optimizer.state().at(parameter.unsafeGetTensorImpl()));
      all.push_back(state.exp_avg());
      all.push_back(state.exp_avg_sq());
    }
    return all;
  }
  std::vector<checkpoint::Part> parts() {
    return {{"model", net}, {"optimizer", optimizer}, {"list", list}};
  }

  Large net;
  torch::optim::Adam optimizer{net->parameters()};
  std::vector<torch::Tensor> list = {torch::zeros({30'000})};
};

TEST(InPlaceLoad, KeepsTheProgramsMemory) {
  const harness::Folder folder;
  harness::run_ranks(harness::As::Threads, 3, [&](ProcessGroup group) {
    Trained saved(1);
    checkpoint::save_async(folder.path() + "/run", group, saved.parts()).wait();
    Trained other(2);
    const auto moment = other.moments().front();
    const auto* const before = moment.const_data_ptr();
    const auto version = other.net->wide->weight._version();
    checkpoint::load(folder.path() + "/run", group, other.parts());
    expect_equal(other.values(), saved.values());
    EXPECT_EQ(other.moments().front().const_data_ptr(), before);
    EXPECT_GT(other.net->wide->weight._version(), version);
    // The optimizer goes on with it.
    for (Trained* one : {&saved, &other}) {
      set_gradients(one->net->parameters(), 5);
      one->optimizer.step();
    }
    expect_equal(other.values(), saved.values());
    // There is no state yet to which it could be read.
    const auto values = saved.values();
    checkpoint::save_async(folder.path() + "/run", group, saved.parts()).wait();
    Trained fresh(3);
    fresh.optimizer.state().clear();
    checkpoint::load(folder.path() + "/run", group, fresh.parts());
    expect_equal(fresh.values(), values);
  });
}

// Removes a folder when the ranks have compared its files, before they read these to their place.
struct Removal {
  void save(torch::serialize::OutputArchive& archive) const {
    archive.write("nothing", c10::IValue(true));
  }
  void load(torch::serialize::InputArchive& /*archive*/) {
    if (++loads > 1) return;
    harness::meet(group);
    if (group.rank() == 0) std::filesystem::remove_all(folder);
    harness::meet(group);
  }
  ProcessGroup& group;
  std::string folder;
  int loads = 0;
};

TEST(InPlaceLoad, SurvivesRemovalOfTheFiles) {
  const harness::Folder folder;
  const std::string run = folder.path() + "/run";
  harness::run_ranks(harness::As::Threads, 3, [&](ProcessGroup group) {
    Trained saved(1), other(2);
    Removal removal{group, run + "/1"};
    const auto parts_of = [&](Trained& trained) {
      std::vector<checkpoint::Part> parts = trained.parts();
      parts.emplace_back("removal", removal);
      return parts;
    };
    checkpoint::save_async(run, group, parts_of(saved)).wait();
    checkpoint::load(run, group, parts_of(other));
    expect_equal(other.values(), saved.values());
  });
  EXPECT_TRUE(files_in(run).empty());
}

TEST(InPlaceLoad, DamageChangesNothingOnAnyRank) {
  const harness::Folder folder;
  const std::string run = folder.path() + "/run";
  harness::run_ranks(harness::As::Threads, 3, [&](ProcessGroup group) {
    Trained saved(1);
    checkpoint::save_async(run, group, saved.parts()).wait();
    for (int file = 0; file < 3; ++file) {
      const std::string name = run + "/1/rank0000" + std::to_string(file) + ".safetensors";
      const std::string whole = content_of(name);
      harness::meet(group);
      for (const std::size_t place : {whole.size() - 1, whole.size() / 2}) {
        std::string changed = whole;
        changed[place] ^= 1;
        if (group.rank() == 0) put(name, changed);
        harness::meet(group);
        Trained other(2);
        const auto before = other.values();
        EXPECT_THAT(
            refused(group, Blame::Caller, [&] { checkpoint::load(run, group, other.parts()); }),
            ::testing::AllOf(HasSubstr("and nothing was loaded"),
                             HasSubstr("'" + name + "' is damaged")));
        expect_equal(other.values(), before);
        harness::meet(group);
      }
      if (group.rank() == 0) put(name, whole);
      harness::meet(group);
    }
  });
}

}  // namespace
}  // namespace weft::testing
