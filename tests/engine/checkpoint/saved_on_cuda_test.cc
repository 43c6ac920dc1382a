// SPDX-License-Identifier: Apache-2.0
// checkpoint::save_async of tensors on the fake driver's GPUs: the host does not wait for their
// copies, and what is enqueued behind the call does not show in them.
#include <barrier>

#include <weft/checkpoint.h>
#include <weft/tests/harness/folder.h>

#include "../shard/on_fake_gpu.h"

namespace weft {
namespace {

using fake_gpu::Product;
using fake_gpu::Sharded;
using fake_gpu::View;

struct SavedOnCuda : fake_gpu::OnFakeGpus {
  static void set_weights(const Product& model, float value) {
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
  std::barrier meeting(2);
  run([&](Rank& rank) {
    const auto model = std::make_shared<Product>(rank.gpu);
    Sharded sharded(model, rank.group);
    set_weights(*model, 1);
    rank.drain();
    checkpoint::save_async(folder_, rank.group, {{"model", *model}}).wait();
    expect_saved(rank.group, 1);
    meeting.arrive_and_wait();
    const int blocked = fake_->host_blocks();
    meeting.arrive_and_wait();
    fake_->hold(rank.stream());
    set_weights(*model, 5);
    checkpoint::Saving saving = checkpoint::save_async(folder_, rank.group, {{"model", *model}});
    set_weights(*model, 9);  // the next step
    EXPECT_EQ(fake_->host_blocks(), blocked);
    EXPECT_FALSE(saving.query());
    meeting.arrive_and_wait();
    fake_->release(rank.stream());
    saving.wait();
    expect_saved(rank.group, 5);
    rank.drain();
  });
}

TEST_F(SavedOnCuda, ShardsInHostMemoryAreSavedFromThere) {
  run([&](Rank& rank) {
    const auto model = std::make_shared<Product>(rank.gpu);
    Sharded sharded(model, rank.group, FullyShardOptions{.offload = true});
    set_weights(*model, 5);
    step(sharded, rank);
    checkpoint::Saving saving = checkpoint::save_async(folder_, rank.group, {{"model", *model}});
    set_weights(*model, 9);
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
