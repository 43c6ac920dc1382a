// SPDX-License-Identifier: Apache-2.0
// Norms of gradients and the scaling of losses count all rows of sharded parameters.
#include <limits>

#include <gtest/gtest.h>

#include <torch/optim/sgd.h>

#include <weft/tests/harness/ranks.h>
#include <weft/training.h>

#include "sharded_models.h"

namespace weft::testing {
namespace {

using harness::As;
using harness::run_ranks;
namespace nn = torch::nn;

// A scalar, and linear layers of 5 rows and 1 row: a rank has no rows of the last one.
struct ScaledImpl : nn::Module {
  torch::Tensor forward(const torch::Tensor& x) { return scale * last(torch::tanh(first(x))); }
  torch::Tensor scale = register_parameter("scale", torch::ones({}));
  nn::Linear first = register_module("first", nn::Linear(8, 5));
  nn::Linear last = register_module("last", nn::Linear(5, 1));
};
TORCH_MODULE(Scaled);

template <class Forward>
void backward(Forward& forward) {
  forward(numbers({4, 8}, 3)).square().mean().backward();
}

struct Plain {
  Scaled net;
  torch::Tensor operator()(const torch::Tensor& x) { return net->forward(x); }
};

TEST(ClippingShards, TheNormIsThatOfTheWholeModel) {
  for (const double norm_type : {2.0, 1.0, std::numeric_limits<double>::infinity()}) {
    Scaled expected;
    fill_values(*expected);
    Plain plain{expected};
    backward(plain);
    const double norm = clip_grad_norm_(*expected, 0.01, norm_type).item<double>();
    run_ranks(As::Threads, 2, [&](ProcessGroup& group) {
      Scaled net;
      fill_values(*net);
      FullyShardedDataParallel sharded(net, group);
      backward(sharded);
      EXPECT_NEAR(clip_grad_norm_(*net, 0.01, norm_type).item<double>(), norm, 1e-6 * norm);
      // The clipped gradients have that norm, on all ranks.
      EXPECT_NEAR(clip_grad_norm_(*net, 1, norm_type).item<double>(), 0.01, 1e-5);
    });
  }
}

TEST(ClippingShards, AllRanksLeaveOutAStepForOneRanksInfinity) {
  run_ranks(As::Threads, 2, [&](ProcessGroup& group) {
    Scaled net;
    fill_values(*net);
    FullyShardedDataParallel sharded(net, group);
    torch::optim::SGD optimizer(net->parameters(), 0.1);
    GradScaler scaler;
    for (const bool is_finite : {false, true}) {
      optimizer.zero_grad();
      scaler.scale(sharded(numbers({4, 8}, 3)).square().mean()).backward();
      for (auto& parameter : net->parameters()) {
        if (!is_finite && group.rank() == 0 && parameter.dim() == 2 && parameter.size(0) > 0)
          parameter.mutable_grad().fill_(std::numeric_limits<float>::infinity());
      }
      EXPECT_EQ(scaler.step(optimizer), is_finite) << "rank " << group.rank();
      scaler.update();
    }
  });
}

}  // namespace
}  // namespace weft::testing
