// SPDX-License-Identifier: Apache-2.0
#include <functional>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <torch/nn/modules/linear.h>
#include <torch/optim/sgd.h>

#include <weft/engine/ddp/ddp.h>
#include <weft/engine/ddp/parameter_check.h>
#include <weft/tests/harness/ranks.h>

namespace weft::parallel {
namespace {

using ::testing::HasSubstr;
using ::testing::Not;

// Two ranks train with different inputs; `meddle` is called after the backward of each step.
// Returns the log.
std::string train(int steps, double rate_of_rank_1,
                  const std::function<void(int rank, int step, torch::nn::Linear&)>& meddle,
                  const std::string& backend = "shm") {
  std::string logged;
  harness::run_ranks(harness::As::Threads, 2,
                     [&](ProcessGroup group) {
                       torch::nn::Linear net(4, 2);
                       DistributedDataParallel ddp(net, group);
                       torch::optim::SGD optimizer(net->parameters(),
                                                   group.rank() == 0 ? 0.1 : rate_of_rank_1);
                       for (int step = 1; step <= steps; ++step) {
                         optimizer.zero_grad();
                         ddp(at::full({3, 4}, 1.0 + group.rank())).pow(2).mean().backward();
                         meddle(group.rank(), step, net);
                         optimizer.step();
                       }
                       harness::meet(group);
                       if (group.rank() == 0) logged = harness::LogWatch::current().text();
                     },
                     {.backend = backend});
  return logged;
}

void nothing(int, int, torch::nn::Linear&) {}

TEST(ParameterCheck, IsSilentIfRanksTrainAlike) {
  for (const char* backend : {"shm", "gloo"})
    EXPECT_THAT(train(9, 0.1, nothing, backend), Not(HasSubstr("parameters")));
}

TEST(ParameterCheck, WarnsOnceOfAnotherLearningRate) {
  for (const char* backend : {"shm", "gloo"}) {
    const std::string logged = train(9, 0.2, nothing, backend);
    EXPECT_THAT(logged, HasSubstr(std::string(ParameterCheck::kWarning) +
                                  ": before step 2 'weight' of rank 1 differed from rank 0's"));
    EXPECT_EQ(logged.find(ParameterCheck::kWarning), logged.rfind(ParameterCheck::kWarning))
        << logged;
  }
}

TEST(ParameterCheck, WarnsOfAChangedGradient) {
  const auto clip = [](int rank, int step, torch::nn::Linear& net) {
    if (rank == 1 && step == 3) net->bias.mutable_grad().mul_(0.5);
  };
  EXPECT_THAT(train(5, 0.1, clip),
              HasSubstr("before step 4 'bias' of rank 1 differed from rank 0's"));
}

TEST(ParameterCheck, CountsNanAsADifference) {
  const auto spoil = [](int rank, int step, torch::nn::Linear& net) {
    if (rank == 1 && step == 3) net->bias.mutable_grad().fill_(NAN);
  };
  EXPECT_THAT(train(5, 0.1, spoil),
              HasSubstr("before step 4 'bias' of rank 1 differed from rank 0's"));
}

TEST(ParameterCheck, IgnoresRoundingDifferences) {
  const auto round = [](int rank, int, torch::nn::Linear& net) {
    const at::NoGradGuard no_grad;
    if (rank == 1) net->weight.mul_(1 + 1e-7F);
  };
  EXPECT_THAT(train(5, 0.1, round), Not(HasSubstr("parameters")));
}

}  // namespace
}  // namespace weft::parallel
