// SPDX-License-Identifier: Apache-2.0
// The power_sgd hook: the numbers of PyTorch's, and what they are good for.
#include <cstdlib>
#include <fstream>
#include <string>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/wait.h>

#include <torch/nn/modules/embedding.h>
#include <torch/optim/sgd.h>

#include <weft/tests/harness/folder.h>
#include <weft/tests/harness/ranks.h>
#include <weft/weft.h>

#include "models.h"

namespace weft::testing {
namespace {

using ::testing::HasSubstr;

torch::Tensor gradient(torch::IntArrayRef shape, std::uint64_t seed) {
  return torch::randn(shape, at::make_generator<at::CPUGeneratorImpl>(seed), torch::kFloat);
}

// A bucket of these gradients, whose parameters stay the same from call to call.
class TestBucket {
 public:
  TestBucket(std::size_t index, std::size_t count, std::vector<std::vector<std::int64_t>> shapes)
      : index_(index), count_(count), shapes_(std::move(shapes)) {
    for (const auto& shape : shapes_) parameters_.push_back(torch::zeros(shape));
  }

  torch::Tensor reduce(const CommHook& hook, const std::vector<torch::Tensor>& gradients) const {
    std::vector<torch::Tensor> flat;
    for (const auto& one : gradients) flat.push_back(one.reshape(-1));
    const auto buffer = torch::cat(flat);
    std::vector<torch::Tensor> views;
    std::int64_t offset = 0;
    for (const auto& one : gradients) {
      views.push_back(buffer.narrow(0, offset, one.numel()).view(one.sizes()));
      offset += one.numel();
    }
    GradBucket bucket(index_, count_, buffer, views, parameters_);
    return hook(bucket).get().clone();
  }

  const std::vector<std::vector<std::int64_t>>& shapes() const { return shapes_; }

 private:
  std::size_t index_, count_;
  std::vector<std::vector<std::int64_t>> shapes_;
  std::vector<torch::Tensor> parameters_;
};

struct Case {
  int rank = 1;
  bool warm_start = true;
  double epsilon = 0;
};

// As tests/engine/ddp/power_sgd.py.
std::vector<torch::Tensor> results_of(ProcessGroup group, const Case& item) {
  const std::vector<TestBucket> buckets{{0, 2, {{12, 20}, {12}, {5, 3, 4, 4}}},
                                        {1, 2, {{30, 16}, {16}, {2, 2}}}};
  const CommHook hook = comm_hooks::power_sgd(group, {.matrix_approximation_rank = item.rank,
                                                      .start_power_sgd_iter = 2,
                                                      .warm_start = item.warm_start,
                                                      .orthogonalization_epsilon = item.epsilon,
                                                      .random_seed = 7});
  std::vector<torch::Tensor> results;
  for (std::uint64_t pass = 0; pass < 6; ++pass) {
    for (std::size_t index = 0; index < buckets.size(); ++index) {
      std::vector<torch::Tensor> gradients;
      for (std::size_t i = 0; i < buckets[index].shapes().size(); ++i) {
        gradients.push_back(gradient(
            buckets[index].shapes()[i],
            1000 * pass + 100 * index + 10 * i + static_cast<std::uint64_t>(group.rank())));
      }
      results.push_back(buckets[index].reduce(hook, gradients));
    }
  }
  return results;
}

TEST(PowerSgd, HasTheNumbersOfPyTorchsHook) {
  const harness::Folder folder;
  const std::string file = folder.path() + "/expected";
  const int status =
      std::system(("timeout 100 " WEFT_TEST_PYTHON " " WEFT_TEST_SCRIPT " " + file).c_str());
  ASSERT_TRUE(WIFEXITED(status)) << status;
  if (WEXITSTATUS(status) == 77) GTEST_SKIP() << WEFT_TEST_PYTHON << " cannot import torch";
  ASSERT_EQ(WEXITSTATUS(status), 0);
  std::ifstream stream(file, std::ios::binary);
  for (const Case& item :
       {Case{1, true, 0}, Case{2, false, 0}, Case{3, true, 0}, Case{2, true, 1e-3}}) {
    std::vector<torch::Tensor> results;
    harness::run_ranks(harness::As::Threads, 2, [&](ProcessGroup group) {
      auto mine = results_of(group, item);
      if (group.rank() == 0) results = std::move(mine);
    });
    for (std::size_t i = 0; i < results.size(); ++i) {
      auto expected = torch::empty_like(results[i]);
      stream.read(static_cast<char*>(expected.data_ptr()),
                  static_cast<std::streamsize>(expected.nbytes()));
      ASSERT_TRUE(stream) << "the file is too short";
      EXPECT_LT((results[i] - expected).norm().item<float>(), 1e-5 * expected.norm().item<float>())
          << "rank " << item.rank << ", warm start " << item.warm_start << ", result " << i;
    }
  }
  EXPECT_EQ(stream.peek(), std::ifstream::traits_type::eof());
}

// The relative distance between the mean of what 40 passes have applied and the gradient, which is
// the same in each pass.
double bias(bool use_error_feedback) {
  double distance = 0;
  harness::run_ranks(harness::As::Threads, 2, [&](ProcessGroup group) {
    const CommHook hook = comm_hooks::power_sgd(group, {.start_power_sgd_iter = 2,
                                                        .min_compression_rate = 1,
                                                        .use_error_feedback = use_error_feedback});
    const TestBucket bucket(0, 1, {{8, 8}});
    const auto whole = (gradient({8, 8}, 0) + gradient({8, 8}, 1)).view(-1) / 2;
    auto sum = torch::zeros({64});
    for (int pass = 0; pass < 42; ++pass) {
      const auto applied =
          bucket.reduce(hook, {gradient({8, 8}, static_cast<std::uint64_t>(group.rank()))});
      if (pass >= 2) sum += applied;
    }
    if (group.rank() == 0)
      distance = (sum / 40 - whole).norm().item<double>() / whole.norm().item<double>();
  });
  return distance;
}

TEST(PowerSgd, ErrorFeedbackSendsWhatCompressionLost) {
  EXPECT_LT(bias(true), 0.2);
  EXPECT_GT(bias(false), 0.4);
}

TEST(PowerSgd, FirstPassesAreAverages) {
  harness::run_ranks(harness::As::Threads, 2, [](ProcessGroup group) {
    const CommHook hook = comm_hooks::power_sgd(group, {.start_power_sgd_iter = 3});
    const TestBucket first(0, 2, {{20, 20}}), second(1, 2, {{20, 20}});
    const auto own = gradient({20, 20}, static_cast<std::uint64_t>(group.rank()));
    const auto average = (gradient({20, 20}, 0) + gradient({20, 20}, 1)).view(-1) / 2;
    for (int pass = 0; pass < 4; ++pass) {
      for (const TestBucket* bucket : {&first, &second})
        EXPECT_EQ(torch::allclose(bucket->reduce(hook, {own}), average), pass < 3) << pass;
    }
  });
}

TEST(PowerSgd, SmallGradientsAndVectorsAreExact) {
  harness::run_ranks(harness::As::Threads, 2, [](ProcessGroup group) {
    const CommHook hook = comm_hooks::power_sgd(group, {.start_power_sgd_iter = 2});
    const TestBucket bucket(0, 1, {{50}, {2, 3}, {}, {0, 4}});
    for (int pass = 0; pass < 4; ++pass) {
      const double own = group.rank() + pass;
      const auto result = bucket.reduce(hook, {torch::full({50}, own), torch::full({2, 3}, own),
                                               torch::full({}, own), torch::zeros({0, 4})});
      EXPECT_TRUE(torch::allclose(result, torch::full({57}, pass + 0.5))) << pass;
    }
  });
}

TEST(PowerSgd, GradientsOfZerosStayZeros) {
  for (const int rank : {1, 2, 3}) {
    harness::run_ranks(harness::As::Threads, 2, [&](ProcessGroup group) {
      const CommHook hook = comm_hooks::power_sgd(
          group, {.matrix_approximation_rank = rank, .start_power_sgd_iter = 2});
      const TestBucket bucket(0, 1, {{20, 20}});
      for (int pass = 0; pass < 5; ++pass)
        EXPECT_TRUE(
            torch::equal(bucket.reduce(hook, {torch::zeros({20, 20})}), torch::zeros({400})));
    });
  }
}

// GradScaler leaves out the step after an overflow, and goes on.
TEST(PowerSgd, AnOverflowDoesNotStay) {
  for (const int rank : {1, 3}) {
    harness::run_ranks(harness::As::Threads, 2, [&](ProcessGroup group) {
      const CommHook hook = comm_hooks::power_sgd(
          group, {.matrix_approximation_rank = rank, .start_power_sgd_iter = 2});
      const TestBucket bucket(0, 1, {{20, 20}});
      const auto reduce = [&](double factor) {
        return bucket.reduce(hook, {torch::full({20, 20}, 1.0 + group.rank()) * factor});
      };
      for (int pass = 0; pass < 3; ++pass) reduce(1);
      const double infinity = std::numeric_limits<double>::infinity();
      EXPECT_FALSE(torch::isfinite(reduce(group.rank() == 0 ? infinity : 1)).all().item<bool>());
      reduce(1);
      EXPECT_TRUE(torch::allclose(reduce(1), torch::full({400}, 1.5), 1e-3, 1e-3));
    });
  }
}

class PowerSgdInDdp : public ::testing::TestWithParam<harness::As> {};
INSTANTIATE_TEST_SUITE_P(As, PowerSgdInDdp,
                         ::testing::Values(harness::As::Threads, harness::As::Processes),
                         [](const auto& as) { return harness::name(as.param); });

// Least squares: the loss falls, and the ranks' parameters stay equal. Several buckets are under
// way at the same time.
TEST_P(PowerSgdInDdp, TrainsAndKeepsRanksEqual) {
  harness::run_ranks(GetParam(), 2, [](ProcessGroup group) {
    Mlp net(16, 24, 16);
    fill(net);
    {
      const torch::NoGradGuard no_grad;
      for (auto& parameter : net->parameters()) parameter.mul_(0.2);
    }
    DistributedDataParallel ddp(net, group, {.bucket_bytes = 1000, .first_bucket_bytes = 1});
    ddp.register_comm_hook(
        comm_hooks::power_sgd(group, {.matrix_approximation_rank = 2, .start_power_sgd_iter = 5}));
    torch::optim::SGD optimizer(net->parameters(), 0.3);
    const auto batch = part(random({32, 16}, 1), group.rank(), 2);
    const auto target = part(random({32, 16}, 2), group.rank(), 2);
    double first = 0, last = 0;
    for (int step = 0; step < 60; ++step) {
      optimizer.zero_grad();
      const auto loss = (ddp(batch) - target).square().mean();
      loss.backward();
      optimizer.step();
      last = loss.item<double>();
      if (step == 0) first = last;
    }
    EXPECT_LT(last, 0.9 * first);
    EXPECT_GT(ddp.stats().bucket_bytes.size(), 2U);
    for (const auto& parameter : net->parameters()) {
      auto other = parameter.detach().clone();
      group.broadcast(other, 0).wait();
      EXPECT_TRUE(torch::equal(other, parameter));
    }
  });
}

TEST(PowerSgd, TakesBucketsThatAnotherHookCompresses) {
  harness::run_ranks(harness::As::Threads, 2, [](ProcessGroup group) {
    const CommHook hook = comm_hooks::bf16_compress(
        comm_hooks::power_sgd(group, {.matrix_approximation_rank = 1, .start_power_sgd_iter = 2}));
    const TestBucket bucket(0, 1, {{12, 12}});
    const auto outer = torch::arange(1, 13).view({12, 1}) * torch::ones({1, 12});  // of rank 1
    for (int pass = 0; pass < 4; ++pass) {
      const auto result = bucket.reduce(hook, {outer * (group.rank() + 0.5)});
      EXPECT_TRUE(torch::allclose(result, outer.reshape(-1), 0.05)) << pass;
    }
  });
}

TEST(PowerSgd, SparseGradientsAreAveraged) {
  harness::run_ranks(harness::As::Threads, 2, [](ProcessGroup group) {
    torch::nn::Embedding net(torch::nn::EmbeddingOptions(40, 30).sparse(true));
    DistributedDataParallel ddp(net, group);
    ddp.register_comm_hook(comm_hooks::power_sgd(group, {.start_power_sgd_iter = 2}));
    for (int step = 0; step < 4; ++step) {
      net->zero_grad();
      ddp(torch::tensor({group.rank()})).sum().backward();
      EXPECT_EQ(net->weight.grad().to_dense().sum().item<float>(), 30);
    }
  });
}

TEST(PowerSgd, FrozenParametersChangeTheLayout) {
  harness::run_ranks(harness::As::Threads, 2, [](ProcessGroup group) {
    Mlp net(16, 24, 16);
    fill(net);
    DistributedDataParallel ddp(net, group);
    ddp.register_comm_hook(comm_hooks::power_sgd(group, {.start_power_sgd_iter = 2}));
    for (int step = 0; step < 8; ++step) {
      net->second->weight.set_requires_grad(step < 4 || step > 5);
      net->zero_grad();
      ddp(random({4, 16}, static_cast<std::uint64_t>(step))).sum().backward();
      for (const auto& one : gradients(*net))
        EXPECT_TRUE(!one.defined() || one.isfinite().all().item<bool>());
    }
  });
}

TEST(PowerSgd, OptionsOutsideTheirRangesAreSentences) {
  harness::run_ranks(harness::As::Threads, 1, [](ProcessGroup group) {
    const auto expect = [](ProcessGroup of, const PowerSgdOptions& options, const char* text) {
      const auto error = harness::error_of([&] { comm_hooks::power_sgd(of, options); });
      EXPECT_EQ(error.blame(), Blame::Caller);
      EXPECT_THAT(error.text(), HasSubstr(text));
    };
    expect(group, {.matrix_approximation_rank = 0}, "matrix_approximation_rank is 0");
    expect(group, {.start_power_sgd_iter = 1}, "start_power_sgd_iter is 1");
    expect(group, {.min_compression_rate = -1}, "min_compression_rate is -1");
    expect(group, {.orthogonalization_epsilon = -1}, "orthogonalization_epsilon is -1");
    expect({}, {}, "the group is empty");
    comm_hooks::power_sgd(
        group, {.start_power_sgd_iter = 0, .use_error_feedback = false, .warm_start = false});
  });
}

}  // namespace
}  // namespace weft::testing
