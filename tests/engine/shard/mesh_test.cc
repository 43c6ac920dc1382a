// SPDX-License-Identifier: Apache-2.0
// Models that are sharded over a mesh: along its last axis, and averaged along its first.
#include <limits>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <torch/csrc/autograd/custom_function.h>
#include <torch/nn/modules/batchnorm.h>
#include <torch/optim/adamw.h>

#include <weft/mesh.h>
#include <weft/tests/harness/ranks.h>
#include <weft/training.h>

#include "sharded_models.h"

namespace weft::testing {
namespace {

using harness::As;
using harness::error_of;
using harness::run_ranks;
namespace nn = torch::nn;

Mesh two_axes(const ProcessGroup& group, int first) {
  return {group, {{"copies", first}, {"rows", -1}}};
}

torch::Tensor loss_of(const torch::Tensor& output) { return output.square().mean(); }

template <class Wrapped>
void train(Wrapped& wrapped, const nn::Module& model, int rank, int steps = 3) {
  torch::optim::AdamW optimizer(model.parameters(), torch::optim::AdamWOptions(0.01));
  for (int step = 0; step < steps; ++step) {
    optimizer.zero_grad();
    loss_of(wrapped(numbers({4, 8}, static_cast<std::uint64_t>(100 * step + rank)))).backward();
    optimizer.step();
  }
}

// The parameters that DistributedDataParallel over all ranks trains.
template <class Make>
std::vector<torch::Tensor> trained_by_ddp(ProcessGroup& group, const Make& make) {
  auto model = make();
  fill_values(*model);
  DistributedDataParallel ddp(model, group);
  train(ddp, *model, group.rank());
  return copies(model->parameters());
}

template <class Make>
std::vector<torch::Tensor> trained_over(const Mesh& mesh, const Make& make,
                                        const FullyShardOptions& options = {}) {
  auto model = make();
  const int rank = mesh.group().rank();
  fill_values(*model, rank == 0 ? 1 : 2);  // rank 0's values count
  FullyShardedDataParallel sharded(model, mesh, options);
  train(sharded, *model, rank);
  return whole(*model);
}

void expect_close(const std::vector<torch::Tensor>& a, const std::vector<torch::Tensor>& b) {
  ASSERT_EQ(a.size(), b.size());
  for (std::size_t i = 0; i < a.size(); ++i)
    EXPECT_LE((a[i] - b[i]).norm().item<double>(), 1e-5 * b[i].norm().item<double>()) << i;
}

void expect_same_on_all(ProcessGroup& group, const std::vector<torch::Tensor>& values) {
  for (const torch::Tensor& value : values) {
    const auto first = value.clone();
    group.broadcast(first, 0).wait();
    EXPECT_TRUE(torch::equal(first, value)) << "rank " << group.rank();
  }
}

class ShardedOver2x2 : public ::testing::TestWithParam<As> {};
INSTANTIATE_TEST_SUITE_P(, ShardedOver2x2, ::testing::Values(As::Threads, As::Processes),
                         [](const auto& info) { return harness::name(info.param); });

TEST_P(ShardedOver2x2, TrainsAsDdpOverAllRanks) {
  run_ranks(GetParam(), 4, [](ProcessGroup& group) {
    const auto make = [] { return blocks(3); };
    const Mesh mesh = two_axes(group, 2);
    const auto parameters = trained_over(mesh, make);
    expect_close(parameters, trained_by_ddp(group, make));
    expect_same_on_all(group, parameters);
  });
}

TEST(ShardedOverMesh, OneRankAlongAnAxisGivesTheBitsOfDdp) {
  run_ranks(As::Threads, 2, [](ProcessGroup& group) {
    const auto make = [] { return blocks(3); };
    const auto expected = trained_by_ddp(group, make);
    EXPECT_TRUE(are_equal(trained_over(two_axes(group, 1), make), expected));
    EXPECT_TRUE(are_equal(trained_over(two_axes(group, 2), make), expected));
    EXPECT_TRUE(are_equal(trained_over(Mesh(group, {{"any", 2}}), make), expected));
  });
}

TEST(ShardedOverMesh, RowsAreSpreadAlongTheLastAxis) {
  run_ranks(As::Threads, 4, [](ProcessGroup& group) {
    nn::Linear net(3, 5);
    fill_values(*net);
    const auto values = copies(net->parameters());
    const FullyShardedDataParallel sharded(net, two_axes(group, 2));
    const bool is_first = group.rank() % 2 == 0;
    EXPECT_TRUE(torch::equal(net->parameters()[0],
                             is_first ? values[0].slice(0, 0, 3) : values[0].slice(0, 3, 5)));
  });
}

TEST(ShardedOverMesh, ThreeAxesAreRefused) {
  run_ranks(As::Threads, 4, [](ProcessGroup& group) {
    const Mesh mesh(group, {{"a", 1}, {"b", 2}, {"c", 2}});
    nn::Linear net(8, 8);
    for (const Error& error : {error_of([&] { FullyShardedDataParallel(net, mesh); }),
                               error_of([&] { fully_shard(net, mesh); })}) {
      EXPECT_EQ(error.blame(), Blame::Caller);
      EXPECT_THAT(error.text(), ::testing::HasSubstr("mesh.slice({\"b\", \"c\"})"));
    }
    const auto make = [] { return blocks(2); };
    expect_close(trained_over(mesh.slice({"b", "c"}), make), trained_by_ddp(group, make));
  });
}

// A scalar, a layer of five rows, one of a single row, which leaves ranks without any, and one that
// is used by even ranks only.
struct UnevenImpl : nn::Module {
  torch::Tensor forward(const torch::Tensor& x, bool uses_side) {
    const auto y = torch::tanh(first(x));
    return scale * last(uses_side ? y + side(x) : y);
  }
  torch::Tensor scale = register_parameter("scale", torch::ones({}));
  nn::Linear first = register_module("first", nn::Linear(8, 5));
  nn::Linear side = register_module("side", nn::Linear(8, 5));
  nn::Linear last = register_module("last", nn::Linear(5, 1));
};
TORCH_MODULE(Uneven);

template <class Wrapped>
void backward(Wrapped& wrapped, int rank, std::uint64_t step = 0) {
  const auto input = numbers({4, 8}, 100 * step + static_cast<std::uint64_t>(rank));
  loss_of(wrapped(input, true)).backward();
}

TEST(ShardedOverMesh, ClippingCountsEachRowOnce) {
  run_ranks(As::Threads, 4, [](ProcessGroup& group) {
    Uneven reference, net;
    fill_values(*reference);
    fill_values(*net);
    DistributedDataParallel ddp(reference, group);
    FullyShardedDataParallel sharded(net, two_axes(group, 2));
    backward(ddp, group.rank());
    backward(sharded, group.rank());
    for (const double norm_type : {2.0, 1.0}) {
      const double norm = clip_grad_norm_(*reference, 0.01, norm_type).item<double>();
      EXPECT_NEAR(clip_grad_norm_(*net, 0.01, norm_type).item<double>(), norm, 1e-5 * norm);
      EXPECT_NEAR(clip_grad_norm_(*net, 1, norm_type).item<double>(), 0.01, 1e-5);
    }
  });
}

TEST(ShardedOverMesh, OneRanksInfinityStopsTheStepOfAll) {
  run_ranks(As::Threads, 4, [](ProcessGroup& group) {
    Uneven net;
    fill_values(*net);
    FullyShardedDataParallel sharded(net, two_axes(group, 2));
    torch::optim::SGD optimizer(net->parameters(), 0.1);
    GradScaler scaler;
    constexpr float kInfinity = std::numeric_limits<float>::infinity();
    for (const std::string where : {"in an input", "in a gradient", "nowhere"}) {
      optimizer.zero_grad();
      auto input = numbers({4, 8}, 3);
      const bool has_it = group.rank() == 1 && where != "nowhere";
      if (has_it && where == "in an input") input[0][0] = kInfinity;
      scaler.scale(loss_of(sharded(input, true))).backward();
      // The ranks with the same rows would otherwise step them.
      if (has_it && where == "in a gradient")
        net->first->parameters()[0].mutable_grad().fill_(kInfinity);
      EXPECT_EQ(scaler.step(optimizer), where == "nowhere") << where << ", rank " << group.rank();
      scaler.update();
    }
  });
}

TEST(ShardedOverMesh, NoSyncKeepsGradientsUntilTheNextBackward) {
  run_ranks(As::Threads, 4, [](ProcessGroup& group) {
    Uneven reference, net;
    fill_values(*reference);
    fill_values(*net);
    DistributedDataParallel ddp(reference, group);
    FullyShardedDataParallel sharded(net, two_axes(group, 2), {.reshard_after_forward = false});
    const auto accumulate = [&](auto& wrapped) {
      for (const std::uint64_t step : {0U, 1U, 2U}) {
        const auto local = wrapped.no_sync(step < 2);
        backward(wrapped, group.rank(), step);
      }
    };
    accumulate(ddp);
    accumulate(sharded);
    torch::optim::SGD of_reference(reference->parameters(), 1.0), of_net(net->parameters(), 1.0);
    of_reference.step();
    of_net.step();
    expect_close(whole(*net), copies(reference->parameters()));
  });
}

TEST(ShardedOverMesh, AParameterThatOneRankUsesIsAveragedOverAll) {
  run_ranks(As::Threads, 4, [](ProcessGroup& group) {
    Uneven reference, net;
    fill_values(*reference);
    fill_values(*net);
    DistributedDataParallel ddp(reference, group, {.find_unused_parameters = true});
    FullyShardedDataParallel sharded(net, two_axes(group, 2), {.units = [](const auto&, auto&) {
                                       return false;  // the root alone
                                     }});
    const auto input = numbers({4, 8}, static_cast<std::uint64_t>(group.rank()));
    // Used by rank 1 alone: the ranks of the other row hear of it by the sum along the first axis.
    loss_of(ddp(input, group.rank() == 1)).backward();
    loss_of(sharded(input, group.rank() == 1)).backward();
    torch::optim::SGD of_reference(reference->parameters(), 1.0), of_net(net->parameters(), 1.0);
    of_reference.step();
    of_net.step();
    EXPECT_TRUE(net->side->parameters()[0].grad().defined());
    expect_close(whole(*net), copies(reference->parameters()));
    // Used by none: no gradient.
    of_net.zero_grad();
    loss_of(sharded(input, false)).backward();
    EXPECT_FALSE(net->side->parameters()[0].grad().defined());
  });
}

TEST(ShardedOverMesh, ReduceDtypeHoldsAlongBothAxes) {
  run_ranks(As::Threads, 4, [](ProcessGroup& group) {
    Uneven net;
    {
      const torch::NoGradGuard no_grad;
      net->scale.fill_(1);
    }
    FullyShardedDataParallel sharded(net, two_axes(group, 2), {.reduce_dtype = torch::kBFloat16});
    // Gradients of 1, 2, 3 and 4 have an average that bfloat16 holds.
    const float mine = static_cast<float>(group.rank() + 1);
    (sharded(torch::zeros({1, 8}), false) * mine).sum().backward();
    const auto bias = net->last->parameters()[1];
    if (bias.numel() > 0) {
      EXPECT_EQ(bias.grad().scalar_type(), torch::kFloat);
      EXPECT_EQ(bias.grad().item<double>(), 2.5);
    }
  });
}

TEST(ShardedOverMesh, BuffersAndValuesComeFromTheFirstRankOfTheMesh) {
  run_ranks(As::Threads, 4, [](ProcessGroup& group) {
    nn::BatchNorm1d net(6);
    const auto mine = static_cast<float>(group.rank() + 1);
    {
      const torch::NoGradGuard no_grad;
      net->weight.fill_(mine);
      net->running_mean.fill_(mine);
    }
    const FullyShardedDataParallel sharded(net, two_axes(group, 2));
    EXPECT_TRUE(torch::equal(net->running_mean, torch::ones({6})));
    EXPECT_TRUE(torch::equal(whole(*net)[0], torch::ones({6})));
  });
}

TEST(ShardedOverMesh, WrittenValuesStayOnAllRanks) {
  run_ranks(As::Threads, 4, [](ProcessGroup& group) {
    auto net = blocks(2);
    fill_values(*net);
    const FullyShardedDataParallel sharded(net, two_axes(group, 2));
    {
      const FullParameters full(*net, /*writable=*/true);
      fill_values(*net, 7);
    }
    auto expected = blocks(2);
    fill_values(*expected, 7);
    EXPECT_TRUE(are_equal(whole(*net), copies(expected->parameters())));
  });
}

TEST(ShardedOverMesh, UnitsThatDifferBetweenRowsAreRefusedOnAll) {
  run_ranks(As::Threads, 4, [](ProcessGroup& group) {
    auto net = blocks(2);
    FullyShardOptions options;
    if (group.rank() >= 2) options.units = [](const auto&, const auto&) { return false; };
    const Mesh mesh = two_axes(group, 2);
    const Error error = error_of([&] { FullyShardedDataParallel(net, mesh, options); });
    EXPECT_EQ(error.blame(), Blame::Caller);
    EXPECT_THAT(error.text(), ::testing::ContainsRegex("rank 2: .*rank 3: "));
  });
}

TEST(ShardedOverMesh, TwoModelsShareABackward) {
  run_ranks(As::Threads, 4, [](ProcessGroup& group) {
    const Mesh mesh = two_axes(group, 2);
    auto of_ddp = blocks(5), one = blocks(2), two = blocks(3);
    fill_values(*of_ddp);
    auto all = one->parameters();
    for (const auto& parameter : two->parameters()) all.push_back(parameter);
    for (std::size_t i = 0; i < all.size(); ++i)
      all[i].set_data(of_ddp->parameters()[i].detach().clone());
    FullyShardedDataParallel first(one, mesh), second(two, mesh);
    DistributedDataParallel ddp(of_ddp, group);
    const auto both = [&](const torch::Tensor& x) { return second(first(x)); };
    all = one->parameters();
    for (const auto& parameter : two->parameters()) all.push_back(parameter);
    torch::optim::SGD optimizer(all, 0.1), of_reference(of_ddp->parameters(), 0.1);
    for (int step = 0; step < 3; ++step) {
      optimizer.zero_grad();
      of_reference.zero_grad();
      const auto input = numbers({4, 8}, static_cast<std::uint64_t>(10 * step + group.rank()));
      loss_of(both(input)).backward();
      loss_of(ddp(input)).backward();
      optimizer.step();
      of_reference.step();
    }
    auto values = whole(*one);
    for (const auto& value : whole(*two)) values.push_back(value);
    expect_close(values, copies(of_ddp->parameters()));
  });
}

// A backward that fails after a unit's gradients have come, whose graph some ranks keep.
TEST(ShardedOverMesh, TrainingGoesOnAfterABackwardThatFailedOnAllRanks) {
  struct Failing : torch::autograd::Function<Failing> {
    static torch::Tensor forward(torch::autograd::AutogradContext*, const torch::Tensor& x) {
      return x.clone();
    }
    static torch::autograd::variable_list backward(torch::autograd::AutogradContext*,
                                                   const torch::autograd::variable_list&) {
      throw std::runtime_error("as planned");
    }
  };
  run_ranks(As::Threads, 4, [](ProcessGroup& group) {
    const auto make = [] { return blocks(3); };
    auto net = make();
    fill_values(*net);
    FullyShardedDataParallel sharded(net, two_axes(group, 2));
    auto input = numbers({4, 8}, 1);
    input.set_requires_grad(true);
    // Behind a multiplication, so that it has a greater number than the nodes of shards.
    auto loss = loss_of(sharded(Failing::apply(input * 2)));
    EXPECT_THROW(loss.backward(), std::exception);
    if (group.rank() != 1) loss.reset();
    train(sharded, *net, group.rank());
    expect_close(whole(*net), trained_by_ddp(group, make));
  });
}

TEST(ShardedOverMesh, RowsWhoseBackwardsUseDifferentUnitsAreAllTold) {
  run_ranks(As::Threads, 4, [](ProcessGroup& group) {
    auto model = std::make_shared<BranchesImpl>();
    FullyShardedDataParallel sharded(model, two_axes(group, 2));
    const Error error = error_of([&] {
      sharded(torch::ones({4, 8}), /*uses_b=*/group.rank() < 2).backward();
    });
    EXPECT_EQ(error.blame(), Blame::Caller) << error.what();
    EXPECT_THAT(error.text(), ::testing::HasSubstr("of a FullyShardedDataParallel"));
  });
}

TEST(ShardedOverMesh, BlocksMayBeShardedWhileTheModelIsBuilt) {
  run_ranks(As::Threads, 4, [](ProcessGroup& group) {
    const Mesh mesh = two_axes(group, 2);
    const auto make = [] { return blocks(3); };
    auto net = make();
    fill_values(*net);
    for (const auto& block : net->children()) fully_shard(block, mesh);
    FullyShardedDataParallel sharded(net, mesh);
    train(sharded, *net, group.rank());
    expect_close(whole(*net), trained_by_ddp(group, make));
    auto other = make();
    fully_shard(other->ptr(0), mesh["rows"]);
    const Error error = error_of([&] { FullyShardedDataParallel(other, mesh); });
    EXPECT_THAT(error.text(), ::testing::HasSubstr("another group or mesh"));
  });
}

}  // namespace
}  // namespace weft::testing
