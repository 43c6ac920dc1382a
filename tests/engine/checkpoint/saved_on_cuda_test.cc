// SPDX-License-Identifier: Apache-2.0
// checkpoint::save_async of tensors on the fake driver's GPUs: the host does not wait for their
// copies, and what is enqueued behind the call does not show in them.
#include <algorithm>
#include <vector>

#include <weft/checkpoint.h>
#include <weft/tests/harness/folder.h>

#include "../shard/on_fake_gpu.h"

namespace weft {
namespace {

using fake_gpu::Product;
using fake_gpu::Sharded;
using fake_gpu::View;

struct SavedOnCuda : fake_gpu::OnFakeGpus {
  static void fill_weights(const Product& model, float value) {
    const torch::NoGradGuard no_grad;
    for (auto& shard : model.parameters()) shard.fill_(value);
  }
  void expect_saved(ProcessGroup& group, float value) const {
    const auto loaded = std::make_shared<Product>(c10::Device(c10::kCPU));
    checkpoint::load(folder_, group, {{"model", *loaded}});
    for (const at::Tensor& parameter : loaded->parameters()) {
      const View values(parameter);
      for (std::int64_t i = 0; i < values.count; ++i) EXPECT_EQ(values[i], value) << i;
    }
  }
  const harness::Folder temporary_;
  const std::string folder_ = temporary_.path() + "/run";
};

TEST_F(SavedOnCuda, StreamsCopyTheValuesAndTheHostGoesOn) {
  run([&](Rank& rank) {
    const auto model = std::make_shared<Product>(rank.gpu);
    Sharded sharded(model, rank.group);
    fill_weights(*model, 1);
    rank.drain();
    checkpoint::save_async(folder_, rank.group, {{"model", *model}}).wait();
    expect_saved(rank.group, 1);
    meet();
    const int blocked = fake_->host_blocks();
    meet();
    fake_->hold(rank.stream());
    fill_weights(*model, 5);
    checkpoint::Saving saving = checkpoint::save_async(folder_, rank.group, {{"model", *model}});
    fill_weights(*model, 9);  // the next step
    EXPECT_EQ(fake_->host_blocks(), blocked);
    EXPECT_FALSE(saving.query());
    meet();
    fake_->release(rank.stream());
    saving.wait();
    expect_saved(rank.group, 5);
    rank.drain();
  });
}

// No kernel behind the call waits for the host's copies, which are made of what the values were.
TEST_F(SavedOnCuda, StagedValuesGoToTheHostBesideTheNextKernels) {
  run([&](Rank& rank) {
    const auto model = std::make_shared<Product>(rank.gpu);
    Sharded sharded(model, rank.group);
    const auto save = [&] {
      return checkpoint::save_async(folder_, rank.group, {{"model", *model}},
                                    {.stage_on_gpu = true});
    };
    save().wait();  // pinned memory is there from now on
    fill_weights(*model, 5);
    rank.drain();
    meet();
    const auto copies_out = [&] {
      return std::ranges::count(fake_->executed(rank.stream()), "copy out");
    };
    const auto before = copies_out();
    const int blocked = fake_->host_blocks();
    meet();
    fake_->hold(rank.stream());
    checkpoint::Saving saving = save();
    fill_weights(*model, 9);
    // As large as the copies, whose memory is not free yet.
    std::vector<at::Tensor> others;
    for (int i = 0; i < 2 * Product::kParts; ++i) others.push_back(rank.filled(-1, 2));
    EXPECT_EQ(fake_->host_blocks(), blocked);
    EXPECT_FALSE(saving.query());
    meet();
    fake_->release(rank.stream());
    saving.wait();
    rank.drain();
    EXPECT_EQ(copies_out(), before);
    expect_saved(rank.group, 5);
  });
}

TEST_F(SavedOnCuda, ShardsInHostMemoryAreSavedFromThere) {
  run([&](Rank& rank) {
    const auto model = std::make_shared<Product>(rank.gpu);
    Sharded sharded(model, rank.group, FullyShardOptions{.offload = true});
    fill_weights(*model, 5);
    step(sharded, rank);
    checkpoint::Saving saving = checkpoint::save_async(folder_, rank.group, {{"model", *model}});
    fill_weights(*model, 9);
    saving.wait();
    expect_saved(rank.group, 5);
    checkpoint::load(folder_, rank.group, {{"model", *model}});
    for (const auto& shard : model->parameters()) {
      EXPECT_TRUE(shard.is_pinned());
      EXPECT_EQ(View(shard)[0], 5);
    }
    step(sharded, rank);
    EXPECT_EQ(View(model->parameters()[0].grad())[0], 1.5F * 5 * 5 * 5);
  });
}

}  // namespace
}  // namespace weft
