// SPDX-License-Identifier: Apache-2.0
// Tensors of GPUs in remote calls, over the fake driver: to which device they go. Tests that
// compute on a GPU are in cuda_gpu_test.cc.
#include <weft/tests/engine/rpc/cuda_workers.h>
#include <weft/tests/engine/rpc/workers.h>

namespace weft::on_gpus {
namespace {

TEST_P(CudaRpc, ArgumentsAndResultsFollowTheMap) {
  for (const auto& [from, to] :
       {std::pair(0, 0), std::pair(1, 1), std::pair(0, 1), std::pair(1, 0)}) {
    run({{gpu(from), gpu(to)}}, [&, here = gpu(from), there = gpu(to)](rpc::Agent& agent) {
      for (const std::int64_t bytes : {1L, 100L, 3L << 20}) {  // one chunk, and several
        const Seen seen = agent.sync<&look_at>("worker1", made(here, bytes, 7), 7);
        EXPECT_EQ(seen.device, there.str());
        EXPECT_TRUE(seen.right);
        EXPECT_TRUE(seen.on_own_stream);
        EXPECT_TRUE(seen.has_context);
        const at::Tensor back = agent.sync<&make>("worker1", there, bytes, 9);
        EXPECT_EQ(back.device(), here);
        EXPECT_EQ(back.numel(), bytes);
        EXPECT_TRUE(is_all(back, 9));
      }
    });
  }
  EXPECT_EQ(fake->calls(&cuda::Driver::ipc_open_mem_handle) > 0, is_ipc())
      << "only cuda_ipc opens the memory of the other process";
}

TEST_P(CudaRpc, HostTensorsAreMappedToAGpu) {
  for (const int index : {0, 1}) {
    run({{kHost, gpu(index)}}, [&](rpc::Agent& agent) {
      const Seen seen = agent.sync<&look_at>("worker1", made(kHost, 1000, 3), 3);
      EXPECT_EQ(seen.device, gpu(index).str());
      EXPECT_TRUE(seen.right);
      const at::Tensor back = agent.sync<&pass>("worker1", made(kHost, 1000, 4));
      EXPECT_TRUE(back.is_cpu());
      EXPECT_TRUE(is_all(back, 4));
    });
  }
}

TEST_P(CudaRpc, GpuTensorsAreMappedToTheHost) {
  for (const int index : {0, 1}) {
    run({{gpu(index), kHost}}, [&](rpc::Agent& agent) {
      const Seen seen = agent.sync<&look_at>("worker1", made(gpu(index), 1000, 3), 3);
      EXPECT_EQ(seen.device, "cpu");
      EXPECT_TRUE(seen.right);
      const at::Tensor back = agent.sync<&make>("worker1", kHost, 1000, 4);
      EXPECT_EQ(back.device(), gpu(index));
      EXPECT_TRUE(is_all(back, 4));
    });
  }
}

TEST_P(CudaRpc, TwoGpusMapStraightOrCrossed) {
  for (const bool crossed : {false, true}) {
    run({{gpu(0), gpu(crossed ? 1 : 0)}, {gpu(1), gpu(crossed ? 0 : 1)}}, [&](rpc::Agent& agent) {
      const auto there = [&](int index) { return gpu(crossed ? 1 - index : index); };
      const auto both =
          agent.sync<&make_on>("worker1", std::vector<c10::Device>{there(0), there(1)});
      ASSERT_EQ(both.size(), 2U);
      for (const int index : {0, 1}) {
        EXPECT_EQ(both[static_cast<std::size_t>(index)].device(), gpu(index));
        EXPECT_TRUE(is_all(both[static_cast<std::size_t>(index)], 1 + index));
        EXPECT_EQ(agent.sync<&look_at>("worker1", made(gpu(index), 64, 5), 5).device,
                  there(index).str());
      }
      const auto [one, other, were_one] =
          agent.sync<&pass_both>("worker1", made(gpu(0), 64, 1), made(gpu(1), 64, 2));
      EXPECT_EQ(one.device(), gpu(0));
      EXPECT_EQ(other.device(), gpu(1));
      EXPECT_TRUE(is_all(one, 1) && is_all(other, 2) && !were_one);
    });
  }
}

TEST_P(CudaRpc, EachGpuArgumentFollowsItsMap) {
  for (const int crossed : {0, 1}) {
    const auto there = [crossed](int index) { return gpu(index ^ crossed); };
    run({{gpu(0), there(0)}, {gpu(1), there(1)}}, [&](rpc::Agent& agent) {
      for (const int first : {0, 1}) {
        for (const int result : {0, 1}) {
          const auto seen = agent.sync<&look_at_both>("worker1", made(gpu(first), 64, 1),
                                                      made(gpu(1 - first), 64, 2), there(result));
          EXPECT_EQ(seen.devices,
                    (std::vector<std::string>{there(first).str(), there(1 - first).str()}));
          EXPECT_TRUE(seen.right);
          EXPECT_EQ(seen.made.device(), gpu(result)) << "results return by the inverse map";
          EXPECT_TRUE(is_all(seen.made, 3));
        }
      }
    });
  }
}

TEST_P(CudaRpc, CyclicMapReturnsFourResults) {
  run({{gpu(0), gpu(1)}, {gpu(1), gpu(2)}, {gpu(2), gpu(3)}, {gpu(3), gpu(0)}},
      [](rpc::Agent& agent) {
        const std::vector<c10::Device> there{gpu(0), gpu(1), gpu(2), gpu(3)};
        const auto back = agent.sync<&make_on>("worker1", there);
        ASSERT_EQ(back.size(), 4U);
        for (std::size_t i = 0; i < 4; ++i) {
          EXPECT_EQ(back[i].device(), gpu((static_cast<int>(i) + 3) % 4));
          EXPECT_TRUE(is_all(back[i], static_cast<int>(i) + 1));
        }
      });
}

TEST_P(CudaRpc, ViewsTravelAloneAndStayShared) {
  run({{gpu(0), gpu(1)}}, [](rpc::Agent& agent) {
    const at::Tensor whole = made(gpu(0), 4096, 6);
    const at::Tensor view = part_of(whole, 1024, 256);
    const at::Tensor back = agent.sync<&pass>("worker1", view);
    EXPECT_EQ(back.numel(), 256);
    EXPECT_EQ(back.storage().nbytes(), 256U);
    EXPECT_TRUE(is_all(back, 6));
    const auto [one, other, were_one] =
        agent.sync<&pass_both>("worker1", view, part_of(whole, 1100, 64));
    EXPECT_TRUE(were_one) << "views share their storage at the callee";
    EXPECT_TRUE(one.storage().is_alias_of(other.storage())) << "and when they have returned";
    EXPECT_TRUE(is_all(one, 6) && is_all(other, 6));
    EXPECT_FALSE(std::get<2>(agent.sync<&pass_both>("worker1", view, made(gpu(0), 64, 6))))
        << "tensors of different storages must not share one";
    const at::Tensor empty = torch_cuda->empty({0, 3}, at::kByte, 0);
    const at::Tensor none = agent.sync<&pass>("worker1", empty);
    EXPECT_EQ(none.device(), gpu(0));
    EXPECT_EQ(none.sizes(), empty.sizes());
  });
}

TEST_P(CudaRpc, UnmappedGpuTensorIsRefused) {
  run({}, [](rpc::Agent& agent) {
    const at::Tensor tensor = made(gpu(0), 8, 1);
    for (int round = 0; round < 3; ++round) {
      const Error sync = error_of([&] { agent.sync<&pass>("worker1", tensor); });
      EXPECT_EQ(sync.blame(), Blame::Caller);
      EXPECT_NE(sync.text().find("rpc::Options::device_maps[\"worker1\"] has no entry"),
                std::string::npos)
          << sync.text();
      EXPECT_EQ(error_of([&] { agent.async<&pass>("worker1", tensor); }).blame(), Blame::Caller)
          << "async() itself throws";
      EXPECT_EQ(error_of([&] { agent.remote<&pass>("worker1", tensor); }).blame(), Blame::Caller);
      EXPECT_EQ(agent.sync<&plus>("worker1", 1, 2), 3);
    }
    EXPECT_TRUE(is_all(tensor, 1));
  });
}

TEST_P(CudaRpc, MapDoesNotCoverOtherGpus) {
  run({{gpu(0), gpu(0)}}, [](rpc::Agent& agent) {
    const at::Tensor tensor = made(gpu(1), 8, 1);
    EXPECT_EQ(error_of([&] { agent.sync<&pass>("worker1", tensor); }).blame(), Blame::Caller);
    EXPECT_TRUE(is_all(agent.sync<&pass>("worker1", made(gpu(0), 8, 2)), 2));
    EXPECT_TRUE(is_all(tensor, 1));
  });
}

TEST_P(CudaRpc, UnmappedResultFailsOnlyItsCall) {
  constexpr int kThreads = 2;
  run(
      {},
      [](rpc::Agent& agent) {
        for (int round = 0; round < kThreads + 5; ++round) {
          const Error error = error_of([&] { agent.sync<&make>("worker1", gpu(0), 8, 1); });
          EXPECT_EQ(error.blame(), Blame::Caller);
          EXPECT_NE(error.text().find("response device mapping"), std::string::npos)
              << error.text();
        }
        auto there = agent.remote<&make>("worker1", gpu(0), 8, 1);
        const Error fetched = error_of([&] { there.to_here(); });
        EXPECT_NE(fetched.text().find("response device mapping"), std::string::npos)
            << fetched.text();
        EXPECT_EQ(agent.sync<&plus>("worker1", 1, 2), 3);
      },
      kThreads);
}

TEST_P(CudaRpc, ValueIsFetchedToTheMappedDevice) {
  run({{gpu(0), gpu(1)}}, [](rpc::Agent& agent) {
    auto there = agent.remote<&pass>("worker1", made(gpu(0), 256, 5));
    const at::Tensor here = there.to_here();
    EXPECT_EQ(here.device(), gpu(0));
    EXPECT_TRUE(is_all(here, 5));
    const at::Tensor changed = there.sync<&fill_value>(8);
    EXPECT_TRUE(is_all(changed, 8));
    EXPECT_TRUE(is_all(there.to_here(), 8));
  });
}

// Two processes, each with its own fake driver.
class CudaRpcOfProcesses : public testing::TestWithParam<const char*> {};

TEST_P(CudaRpcOfProcesses, ArgumentsAndResultsFollowTheMap) {
  harness::run_alone({harness::As::Processes, GetParam(), 2}, [](rpc::Options options) {
    if (tensor::cuda_device_count() > 0)
      return;  // as in CudaRpc; cuda_gpu_test.cc tests with the real one
    FakeDriver driver({.devices = 2, .threads = true});
    FakeTorchCuda cuda(driver);
    LentDevices lent;
    fake = &driver;
    torch_cuda = &cuda;
    const int rank = *options.rank;
    if (rank == 0) options.device_maps = {{"worker1", {{gpu(0), gpu(1)}}}};
    rpc::Agent agent = rpc::init("worker" + std::to_string(rank), options, lent.lend(driver));
    if (rank == 0) {
      const Seen seen = agent.sync<&look_at>("worker1", made(gpu(0), 2 << 20, 7), 7);
      EXPECT_EQ(seen.device, "cuda:1");
      EXPECT_TRUE(seen.right);
      const at::Tensor back = agent.sync<&make>("worker1", gpu(1), 2 << 20, 8);
      EXPECT_EQ(back.device(), gpu(0));
      EXPECT_TRUE(is_all(back, 8));
    }
    agent.shutdown({.timeout = 30s});
    agent = rpc::Agent();
    lent.wait_until_given_back();
  });
}

INSTANTIATE_TEST_SUITE_P(Rpc, CudaRpcOfProcesses, testing::Values("shm", "tcp"),
                         [](const auto& transport) { return std::string(transport.param); });

INSTANTIATE_TEST_SUITE_P(Rpc, CudaRpc, testing::Values("inproc", "shm", "tcp", "cuda_ipc"),
                         [](const auto& transport) { return std::string(transport.param); });

}  // namespace
}  // namespace weft::on_gpus
