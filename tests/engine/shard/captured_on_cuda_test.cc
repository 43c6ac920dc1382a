// SPDX-License-Identifier: Apache-2.0
// Steps of sharded models that are captured into CUDA graphs, over the fake NCCL: launches compute
// what steps compute, and what cannot be captured is refused.
#include <barrier>
#include <mutex>

#include <weft/tests/harness/fake_nccl.h>
#include <weft/transport/nccl/nccl.h>
#include <weft/transport/registry.h>

#include "on_fake_gpu.h"

// This program's backends, in place of those of the build.
namespace weft::transport {
namespace {

std::shared_ptr<const nccl::Library> fake_library;

}  // namespace

namespace gloo {
Result<std::shared_ptr<Transport>> open();
}

std::span<const Backend> backends() {
  static const Backend all[] = {
      {"gloo", &gloo::open},
      {"nccl", [] {
         return Result<std::shared_ptr<Transport>>(std::make_shared<nccl::Nccl>(
             [] { return Result<std::shared_ptr<const nccl::Library>>(fake_library); }));
       }}};
  return all;
}

std::span<const LeftOut> left_out() { return {}; }

}  // namespace weft::transport

namespace weft {
namespace {

using fake_gpu::expect_gradients;
using fake_gpu::Product;
using fake_gpu::Sharded;
using harness::error_of;
using Graph = harness::FakeDriver::Graph;

constexpr std::int64_t kRows = 1000;
constexpr std::size_t kUnitBytes = 8192;  // rounded up

struct CapturedOnCuda : fake_gpu::OnFakeGpus {
  void SetUp() override {
    OnFakeGpus::SetUp();
    if (IsSkipped()) return;
    nccl_ = std::make_unique<harness::FakeNccl>(*fake_);
    transport::fake_library = nccl_->library();
  }
  void TearDown() override {
    transport::fake_library = nullptr;
    nccl_.reset();
    OnFakeGpus::TearDown();
  }

  // Ends the capture even if the body throws; returns what it has thrown.
  std::optional<Error> capture(const Rank& rank, Graph& graph, const std::function<void()>& body) {
    EXPECT_EQ(fake_->begin_capture(rank.stream(), CU_STREAM_CAPTURE_MODE_THREAD_LOCAL),
              CUDA_SUCCESS);
    std::optional<Error> thrown;
    try {
      body();
    } catch (const Error& error) {
      thrown = error;
    }
    const CUresult ended = fake_->end_capture(rank.stream(), graph);
    if (!thrown) {
      EXPECT_EQ(ended, CUDA_SUCCESS);
    }
    return thrown;
  }
  // The text of the error with which that is refused in a capture.
  std::string refused(const Rank& rank, const std::function<void()>& body) {
    Graph graph;
    const auto thrown = capture(rank, graph, body);
    if (!thrown) return "nothing was refused";
    EXPECT_EQ(thrown->blame(), Blame::Caller);
    return thrown->text();
  }
  // Captured steps compute what steps compute. `gathered`: the most units at one time.
  void expect_steps(const FullyShardOptions& options, int gathered);
  static void drop_gradients(const Product& model) {
    for (const auto& shard : model.parameters()) shard.mutable_grad().reset();
  }

  std::unique_ptr<harness::FakeNccl> nccl_;
};

#define EXPECT_SAYS(text, part) EXPECT_NE((text).find(part), std::string::npos) << (text)

void CapturedOnCuda::expect_steps(const FullyShardOptions& options, int gathered) {
  std::barrier meeting(2);
  run(
      [&](Rank& rank) {
        const auto model = std::make_shared<Product>(rank.gpu, kRows);
        Sharded sharded(model, rank.group, options);
        const at::Tensor x = rank.filled(static_cast<float>(rank.number() + 1), kRows);
        const at::Tensor ones = rank.filled(1, kRows);
        const auto step = [&] {
          drop_gradients(*model);
          sharded(x).backward(ones);
        };
        for (int i = 0; i < 2; ++i) step();
        rank.drain();
        drop_gradients(*model);
        meeting.arrive_and_wait();
        if (rank.number() == 0) memory_->forget_most();
        meeting.arrive_and_wait();
        Graph graph;
        const auto thrown = capture(rank, graph, step);
        if (thrown) throw Error(*thrown);
        EXPECT_EQ(memory_->most(rank.gpu, kUnitBytes), gathered) << "in the graph, as in a step";
        meeting.arrive_and_wait();
        for (const float first : {3.0F, 4.0F, 7.0F}) {
          {
            const torch::NoGradGuard no_grad;
            float value = first;
            for (auto& shard : model->parameters()) shard.fill_(value++);
          }
          EXPECT_EQ(fake_->launch(graph, rank.stream()), CUDA_SUCCESS);
          rank.drain();
          expect_gradients(*model, first);
        }
        meeting.arrive_and_wait();
        step();  // the model still works outside of the graph
        rank.drain();
        expect_gradients(*model, 7);
      },
      "cpu:gloo,cuda:nccl");
}

TEST_F(CapturedOnCuda, EachLaunchIsAStep) { expect_steps({}, /*gathered=*/2); }

TEST_F(CapturedOnCuda, EachLaunchIsAStepWithoutPrefetch) {
  expect_steps({.prefetch = 0}, /*gathered=*/1);
}

TEST_F(CapturedOnCuda, EachLaunchIsAStepIfUnitsStay) {
  expect_steps({.reshard_after_forward = false}, /*gathered=*/Product::kParts);
}

TEST_F(CapturedOnCuda, TheFirstStepIsRefused) {
  run(
      [&](Rank& rank) {
        const auto model = std::make_shared<Product>(rank.gpu);
        Sharded sharded(model, rank.group);
        const at::Tensor x = rank.filled(1);
        rank.drain();
        EXPECT_SAYS(refused(rank, [&] { sharded(x); }), "run two steps before the capture");
        step(sharded, rank);  // it still works
        rank.drain();
        expect_gradients(*model, 2);
      },
      "cpu:gloo,cuda:nccl");
}

TEST_F(CapturedOnCuda, OffloadIsRefused) {
  run(
      [&](Rank& rank) {
        const auto model = std::make_shared<Product>(rank.gpu);
        Sharded sharded(model, rank.group, FullyShardOptions{.offload = true});
        for (int i = 0; i < 2; ++i) step(sharded, rank);
        const at::Tensor x = rank.filled(1);
        rank.drain();
        EXPECT_SAYS(refused(rank, [&] { sharded(x); }), "offload keeps the shards in host memory");
        step(sharded, rank);
        expect_gradients(*model, 2);
      },
      "cpu:gloo,cuda:nccl");
}

TEST_F(CapturedOnCuda, NoSyncIsRefused) {
  run(
      [&](Rank& rank) {
        const auto model = std::make_shared<Product>(rank.gpu);
        Sharded sharded(model, rank.group);
        for (int i = 0; i < 2; ++i) step(sharded, rank);
        const at::Tensor x = rank.filled(1);
        rank.drain();
        {
          const auto quiet = sharded.no_sync();
          EXPECT_SAYS(refused(rank, [&] { sharded(x); }),
                      "average gradients in each captured step");
        }
        step(sharded, rank);
        rank.drain();
        expect_gradients(*model, 2);
      },
      "cpu:gloo,cuda:nccl");
}

TEST_F(CapturedOnCuda, AHalfStepIsRefused) {
  run(
      [&](Rank& rank) {
        const auto model = std::make_shared<Product>(rank.gpu);
        Sharded sharded(model, rank.group);
        for (int i = 0; i < 2; ++i) step(sharded, rank);
        const at::Tensor x = rank.filled(1), ones = rank.filled(1);
        at::Tensor output = sharded(x);
        rank.drain();
        EXPECT_SAYS(refused(rank, [&] { sharded(x); }), "whose backward has not run");
        EXPECT_SAYS(refused(rank, [&] { output.backward(ones); }), "and its forward was not");
        drop_gradients(*model);
        output = sharded(x);
        output.backward(ones);
        rank.drain();
        Graph graph;
        EXPECT_FALSE(capture(rank, graph, [&] { output = sharded(x); }));
        const Error error = error_of([&] { output.backward(ones); });
        EXPECT_SAYS(error.text(), "capture both into one graph");
        step(sharded, rank);
        rank.drain();
        expect_gradients(*model, 2);
      },
      "cpu:gloo,cuda:nccl");
}

TEST_F(CapturedOnCuda, AParameterWithoutGradientIsRefused) {
  run(
      [&](Rank& rank) {
        const auto model = std::make_shared<Product>(rank.gpu);
        Sharded sharded(model, rank.group,
                        FullyShardOptions{.units = [](const auto&, const auto&) { return false; }});
        model->used = 3;
        for (int i = 0; i < 2; ++i) step(sharded, rank);
        const at::Tensor x = rank.filled(1), ones = rank.filled(1);
        rank.drain();
        EXPECT_SAYS(refused(rank, [&] { sharded(x).backward(ones); }),
                    "'part3.weight' has no gradient on this rank");
      },
      "cpu:gloo,cuda:nccl");
}

}  // namespace
}  // namespace weft
