// SPDX-License-Identifier: Apache-2.0
// Tensors of GPUs in remote calls, over the fake driver: the order of streams, and failures. Tests
// that compute on a GPU are in cuda_gpu_test.cc.
#include <thread>

#include <weft/tests/engine/rpc/cuda_workers.h>

namespace weft::on_gpus {
namespace {

TEST_P(CudaRpc, ArgumentWaitsForCallersStream) {
  run({{gpu(0), gpu(0)}}, [](rpc::Agent& agent) {
    EXPECT_EQ(agent.sync<&plus>("worker1", 1, 2), 3);
    const at::Tensor tensor = made(gpu(0), 1 << 20, 1);
    EXPECT_TRUE(is_all(tensor, 1));
    const c10::Stream side = torch_cuda->new_stream(0);
    fake->hold(torch_cuda->view(side));
    std::optional<Future<Seen>> seen;
    {
      const c10::StreamGuard on(side);
      fill(tensor, 2);
      seen = agent.async<&look_at>("worker1", tensor, 2);
    }
    EXPECT_FALSE(seen->done()) << "its bytes are not written yet";
    fake->release(torch_cuda->view(side));
    EXPECT_TRUE(seen->get().right);
  });
}

TEST_P(CudaRpc, CallDuringCaptureIsRefused) {
  run({{gpu(0), gpu(0)}}, [](rpc::Agent& agent) {
    const at::Tensor tensor = made(gpu(0), 100, 1);
    const c10::Stream side = torch_cuda->new_stream(0);
    FakeDriver::Graph graph;
    {
      const c10::StreamGuard on(side);
      ASSERT_EQ(fake->begin_capture(torch_cuda->view(side), CU_STREAM_CAPTURE_MODE_THREAD_LOCAL),
                CUDA_SUCCESS);
      const Error refused = error_of([&] { agent.async<&look_at>("worker1", tensor, 1).get(); });
      EXPECT_EQ(refused.blame(), Blame::Caller);
      EXPECT_NE(refused.text().find("cannot be captured into a CUDA graph"), std::string::npos)
          << refused.text();
      ASSERT_EQ(fake->end_capture(torch_cuda->view(side), graph), CUDA_SUCCESS);
    }
    EXPECT_TRUE(agent.sync<&look_at>("worker1", tensor, 1).right);
  });
}

TEST_P(CudaRpc, ResultWaitsForASideStream) {
  run({{gpu(0), gpu(1)}}, [](rpc::Agent& agent) {
    c10::Stream own = torch_cuda->new_stream(1);
    slow = &own;
    fake->hold(torch_cuda->view(own));
    const auto result = agent.async<&make_slowly>("worker1", made(gpu(0), 4096, 1), 9);
    while (fake->pending(torch_cuda->view(own)) == 0) std::this_thread::yield();
    EXPECT_FALSE(result.done());
    fake->release(torch_cuda->view(own));
    EXPECT_TRUE(is_all(result.get(), 9));
    slow = nullptr;
  });
}

TEST_P(CudaRpc, NestedSlowCallsKeepTheirOrder) {
  for (const int calls : {1, 5}) {
    run(
        {{gpu(0), gpu(0)}},
        [&](rpc::Agent& agent) {
          c10::Stream own = torch_cuda->new_stream(0);
          slow = &own;
          fake->hold(torch_cuda->view(own));
          std::vector<Future<at::Tensor>> results;
          for (int call = 0; call < calls; ++call) {
            results.push_back(agent.async<&make_slowly_at>("worker1", agent.worker("worker2"),
                                                           made(gpu(0), 4096, 0), 1 + call));
          }
          while (fake->pending(torch_cuda->view(own)) == 0) std::this_thread::yield();
          EXPECT_FALSE(results.front().done());
          fake->release(torch_cuda->view(own));
          for (int call = 0; call < calls; ++call) {
            EXPECT_TRUE(is_all(results[static_cast<std::size_t>(call)].get(), 1 + call));
          }
          slow = nullptr;
        },
        16, 3);
  }
}

TEST_P(CudaRpc, DeferredReplyWaitsForItsStream) {
  run(
      {{gpu(0), gpu(0)}},
      [](rpc::Agent& agent) {
        c10::Stream own = torch_cuda->new_stream(0);
        slow = &own;
        fake->hold(torch_cuda->view(own));
        const auto result = agent.async<&pass_and_fill_slowly>("worker1", agent.worker("worker2"),
                                                               made(gpu(0), 4096, 1), 6);
        while (fake->pending(torch_cuda->view(own)) == 0) std::this_thread::yield();
        EXPECT_FALSE(result.done());
        fake->release(torch_cuda->view(own));
        const c10::StreamGuard aside(torch_cuda->new_stream(0));
        EXPECT_TRUE(is_all(result.get(), 6));
        slow = nullptr;
      },
      16, 3);
}

TEST_P(CudaRpc, ContinuationHasItsGpusContext) {
  run({{gpu(0), gpu(1)}}, [](rpc::Agent& agent) {
    const auto seen =
        agent.async<&make>("worker1", gpu(1), 64, 2).then([](const at::Tensor& value) {
          return value.is_cuda() && has_context();
        });
    EXPECT_TRUE(seen.get());
  });
}

TEST_P(CudaRpc, UnsendableObjectWorksByReference) {
  run({{gpu(0), gpu(1)}}, [](rpc::Agent& agent) {
    auto shelf = agent.remote<Shelf>("worker1", made(gpu(0), 256, 2));
    EXPECT_TRUE(is_all(shelf.sync<&Shelf::take>(), 2));
    shelf.sync<&Shelf::write>(5);
    const at::Tensor taken = shelf.async<&Shelf::take>().get();
    EXPECT_EQ(taken.device(), gpu(0));
    EXPECT_TRUE(is_all(taken, 5));
    EXPECT_TRUE(is_all(shelf.remote<&Shelf::take>().to_here(), 5));
  });
}

TEST_P(CudaRpc, FetchWaitsForTheValuesStream) {
  run({{gpu(0), gpu(0)}}, [](rpc::Agent& agent) {
    c10::Stream own = torch_cuda->new_stream(0);
    slow = &own;
    fake->hold(torch_cuda->view(own));
    auto there = agent.remote<&make_slowly>("worker1", made(gpu(0), 4096, 1), 9);
    there.created().wait(20s);  // the host has created it; its stream is still held
    const int copies = fake->calls(&cuda::Driver::memcpy_async);
    const auto fetched = there.fetch();
    while (fake->calls(&cuda::Driver::memcpy_async) == copies) std::this_thread::yield();
    EXPECT_FALSE(fetched.done()) << "its copy is enqueued behind a stream that is held";
    fake->release(torch_cuda->view(own));
    EXPECT_TRUE(is_all(fetched.get(), 9));
    slow = nullptr;
  });
}

TEST_P(CudaRpc, CopyUsesTheOwnersMapInOrder) {
  run(
      {{gpu(0), gpu(0)}},
      [](rpc::Agent& agent) {
        c10::Stream own = torch_cuda->new_stream(0);
        slow = &own;
        fake->hold(torch_cuda->view(own));
        const auto copy =
            agent.remote<&make_slowly>("worker1", made(gpu(0), 4096, 1), 9).copy_to("worker2");
        const auto seen = copy.async<&look_at_value>(9);
        while (fake->pending(torch_cuda->view(own)) == 0) std::this_thread::yield();
        EXPECT_FALSE(seen.done());
        fake->release(torch_cuda->view(own));
        EXPECT_EQ(seen.get().device, "cuda:0");
        EXPECT_TRUE(seen.get().right);
        slow = nullptr;
        const auto unmapped = RRef(agent, made(gpu(0), 64, 1)).copy_to("worker2");
        EXPECT_THROW(unmapped.created().get(), Error);
        const Error why = error_of([&] { unmapped.sync<&look_at_value>(1); });
        EXPECT_NE(why.text().find("device_maps"), std::string::npos) << why.text();
      },
      16, 3);
}

// Unlike in PyTorch, a map to oneself moves nothing (docs/rpc.md).
TEST_P(CudaRpc, CallToOneselfUsesCallersStreams) {
  run({{gpu(0), gpu(0)}}, [](rpc::Agent& agent) {
    const c10::Stream side = torch_cuda->new_stream(0);
    const c10::StreamGuard on(side);
    const at::Tensor tensor = made(gpu(0), 64, 1);
    const Seen seen = agent.sync<&look_at>("worker0", tensor, 1);
    EXPECT_TRUE(seen.right);
    EXPECT_TRUE(seen.on_own_stream);
    EXPECT_TRUE(agent.sync<&pass>("worker0", tensor).is_same(tensor));
  });
}

// --- failures

TEST_P(CudaRpc, FailedGpuCopyFailsOnlyItsCall) {
  run({{gpu(0), gpu(1)}}, [](rpc::Agent& agent) {
    EXPECT_EQ(agent.sync<&plus>("worker1", 1, 2), 3);
    const at::Tensor tensor = made(gpu(0), 64, 1);
    // Staged: copies from the caller's GPU, to the callee's, from it, and to the caller's. Over
    // cuda_ipc: the receiver's copy only, each way.
    const std::vector<std::string> places =
        is_ipc() ? std::vector<std::string>{"cuda:1", "cuda:0"}
                 : std::vector<std::string>{"cuda:0", "cuda:1", "cuda:1", "cuda:0"};
    for (std::size_t copy = 1; copy <= places.size(); ++copy) {
      fake->fail(&cuda::Driver::memcpy_async, CUDA_ERROR_INVALID_VALUE, static_cast<int>(copy));
      const Error error = error_of([&] { agent.sync<&pass>("worker1", tensor); });
      EXPECT_NE(error.text().find("cuMemcpyAsync on " + places[copy - 1]), std::string::npos)
          << copy << ": " << error.what();
      EXPECT_TRUE(is_all(agent.sync<&pass>("worker1", tensor), 1));
    }
  });
}

TEST_P(CudaRpc, LateWorkerIsCalledByItsMap) {
  const auto store = c10::make_intrusive<c10d::HashStore>();
  const auto joined = [&](int rank, rpc::DeviceMaps maps) {
    rpc::Options options{.rank = rank, .store = store, .timeout = 20s, .transports = {transport()}};
    options.device_maps = std::move(maps);
    return rpc::init("worker" + std::to_string(rank), options,
                     lent_.lend(*fake_, process_of(rank)));
  };
  rpc::Agent first = joined(0, {{"worker1", {{gpu(0), gpu(1)}}}, {"worker2", {{gpu(0), gpu(7)}}}});
  rpc::Agent second = joined(1, {});
  const Seen seen = first.sync<&look_at>("worker1", made(gpu(0), 64, 3), 3);
  EXPECT_EQ(seen.device, "cuda:1");
  EXPECT_TRUE(seen.right);
  EXPECT_TRUE(is_all(first.sync<&make>("worker1", gpu(1), 64, 4), 4));
  const Error error = error_of([&] { joined(2, {}); });
  EXPECT_EQ(error.blame(), Blame::Caller);
  EXPECT_NE(error.text().find("maps cuda:0 to cuda:7, and worker2 has 4 GPUs"), std::string::npos)
      << error.text();
  second.leave();
  first.leave();
}

}  // namespace
}  // namespace weft::on_gpus
