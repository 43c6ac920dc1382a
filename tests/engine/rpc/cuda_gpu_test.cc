// SPDX-License-Identifier: Apache-2.0
// Tensors of a real GPU in remote calls: two workers of this process, on one GPU. The same as in
// cuda_test.cc and cuda_order_test.cc, which use the fake driver, but with kernels.
#include <gtest/gtest.h>

#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <torch/types.h>

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
// Kernels that run long enough that a reader that does not wait for them reads old bytes.
at::Tensor powers(at::Tensor matrix, int times) {
  at::Tensor result = matrix;
  for (int i = 0; i < times; ++i)
    result = at::matmul(result, matrix) / static_cast<double>(matrix.size(0));
  return result;
}
c10::Stream pool_stream() {
  return c10::impl::VirtualGuardImpl(c10::kCUDA).getStreamFromGlobalPool(kGpu);
}
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

at::Tensor powers_of(RRef<at::Tensor> matrix, int times) { return powers(matrix.to_here(), times); }
at::Tensor powers_at(rpc::WorkerInfo where, at::Tensor matrix, int times) {
  return rpc::this_agent().sync<&powers_aside>(where, matrix, times);
}
Future<at::Tensor> powers_later(rpc::WorkerInfo where, at::Tensor matrix, int times) {
  return rpc::this_agent().async<&add>(where, matrix, matrix).then([times](const at::Tensor& sum) {
    return powers_aside(sum / 2, times);
  });
}
// A stage of a pipeline: a large layer on the GPU.
struct Stage {
  Stage(std::int64_t in, std::int64_t out, std::int64_t kind) {
    const at::Tensor numbers =
        at::arange(in * out, at::TensorOptions(kGpu).dtype(at::kDouble)).remainder(7 + kind) - 2;
    weight = (numbers.view({in, out}) / static_cast<double>(in)).requires_grad_();
  }
  at::Tensor forward(at::Tensor x) { return at::matmul(x, weight).relu(); }
  at::Tensor gradient() { return AutogradContext::current().gradient(weight); }
  at::Tensor weight;
};
struct Wrapped {
  int number = 0;
  at::Tensor tensor;
  WEFT_FIELDS(number, tensor)
};

class GpuRpc : public testing::TestWithParam<const char*> {
 protected:
  void SetUp() override {
    if (tensor::cuda_device_count() == 0) GTEST_SKIP() << "needs a GPU and libtorch's CUDA half";
  }
  // worker0 has `maps` and runs `body`; each other worker maps the GPU to itself in calls to the
  // next.
  void run(const rpc::DeviceMaps& maps, const std::function<void(rpc::Agent&)>& body,
           int workers = 2) {
    const auto store = c10::make_intrusive<c10d::HashStore>();
    harness::run_threads(workers, [&](int rank) {
      rpc::Options options{.rank = rank,
                           .world_size = workers,
                           .store = store,
                           .timeout = 50s,
                           .transports = {GetParam()}};
      const bool is_last = rank + 1 == workers;
      if (!is_last) options.device_maps = {{"worker" + std::to_string(rank + 1), {{kGpu, kGpu}}}};
      if (rank == 0) options.device_maps = maps;
      rpc::Agent agent = rpc::init("worker" + std::to_string(rank), options);
      if (rank == 0) body(agent);
      agent.shutdown({.timeout = 30s});
    });
  }
};

TEST_P(GpuRpc, ArgumentsAndResultsStayOnTheGpu) {
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

TEST_P(GpuRpc, HostTensorsAreMappedToTheGpu) {
  run({{"worker1", {{kHost, kGpu}}}}, [](rpc::Agent& agent) {
    EXPECT_EQ(agent.sync<&where>("worker1", at::ones({2})), "cuda:0");
    const at::Tensor sum = agent.sync<&add>("worker1", at::ones({100}), at::ones({100}));
    EXPECT_TRUE(at::equal(sum, at::full({100}, 2.0)));
  });
}

TEST_P(GpuRpc, GpuTensorsAreMappedToTheHost) {
  run({{"worker1", {{kGpu, kHost}}}}, [](rpc::Agent& agent) {
    EXPECT_EQ(agent.sync<&where>("worker1", at::ones({2}, kGpu)), "cpu");
    const at::Tensor sum =
        agent.sync<&add>("worker1", at::ones({100}, kGpu), at::ones({100}, kGpu));
    EXPECT_EQ(sum.device(), kGpu);
    EXPECT_TRUE(at::equal(sum, at::full({100}, 2.0, kGpu)));
  });
}

TEST_P(GpuRpc, UnmappedGpuTensorsAreRefused) {
  run({}, [](rpc::Agent& agent) {
    const Error there = error_of([&] { agent.sync<&where>("worker1", at::ones({2}, kGpu)); });
    EXPECT_EQ(there.blame(), Blame::Caller);
    EXPECT_NE(there.text().find("device_maps"), std::string::npos) << there.text();
    const Error back = error_of([&] { agent.sync<&on>("worker1", kGpu, 2); });
    EXPECT_NE(back.text().find("response device mapping"), std::string::npos) << back.text();
    EXPECT_TRUE(
        at::equal(agent.sync<&add>("worker1", at::ones({2}), at::ones({2})), at::full({2}, 2.0)));
  });
}

TEST_P(GpuRpc, MixedDevicesFailTheFunction) {
  run({{"worker1", {{kGpu, kGpu}}}}, [](rpc::Agent& agent) {
    EXPECT_EQ(
        error_of([&] { agent.sync<&add>("worker1", at::ones({2}, kGpu), at::ones({2})); }).blame(),
        Blame::Remote);
  });
}

TEST_P(GpuRpc, ResultWaitsForASideStream) {
  run({{"worker1", {{kGpu, kGpu}}}}, [](rpc::Agent& agent) {
    const at::Tensor matrix = at::rand({1024, 1024}, kGpu);
    EXPECT_TRUE(
        at::allclose(agent.sync<&powers_aside>("worker1", matrix, 200), powers(matrix, 200)));
  });
}

TEST_P(GpuRpc, FetchWaitsForTheValuesKernels) {
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

TEST_P(GpuRpc, NestedSlowCallsKeepTheirOrder) {
  run(
      {{"worker1", {{kGpu, kGpu}}}},
      [](rpc::Agent& agent) {
        const at::Tensor matrix = at::rand({512, 512}, kGpu);
        for (const int calls : {1, 5}) {
          std::vector<Future<at::Tensor>> results;
          for (int call = 0; call < calls; ++call) {
            results.push_back(
                agent.async<&powers_at>("worker1", agent.worker("worker2"), matrix + call, 50));
          }
          for (int call = 0; call < calls; ++call) {
            EXPECT_TRUE(at::allclose(results[static_cast<std::size_t>(call)].get(),
                                     powers(matrix + call, 50)));
          }
        }
      },
      3);
}

TEST_P(GpuRpc, ReferencedValueWaitsForItsKernels) {
  run({{"worker1", {{kGpu, kGpu}}}}, [](rpc::Agent& agent) {
    const at::Tensor matrix = at::rand({1024, 1024}, kGpu);
    for (int round = 0; round < 10; ++round) {
      auto made = agent.remote<&powers>("worker1", matrix + round, 20);
      auto used = agent.remote<&powers_of>("worker1", made, 3);
      EXPECT_TRUE(at::allclose(used.to_here(), powers(powers(matrix + round, 20), 3)));
    }
  });
}

TEST_P(GpuRpc, DeferredReplyWaitsForItsKernels) {
  run(
      {{"worker1", {{kGpu, kGpu}}}},
      [](rpc::Agent& agent) {
        const at::Tensor matrix = at::rand({512, 512}, kGpu);
        const at::Tensor expected = powers(matrix, 100).cpu();
        const auto result =
            agent.async<&powers_later>("worker1", agent.worker("worker2"), matrix, 100);
        const c10::StreamGuard aside(pool_stream());
        EXPECT_TRUE(at::allclose(result.get().cpu(), expected));
      },
      3);
}

// Futures without calls.
class GpuFuture : public testing::Test {
 protected:
  void SetUp() override {
    if (tensor::cuda_device_count() == 0) GTEST_SKIP() << "needs a GPU and libtorch's CUDA half";
  }
  // Sets a promise while its tensor is still being computed on one stream, and reads it on another.
  template <class T>
  void expect_ordered(const std::function<T(at::Tensor)>& wrapped,
                      const std::function<at::Tensor(const T&)>& in) {
    const at::Tensor matrix = at::rand({1024, 1024}, kGpu);
    const at::Tensor expected = powers(matrix, 100).cpu();
    Promise<T> promise;
    {
      const c10::StreamGuard on(pool_stream());
      promise.set(wrapped(powers(matrix, 100)));
    }
    const c10::StreamGuard on(pool_stream());
    EXPECT_TRUE(at::allclose(in(promise.future().get()).cpu(), expected));
  }
};

TEST_F(GpuFuture, ReaderStreamWaitsForWriterStream) {
  using List = std::vector<at::Tensor>;
  expect_ordered<at::Tensor>([](at::Tensor t) { return t; },
                             [](const at::Tensor& value) { return value; });
  expect_ordered<List>([](at::Tensor t) { return List{t}; },
                       [](const List& value) { return value.at(0); });
  expect_ordered<Wrapped>(
      [](at::Tensor t) {
        return Wrapped{1, t};
      },
      [](const Wrapped& value) { return value.tensor; });
}

TEST_F(GpuFuture, SparseValuesAreInStreamOrder) {
  using List = std::vector<at::Tensor>;
  const auto sparse = [](const at::Tensor& dense) {
    return (dense * (dense > 0.5).to(dense.dtype())).to_sparse();
  };
  const auto thin = [](const at::Tensor& dense) { return dense * (dense > 0.5).to(dense.dtype()); };
  const at::Tensor matrix = at::rand({1024, 1024}, kGpu);
  const at::Tensor expected = thin(powers(matrix, 100)).cpu();
  const auto read = [&](const auto& future, const auto& in) {
    const c10::StreamGuard on(pool_stream());
    EXPECT_TRUE(at::allclose(in(future.get()).to_dense().cpu(), expected));
  };
  Promise<at::Tensor> one;
  Promise<List> list;
  Promise<Wrapped> wrapped;
  {
    const c10::StreamGuard on(pool_stream());
    const at::Tensor value = sparse(powers(matrix, 100));
    one.set(value);
    list.set(List{value});
    wrapped.set(Wrapped{1, value});
  }
  read(one.future(), [](const at::Tensor& value) { return value; });
  read(list.future(), [](const List& value) { return value.at(0); });
  read(wrapped.future(), [](const Wrapped& value) { return value.tensor; });
}

TEST_P(GpuRpc, ArgumentWaitsForCallersStream) {
  run({{"worker1", {{kGpu, kGpu}}}}, [](rpc::Agent& agent) {
    for (int round = 0; round < 5; ++round) {
      const c10::StreamGuard aside(pool_stream());
      const at::Tensor input = powers(at::rand({1024, 1024}, kGpu) + round, 100);
      EXPECT_TRUE(at::equal(agent.sync<&add>("worker1", input, input), input + input));
    }
  });
}

TEST_P(GpuRpc, OwnerReadsItsOwnValueInOrder) {
  run({{"worker0", {{kGpu, kGpu}}}}, [](rpc::Agent& agent) {
    for (int round = 0; round < 30; ++round) {
      const at::Tensor matrix = at::rand({512, 512}, kGpu);
      auto there = agent.remote<&powers>("worker0", matrix, 20);
      EXPECT_TRUE(at::allclose(there.to_here(), powers(matrix, 20)));
    }
  });
}

TEST_P(GpuRpc, GradientsReturnToInputDevices) {
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

TEST_P(GpuRpc, BackwardFollowsStreamOrder) {
  run({{"worker1", {{kGpu, kGpu}}}}, [](rpc::Agent& agent) {
    for (int round = 0; round < 10; ++round) {
      const c10::StreamGuard aside(pool_stream());
      const at::Tensor a = at::rand({1000, 10000}, kGpu).requires_grad_();
      const at::Tensor b = at::rand({1000, 10000}, kGpu).requires_grad_();
      const at::Tensor scale = at::rand({}, kGpu);
      AutogradContext context(agent);
      const at::Tensor sum = agent.sync<&add>("worker1", a * b, b);
      context.backward({(sum * scale).sum()});
      EXPECT_TRUE(at::allclose(context.gradient(a), (b * scale).detach()));
      EXPECT_TRUE(at::allclose(context.gradient(b), ((a + 1) * scale).detach()));
    }
  });
}

TEST_P(GpuRpc, PipelineMatchesLocalGradients) {
  rpc::DeviceMaps maps;
  for (const char* worker : {"worker1", "worker2"}) maps[worker] = {{kGpu, kGpu}};
  run(
      maps,
      [](rpc::Agent& agent) {
        const std::vector<std::int64_t> sizes{512, 1024, 1024, 256};
        std::vector<RRef<Stage>> stages;
        std::vector<Stage> local;
        for (int i = 0; i < 3; ++i) {
          const auto at = static_cast<std::size_t>(i);
          stages.push_back(agent.remote<Stage>(i, sizes[at], sizes[at + 1], std::int64_t{i}));
          local.emplace_back(sizes[at], sizes[at + 1], i);
        }
        const at::Tensor input = at::rand({64, sizes[0]}, at::kDouble).to(kGpu);
        for (int round = 0; round < 3; ++round) {
          AutogradContext context(agent);
          at::Tensor x = input * (round + 1), y = x;
          for (auto& stage : stages) x = stage.sync<&Stage::forward>(x);
          for (auto& stage : local) y = stage.forward(y);
          context.backward({x.sum()});
          for (Stage& stage : local) stage.weight.mutable_grad().reset();
          y.sum().backward();
          for (std::size_t i = 0; i < 3; ++i) {
            EXPECT_TRUE(at::allclose(stages[i].sync<&Stage::gradient>(), local[i].weight.grad()))
                << "stage " << i;
          }
        }
      },
      3);
}

INSTANTIATE_TEST_SUITE_P(Rpc, GpuRpc, testing::Values("inproc", "shm", "tcp"),
                         [](const auto& transport) { return std::string(transport.param); });

}  // namespace
}  // namespace weft
