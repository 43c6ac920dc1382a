// What a DistributedOptimizer may be given as its parameters.
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
at::Tensor another() { return at::ones({3}, at::TensorOptions().dtype(at::kDouble)).requires_grad_(); }

}  // namespace owned

namespace weft {
namespace {

using namespace harness;

class OptimizersParameters : public testing::TestWithParam<Setting> {};

TEST_P(OptimizersParameters, OneThatIsGivenTwiceIsRefusedByNameAndOthersAreNot) {
  run_workers(GetParam(), [](rpc::Agent& agent) {
    if (agent.self().rank != 0) return;
    const auto one = agent.remote<&owned::the_weight>(1), same = agent.remote<&owned::the_weight>(1);
    const auto other = agent.remote<&owned::another>(1);
    using Optimizer = DistributedOptimizer<torch::optim::SGD>;
    const torch::optim::SGDOptions options(0.5);
    for (const auto& second : {one, same}) {
      const auto error = error_of([&] { Optimizer({one, other, second}, options); });
      EXPECT_NE(error.text().find("Double [3] on cpu, is given twice"), std::string::npos) << error.text();
      EXPECT_NE(error.text().find("worker1 (rank 1)"), std::string::npos) << error.text();
    }
    Optimizer({one, other}, options);
  });
}

INSTANTIATE_TEST_SUITE_P(Optim, OptimizersParameters, testing::ValuesIn(autograd_settings()), setting_name);

}  // namespace
}  // namespace weft
