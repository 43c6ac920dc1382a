// SPDX-License-Identifier: Apache-2.0
// A transformer trains as with DistributedDataParallel on every backend, with ranks as threads and
// as processes.
#include "transformer.h"

#include <cmath>

#include <gtest/gtest.h>

#include <ATen/Parallel.h>
#include <torch/optim/adamw.h>

#include <weft/tests/harness/all_settings.h>
#include <weft/tests/harness/ranks.h>

namespace weft::testing {
namespace {

using harness::As;
using harness::run_ranks;

constexpr std::int64_t kWidth = 8;
constexpr int kSteps = 20;

template <class Wrapper>
void train(Wrapper& wrapped, Transformer& model, int rank, bool is_adamw) {
  std::unique_ptr<torch::optim::Optimizer> optimizer;
  if (is_adamw) {
    optimizer = std::make_unique<torch::optim::AdamW>(model->parameters(),
                                                      torch::optim::AdamWOptions(0.001));
  } else {
    optimizer = std::make_unique<torch::optim::SGD>(model->parameters(),
                                                    torch::optim::SGDOptions(0.05).momentum(0.9));
  }
  for (int step = 0; step < kSteps; ++step) {
    optimizer->zero_grad();
    const auto inputs = numbers({2, 3, kWidth}, static_cast<std::uint64_t>(100 * step + rank));
    wrapped(inputs).square().mean().backward();
    optimizer->step();
  }
}

double norm_of(const std::vector<torch::Tensor>& tensors) {
  double squares = 0;
  for (const auto& tensor : tensors) squares += tensor.square().sum().item<double>();
  return std::sqrt(squares);
}

// Two ranks have the bits of DistributedDataParallel; more ranks may add in another order.
void expect_same(const std::vector<torch::Tensor>& mine, const std::vector<torch::Tensor>& ddp,
                 int ranks) {
  ASSERT_EQ(mine.size(), ddp.size());
  if (ranks == 2) {
    EXPECT_TRUE(are_equal(mine, ddp));
    return;
  }
  std::vector<torch::Tensor> differences;
  for (std::size_t i = 0; i < mine.size(); ++i) differences.push_back(mine[i] - ddp[i]);
  EXPECT_LE(norm_of(differences), 1e-6 * norm_of(ddp));
}

void expect_ddp(ProcessGroup& group, bool is_adamw) {
  Transformer reference(kWidth);
  fill_values(*reference);
  DistributedDataParallel ddp(reference, group);
  train(ddp, reference, group.rank(), is_adamw);
  Transformer model(kWidth);
  fill_values(*model);
  FullyShardedDataParallel sharded(model, group, {.units = units_of<TransformerBlock>()});
  train(sharded, model, group.rank(), is_adamw);
  expect_same(whole(*model), copies(reference->parameters()), group.size());
}

using Setting = std::tuple<As, int, std::string>;

class ShardedTransformer : public ::testing::TestWithParam<Setting> {};

TEST_P(ShardedTransformer, HasDdpsParametersAfterTwentySteps) {
  const auto& [as, ranks, backend] = GetParam();
  run_ranks(as, ranks,
            [](ProcessGroup& group) {
              at::set_num_threads(1);  // more than the cores would be slow
              expect_ddp(group, /*is_adamw=*/false);
              if (group.size() == 2 || harness::runs_all_settings())
                expect_ddp(group, /*is_adamw=*/true);
            },
            {.backend = backend});
}

// The everyday run: two ranks on each backend, and four as threads and as processes.
std::vector<Setting> settings() {
  std::vector<std::string> backends{"shm", "tcp"};
  if (WEFT_TEST_GLOO != 0) backends.emplace_back("gloo");
  std::vector<Setting> all;
  for (const As as : {As::Threads, As::Processes}) {
    for (const int ranks : {2, 4}) {
      for (const std::string& backend : backends) {
        const bool is_everyday = ranks == 2 ? (as == As::Processes) == (backend == "tcp")
                                            : backend == (as == As::Threads ? "tcp" : "shm");
        if (is_everyday || harness::runs_all_settings()) all.emplace_back(as, ranks, backend);
      }
    }
  }
  return all;
}

std::string name_of(const ::testing::TestParamInfo<Setting>& setting) {
  const auto& [as, ranks, backend] = setting.param;
  return harness::name(as) + std::to_string(ranks) + backend;
}

INSTANTIATE_TEST_SUITE_P(, ShardedTransformer, ::testing::ValuesIn(settings()), name_of);

}  // namespace
}  // namespace weft::testing
