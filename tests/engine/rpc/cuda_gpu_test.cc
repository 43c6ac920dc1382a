// Tensors of a real GPU in remote calls: two workers of this process, on one GPU. What cuda_test.cc shows over the fake
// driver, with kernels. Rows CU-009, 011, 012, 017, 019, 021 … 023, 026, 029, 042, 043 of the behaviours.
#include <gtest/gtest.h>

#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <torch/torch.h>

#include <weft/autograd.h>
#include <weft/engine/tensor/torch_cuda.h>
#include <weft/rpc.h>
#include <weft/tests/harness/ranks.h>

namespace weft {
namespace {

using namespace std::chrono_literals;
using harness::error_of;

const c10::Device kHost(c10::kCPU);
const c10::Device kGpu(c10::kCUDA, 0);

at::Tensor add(at::Tensor a, at::Tensor b) { return a + b; }
at::Tensor on(c10::Device device, std::int64_t elements) { return at::ones({elements}, device); }
std::string where(at::Tensor tensor) { return tensor.device().str(); }
at::Tensor& twice_in_place(at::Tensor& value) { return value.mul_(2); }
// Long enough that whoever does not wait for it sees what was there before.
at::Tensor powers(at::Tensor matrix, int times) {
  at::Tensor result = matrix;
  for (int i = 0; i < times; ++i) result = at::matmul(result, matrix) / static_cast<double>(matrix.size(0));
  return result;
}
c10::Stream pool_stream() { return c10::impl::VirtualGuardImpl(c10::kCUDA).getStreamFromGlobalPool(kGpu); }
at::Tensor powers_aside(at::Tensor matrix, int times) {
  const c10::impl::VirtualGuardImpl guard(c10::kCUDA);
  const c10::Stream current = guard.getStream(kGpu);
  const c10::Stream own = pool_stream();
  const auto wait = [](const c10::Stream& waiter, const c10::Stream& of) {
    c10::Event event(c10::kCUDA);
    event.record(of);
    event.block(waiter);
  };
  wait(own, current);
  at::Tensor result;
  {
    const c10::StreamGuard there(own);
    result = powers(matrix, times);
  }
  wait(current, own);
  return result;
}

class GpuRpc : public testing::TestWithParam<const char*> {
 protected:
  void SetUp() override {
    if (tensor::cuda_device_count() == 0) GTEST_SKIP() << "needs a GPU and libtorch's CUDA half";
  }
  void run(const rpc::DeviceMaps& maps, const std::function<void(rpc::Agent&)>& body) {
    const auto store = c10::make_intrusive<c10d::HashStore>();
    harness::run_threads(2, [&](int rank) {
      rpc::Options options{.rank = rank, .world_size = 2, .store = store, .timeout = 50s, .transports = {GetParam()}};
      if (rank == 0) options.device_maps = maps;
      rpc::Agent agent = rpc::init("worker" + std::to_string(rank), options);
      if (rank == 0) body(agent);
      agent.shutdown({.timeout = 30s});
    });
  }
};

TEST_P(GpuRpc, CU012_ArgumentsAndResultsStayOnTheGpu) {
  run({{"worker1", {{kGpu, kGpu}}}}, [](rpc::Agent& agent) {
    for (const std::int64_t elements : {1L, 1000L, 5L << 20}) {
      const at::Tensor a = at::rand({elements}, kGpu);
      const at::Tensor sum = agent.sync<&add>("worker1", a, a);
      EXPECT_EQ(sum.device(), kGpu);
      EXPECT_TRUE(at::equal(sum, a + a));
    }
    EXPECT_EQ(agent.sync<&where>("worker1", at::ones({2})), "cpu");
  });
}

TEST_P(GpuRpc, CU009_FromTheHostToTheGpuAndBack) {
  run({{"worker1", {{kHost, kGpu}}}}, [](rpc::Agent& agent) {
    EXPECT_EQ(agent.sync<&where>("worker1", at::ones({2})), "cuda:0");
    const at::Tensor sum = agent.sync<&add>("worker1", at::ones({100}), at::ones({100}));
    EXPECT_TRUE(at::equal(sum, at::full({100}, 2.0)));
  });
}

TEST_P(GpuRpc, CU011_FromTheGpuToTheHostAndBack) {
  run({{"worker1", {{kGpu, kHost}}}}, [](rpc::Agent& agent) {
    EXPECT_EQ(agent.sync<&where>("worker1", at::ones({2}, kGpu)), "cpu");
    const at::Tensor sum = agent.sync<&add>("worker1", at::ones({100}, kGpu), at::ones({100}, kGpu));
    EXPECT_EQ(sum.device(), kGpu);
    EXPECT_TRUE(at::equal(sum, at::full({100}, 2.0, kGpu)));
  });
}

TEST_P(GpuRpc, CU017_019_WithoutAMapBothWaysAreTheCallersErrorAndTheNextCallWorks) {
  run({}, [](rpc::Agent& agent) {
    const Error there = error_of([&] { agent.sync<&where>("worker1", at::ones({2}, kGpu)); });
    EXPECT_EQ(there.blame(), Blame::Caller);
    EXPECT_NE(there.text().find("device_maps"), std::string::npos) << there.text();
    const Error back = error_of([&] { agent.sync<&on>("worker1", kGpu, 2); });
    EXPECT_NE(back.text().find("response device mapping"), std::string::npos) << back.text();
    EXPECT_TRUE(at::equal(agent.sync<&add>("worker1", at::ones({2}), at::ones({2})), at::full({2}, 2.0)));
  });
}

TEST_P(GpuRpc, CU022_MixingDevicesIsTheFunctionsError) {
  run({{"worker1", {{kGpu, kGpu}}}}, [](rpc::Agent& agent) {
    EXPECT_EQ(error_of([&] { agent.sync<&add>("worker1", at::ones({2}, kGpu), at::ones({2})); }).blame(), Blame::Remote);
  });
}

TEST_P(GpuRpc, CU023_AResultOfAStreamThatTheFunctionsStreamWaitsFor) {
  run({{"worker1", {{kGpu, kGpu}}}}, [](rpc::Agent& agent) {
    const at::Tensor matrix = at::rand({1024, 1024}, kGpu);
    EXPECT_TRUE(at::allclose(agent.sync<&powers_aside>("worker1", matrix, 200), powers(matrix, 200)));
  });
}

TEST_P(GpuRpc, CU021_026_AValueIsFetchedBehindTheWorkThatMakesIt) {
  run({{"worker1", {{kGpu, kGpu}}}}, [](rpc::Agent& agent) {
    const at::Tensor matrix = at::rand({1024, 1024}, kGpu);
    for (int round = 0; round < 10; ++round) {
      const at::Tensor input = matrix + round;
      auto there = agent.remote<&powers>("worker1", input, 50);
      EXPECT_TRUE(at::allclose(there.to_here(), powers(input, 50)));
      EXPECT_TRUE(at::allclose(there.sync<&twice_in_place>(), powers(input, 50) * 2));
    }
  });
}

TEST_P(GpuRpc, TheArgumentIsReadBehindAStreamOfTheCallers) {
  run({{"worker1", {{kGpu, kGpu}}}}, [](rpc::Agent& agent) {
    const at::Tensor matrix = at::rand({1024, 1024}, kGpu);
    for (int round = 0; round < 5; ++round) {
      const c10::StreamGuard aside(pool_stream());
      const at::Tensor input = powers(matrix + round, 100);
      EXPECT_TRUE(at::equal(agent.sync<&add>("worker1", input, input), input + input));
    }
  });
}

TEST_P(GpuRpc, CU029_TheOwnerReadsItsOwnValue) {
  run({{"worker0", {{kGpu, kGpu}}}}, [](rpc::Agent& agent) {
    for (int round = 0; round < 30; ++round) {
      const at::Tensor matrix = at::rand({512, 512}, kGpu);
      auto there = agent.remote<&powers>("worker0", matrix, 20);
      EXPECT_TRUE(at::allclose(there.to_here(), powers(matrix, 20)));
    }
  });
}

TEST_P(GpuRpc, CU042_043_GradientsComeBackToTheDevicesOfTheirInputs) {
  for (const c10::Device& here : {kGpu, kHost}) {
    run({{"worker1", {{here, kGpu}}}}, [&](rpc::Agent& agent) {
      for (int round = 0; round < 3; ++round) {
        const at::Tensor a = at::rand({64}, here).requires_grad_();
        const at::Tensor b = at::rand({64}, here).requires_grad_();
        AutogradContext context(agent);
        const at::Tensor sum = agent.sync<&add>("worker1", a * 3, b);
        context.backward({(sum * sum).sum()});
        const at::Tensor gradient = context.gradient(a);
        EXPECT_EQ(gradient.device(), here);
        EXPECT_TRUE(at::allclose(gradient, 6 * (3 * a + b).detach()));
        EXPECT_TRUE(at::allclose(context.gradient(b), 2 * (3 * a + b).detach()));
      }
    });
  }
}

INSTANTIATE_TEST_SUITE_P(Rpc, GpuRpc, testing::Values("inproc", "shm", "tcp"),
                         [](const auto& transport) { return std::string(transport.param); });

}  // namespace
}  // namespace weft
