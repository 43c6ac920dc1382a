// SPDX-License-Identifier: Apache-2.0
// Tests which parameters and states DistributedOptimizer accepts.
#include <torch/optim/sgd.h>

#include <weft/optim.h>
#include <weft/tests/engine/autograd/settings.h>

namespace owned {

using namespace weft;

at::Tensor& weight() {
  static at::Tensor it = at::ones({3}, at::TensorOptions().dtype(at::kDouble)).requires_grad_();
  return it;
}
at::Tensor the_weight() { return weight(); }
at::Tensor another() {
  return at::ones({3}, at::TensorOptions().dtype(at::kDouble)).requires_grad_();
}
at::Tensor plain() { return at::ones({4}, at::kDouble); }
at::Tensor computed() { return another() * 2; }
at::Tensor none() { return {}; }

}  // namespace owned

namespace weft {
namespace {

using namespace harness;

class OptimizersParameters : public testing::TestWithParam<Setting> {};

TEST_P(OptimizersParameters, DuplicateIsRefusedByName) {
  run_workers(GetParam(), [](rpc::Agent& agent) {
    if (agent.self().rank != 0) return;
    const auto one = agent.remote<&owned::the_weight>(1),
               same = agent.remote<&owned::the_weight>(1);
    const auto other = agent.remote<&owned::another>(1);
    using Optimizer = DistributedOptimizer<torch::optim::SGD>;
    const torch::optim::SGDOptions options(0.5);
    for (const auto& second : {one, same}) {
      const auto error = error_of([&] { Optimizer({one, other, second}, options); });
      EXPECT_NE(error.text().find("Double [3] on cpu, is given twice"), std::string::npos)
          << error.text();
      EXPECT_NE(error.text().find("worker1 (rank 1)"), std::string::npos) << error.text();
    }
    Optimizer({one, other}, options);
  });
}

TEST_P(OptimizersParameters, UnusableOneIsRefusedWithAdvice) {
  run_workers(GetParam(), [](rpc::Agent& agent) {
    if (agent.self().rank != 0) return;
    const auto good = agent.remote<&owned::another>(1);
    const std::vector<std::pair<RRef<at::Tensor>, std::string>> wrong = {
        {agent.remote<&owned::plain>(1),
         "parameter 1 of 2 here, Double [4] on cpu, does not require grad: call requires_grad_()"},
        {agent.remote<&owned::computed>(1),
         "parameter 1 of 2 here, Double [3] on cpu, is not a leaf: give the leaf that it was "
         "computed from"},
        {agent.remote<&owned::none>(1),
         "parameter 1 of 2 here, an undefined tensor, cannot be stepped"}};
    for (const auto& [parameter, text] : wrong) {
      const auto error = error_of([&] {
        DistributedOptimizer<torch::optim::SGD>({good, parameter}, torch::optim::SGDOptions(0.5));
      });
      for (const std::string& part : {std::string("worker1 (rank 1)"), text}) {
        EXPECT_NE(error.text().find(part), std::string::npos) << part << " in " << error.text();
      }
    }
  });
}

TEST_P(OptimizersParameters, StatesOfOtherOwnersAreRefused) {
  run_workers(GetParam(), [](rpc::Agent& agent) {
    if (agent.self().rank != 0) return;
    const DistributedOptimizer<torch::optim::SGD> optimizer(
        {agent.remote<&owned::another>(1), agent.remote<&owned::another>(0)},
        torch::optim::SGDOptions(0.5));
    auto states = optimizer.save();
    states.pop_back();
    const auto error = error_of([&] { optimizer.load(states); });
    EXPECT_EQ(error.blame(), Blame::Caller);
    for (const std::string part :
         {"1 states", "2 owners: worker1 (rank 1), worker0 (rank 0)", "save()"}) {
      EXPECT_NE(error.text().find(part), std::string::npos) << part << " in " << error.text();
    }
  });
}

INSTANTIATE_TEST_SUITE_P(Optim, OptimizersParameters, testing::ValuesIn(autograd_settings()),
                         setting_name);

}  // namespace
}  // namespace weft
