// SPDX-License-Identifier: Apache-2.0
// Process groups with CUDA tensors over the fake driver: Gloo receives them staged through host
// memory. Every rank has a GPU of its own.
#include <atomic>
#include <cstring>
#include <latch>
#include <set>
#include <thread>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <ATen/ops/full.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/zeros.h>
#include <c10/core/StreamGuard.h>
#include <torch/csrc/distributed/c10d/HashStore.hpp>

#include <weft/cuda/memory.h>
#include <weft/cuda/pinned.h>
#include <weft/engine/ddp/model_state.h>
#include <weft/engine/group/core.h>
#include <weft/engine/tensor/tensor.h>
#include <weft/engine/tensor/torch_cuda.h>
#include <weft/profiling/trace/trace.h>
#include <weft/tests/harness/device_timeline.h>
#include <weft/tests/harness/fake_torch_cuda.h>
#ifdef WEFT_TEST_NVTX
#include <weft/tests/harness/nvtx_tool.h>
#endif
#include <weft/tests/harness/ranks.h>

namespace weft {
namespace {

using harness::error_of;
using harness::FakeDriver;
using harness::FakeTorchCuda;

constexpr int kRanks = 2;

class CudaGroup : public testing::Test {
 protected:
  struct Rank {
    int rank;
    ProcessGroup group;
    c10::Device gpu;
  };

  void SetUp() override {
    if (tensor::cuda_device_count() > 0)
      GTEST_SKIP() << "libtorch has a real GPU here; the fake one would stand in its place";
    fake_ = std::make_unique<FakeDriver>(FakeDriver::Options{.devices = kRanks, .threads = true});
    torch_ = std::make_unique<FakeTorchCuda>(*fake_);
  }

  void run(const std::function<void(Rank&)>& body) {
    run_on([](int rank) { return rank; }, body);
  }
  void run_on(const std::function<int(int rank)>& gpu_of, const std::function<void(Rank&)>& body) {
    const auto store = c10::make_intrusive<c10d::HashStore>();
    harness::run_threads(kRanks, [&](int rank) {
      const c10::Device gpu(c10::kCUDA, static_cast<c10::DeviceIndex>(gpu_of(rank)));
      Rank one{rank,
               group::init({.backend = backend_,
                            .rank = rank,
                            .world_size = kRanks,
                            .store = store,
                            .timeout = timeout_,
                            .device = gpu},
                           std::make_shared<tensor::CudaDevices>(fake_->driver())),
               gpu};
      body(one);
    });
  }

  at::Tensor bytes(const Rank& rank, std::int64_t count) {
    return torch_->empty({count}, at::kByte, rank.rank);
  }
  cuda::StreamRef stream(const Rank& rank) { return torch_->view(torch_->current(rank.rank)); }
  // On the rank's current stream.
  void fill(const Rank& rank, const at::Tensor& tensor, int byte) {
    cuda::fill(stream(rank), tensor::slice_of(tensor), static_cast<unsigned char>(byte));
  }
  at::Tensor copy_of(const Rank& rank, const at::Tensor& tensor) {
    at::Tensor copy = bytes(rank, tensor.numel());
    cuda::copy(stream(rank), tensor::slice_of(copy), tensor::slice_of(tensor));
    return copy;
  }
  static int byte_of(const at::Tensor& tensor) {
    return *static_cast<const unsigned char*>(tensor.const_data_ptr());
  }
  // The host waits for the rank's current stream.
  static void drain(const Rank& rank, tensor::CudaDevices& devices) {
    EXPECT_TRUE(devices.ready(rank.gpu).synchronize(Deadline::in(std::chrono::seconds(20))));
  }
  static tensor::CudaDevices& devices(Rank& rank) {
    return *group::Core::of(rank.group).options.job->devices;
  }

  std::string backend_ = "gloo";
  std::chrono::milliseconds timeout_ = std::chrono::seconds(20);
  std::unique_ptr<FakeDriver> fake_;
  std::unique_ptr<FakeTorchCuda> torch_;
};

// The first CUDA operation connects such a group. A rank that left before the others had made the
// group would wait for them, and they would not notice.
TEST_F(CudaGroup, GpuOnlyGroupWaitsForAllRanks) {
  backend_ = "cuda:gloo";
  std::atomic<bool> has_come{false};
  run([&](Rank& one) {
    if (one.rank == 1) {
      std::this_thread::sleep_for(std::chrono::milliseconds(100));
      has_come = true;
    }
    const ProcessGroup both = one.group.new_group({0, 1});
    EXPECT_TRUE(has_come);
  });
}

// Such ranks meet over the job's store alone.
TEST_F(CudaGroup, GpuOnlyGroupHearsOfARankThatCannotJoin) {
  const auto store = c10::make_intrusive<c10d::HashStore>();
  ProcessGroupOptions options{.backend = "cuda:gloo", .rank = 0, .world_size = 2, .store = store};
  options.wait_reports = {std::chrono::milliseconds(100)};
  options.device = c10::Device(c10::kCUDA, 0);
  const auto devices = std::make_shared<tensor::CudaDevices>(fake_->driver());
  harness::run_threads(1, [&](int) {
    std::thread other([&] {
      const auto& log = harness::LogWatch::current();
      EXPECT_TRUE(harness::comes_true([&] {
        return log.text().find("in init_process_group of group 'default': rank 1 has not come") !=
               std::string::npos;
      })) << log.text();
      static_cast<c10d::Store&>(*store).set("0//weft/failed", "1 has no descriptor");
    });
    const Error error = error_of([&] { group::init(options, devices); });
    EXPECT_EQ(error.blame(), Blame::PeerLost) << error.what();
    EXPECT_THAT(error.text(), testing::HasSubstr("rank 1 could not join: has no descriptor"));
    other.join();
  });
}

// The group exists, and its first CUDA operation connects the ranks. Unless that breaks the group,
// the others wait for this rank, and a later rank finds this one's remains in the store.
TEST_F(CudaGroup, TimedOutFirstOperationBreaksGroup) {
  timeout_ = std::chrono::seconds(5);
  std::latch given_up(1);
  run([&](Rank& one) {
    const auto broadcast = [&](const at::Tensor& tensor) {
      return error_of([&] { one.group.broadcast(tensor, 0).synchronize(); });
    };
    if (one.rank == 0) {
      EXPECT_EQ(broadcast(bytes(one, 4)).blame(), Blame::Timeout);
      given_up.count_down();
      for (const at::Tensor& tensor : {at::ones({1}), bytes(one, 4)}) {
        EXPECT_EQ(broadcast(tensor).blame(), Blame::Timeout) << "at once, with the same error";
        EXPECT_EQ(error_of([&] { one.group.all_reduce(tensor).synchronize(); }).blame(),
                  Blame::Timeout);
      }
    } else {
      given_up.wait();
      const Error lost = broadcast(bytes(one, 4));
      EXPECT_EQ(lost.blame(), Blame::Timeout) << lost.what();
      EXPECT_THAT(lost.text(), testing::HasSubstr("rank 0 has given up: joining"));
    }
  });
}

TEST_F(CudaGroup, ThreadsThatShareAGpuAreWarnedOnce) {
  for (const int gpus : {1, 2}) {
    testing::internal::CaptureStderr();  // where the harness writes the log
    run_on([gpus](int rank) { return rank % gpus; },
           [&](Rank& rank) {
             // Blocks the host: a stream's wait could block the other rank's copies forever; the
             // warning is about this.
             rank.group.all_reduce(torch_->empty({8}, at::kByte, rank.gpu.index())).synchronize();
           });
    const std::string text = testing::internal::GetCapturedStderr(),
                      warned = "threads of one process and share cuda:0";
    int warnings = 0;
    for (auto at = text.find(warned); at != std::string::npos; at = text.find(warned, at + 1))
      ++warnings;
    EXPECT_EQ(warnings, gpus == 1 ? 1 : 0) << text;
  }
}

TEST_F(CudaGroup, WaitHoldsTheStreamNotTheHost) {
  run([&](Rank& rank) {
    rank.group.all_reduce(bytes(rank, 8)).wait();  // connects
    drain(rank, devices(rank));
    rank.group.barrier().wait();
    const at::Tensor tensor = bytes(rank, 8);
    fake_->hold(stream(rank));
    fill(rank, tensor, rank.rank + 1);
    const int blocked = fake_->host_blocks();
    Work work = rank.group.all_reduce(tensor);
    EXPECT_FALSE(work.query());
    work.wait();  // would never return if it waited for the bytes: their stream is held
    EXPECT_FALSE(work.query());
    const at::Tensor copy = copy_of(rank, tensor);
    EXPECT_EQ(fake_->host_blocks(), blocked);
    fake_->release(stream(rank));
    drain(rank, devices(rank));
    EXPECT_EQ(byte_of(copy), 3);
    EXPECT_TRUE(work.query());
    EXPECT_FALSE(work.error());
  });
}

// Operations are issued on the user's own streams, behind unfinished work; the results are read on
// the same streams, after the wait.
TEST_F(CudaGroup, OperationsOfSideStreamsKeepOrder) {
  run([&](Rank& rank) {
    rank.group.all_reduce(bytes(rank, 8)).wait();  // connects
    drain(rank, devices(rank));
    rank.group.barrier().wait();
    const c10::StreamGuard side(torch_->new_stream(rank.rank));
    for (int root = 0; root < kRanks; ++root) {
      const bool is_root = rank.rank == root;
      const auto both = [&] { return std::vector<at::Tensor>{bytes(rank, 8), bytes(rank, 8)}; };
      const at::Tensor copied = bytes(rank, 8), all = bytes(rank, 8), reduced = bytes(rank, 8),
                       mine = bytes(rank, 8), flat = bytes(rank, 16), part = bytes(rank, 8);
      const auto gathered = both(), parts = both();
      fake_->hold(stream(rank));
      fill(rank, copied, 10 * root + rank.rank + 1);
      for (const at::Tensor& tensor : {all, reduced, mine, parts[0]})
        fill(rank, tensor, rank.rank + 1);
      fill(rank, parts[1], rank.rank + 5);
      std::vector<Work> works{
          rank.group.broadcast(copied, root),     rank.group.all_reduce(all),
          rank.group.reduce(reduced, root),       rank.group.all_gather(gathered, mine),
          rank.group.all_gather_into(flat, mine), rank.group.reduce_scatter(part, parts)};
      for (Work& work : works) work.wait();
      std::vector<at::Tensor> copies;
      for (const at::Tensor& tensor :
           {copied, all, reduced, gathered[0], gathered[1], flat, part}) {
        copies.push_back(copy_of(rank, tensor));
      }
      for (const Work& work : works) EXPECT_FALSE(work.query());
      fake_->release(stream(rank));
      drain(rank, devices(rank));
      std::vector<int> found;
      for (const at::Tensor& copy : copies) found.push_back(byte_of(copy));
      const int expected[] = {11 * root + 1,          3, is_root ? 3 : rank.rank + 1, 1, 2, 1,
                              rank.rank == 0 ? 3 : 11};
      EXPECT_THAT(found, testing::ElementsAreArray(expected)) << "root " << root;
    }
  });
}

TEST_F(CudaGroup, UnawaitedOperationsFreeTensors) {
  run([&](Rank& rank) {
    std::vector<c10::weak_intrusive_ptr<c10::StorageImpl>> watched;
    for (int i = 0; i < 200; ++i) {
      const at::Tensor tensor = bytes(rank, 4096);
      watched.emplace_back(tensor.storage().getWeakStorageImpl());
      static_cast<void>(rank.group.all_reduce(tensor));
    }
    rank.group.barrier().wait();
    const auto all_gone = [&] {
      return std::all_of(watched.begin(), watched.end(),
                         [](const auto& one) { return one.expired(); });
    };
    EXPECT_TRUE(harness::comes_true(all_gone));
  });
}

#if WEFT_TRACE_ENABLED
// The spans that summaries count as exposed, and the copies through host memory, with an arrow from
// the span that issued each.
TEST_F(CudaGroup, TimelineShowsCopiesAndStreamWaits) {
  constinit static trace::Name gradients{trace::Layer::User, "gradients"};
  harness::DeviceTimeline timeline;
  std::vector<std::string> names;
  std::latch waited(kRanks);
  run([&](Rank& rank) {
    const at::Tensor tensor = bytes(rank, 8);
    fill(rank, tensor, rank.rank + 1);
    fake_->hold(stream(rank));
    {
      const trace::Range range(gradients);
      rank.group.all_reduce(tensor).wait();
    }
    fake_->release(stream(rank));
    drain(rank, devices(rank));
    waited.arrive_and_wait();  // the devices live meanwhile
    if (rank.rank == 0) names = timeline.names(3 * kRanks);
    rank.group.barrier().wait();
  });
  EXPECT_THAT(names, testing::UnorderedElementsAre(
                         "wait: 0 bytes", "copy to host: 8 bytes", "copy to device: 8 bytes",
                         "wait: 0 bytes", "copy to host: 8 bytes", "copy to device: 8 bytes"));
  EXPECT_THAT(timeline.arrows(), testing::ElementsAre("gradients -> wait", "gradients -> wait",
                                                      "gradients > stage -> copy to device",
                                                      "gradients > stage -> copy to device",
                                                      "gradients > stage -> copy to host",
                                                      "gradients > stage -> copy to host"));
}
#endif

#ifdef WEFT_TEST_NVTX
[[maybe_unused]] const bool tool_is_attached =
    (harness::attach_nvtx_tool(), true);  // before anything is traced

TEST_F(CudaGroup, NvtxToolSeesAnOperationsDevice) {
  harness::take_nvtx_recording();  // of the tests before
  run([&](Rank& rank) {
    rank.group.all_reduce(bytes(rank, 8)).synchronize();
    rank.group.barrier().synchronize();
    at::Tensor on_host = at::ones({2});
    rank.group.broadcast(on_host, 0).synchronize();
  });
  const auto recording = harness::take_nvtx_recording();
  std::set<std::string> seen;
  for (const char* name : {"all_reduce", "barrier", "broadcast"}) {
    for (auto fields : recording.payloads(std::string("start weft.engine ") + name))
      seen.insert(std::string(name) + " of rank " + fields["Rank"] + " on " +
                  fields["CUDA device"]);
  }
  EXPECT_THAT(seen, testing::ElementsAre("all_reduce of rank 0 on 0", "all_reduce of rank 1 on 1",
                                         "barrier of rank 0 on 0", "barrier of rank 1 on 1",
                                         "broadcast of rank 0 on -1", "broadcast of rank 1 on -1"));
}
#endif

TEST_F(CudaGroup, ContinuationRunsBehindOperation) {
  run([&](Rank& rank) {
    rank.group.all_reduce(bytes(rank, 8)).wait();
    const at::Tensor tensor = bytes(rank, 8);
    fill(rank, tensor, rank.rank + 1);
    fake_->hold(stream(rank));
    fill(rank, tensor, rank.rank + 2);
    const auto copy =
        rank.group.all_reduce(tensor).future().then([&] { return copy_of(rank, tensor); });
    EXPECT_TRUE(copy.done());
    fake_->release(stream(rank));
    const at::Tensor result = copy.get();
    drain(rank, devices(rank));
    EXPECT_EQ(byte_of(result), 5);
  });
}

TEST_F(CudaGroup, SynchronizeBlocksTheHost) {
  run([&](Rank& rank) {
    const at::Tensor tensor = bytes(rank, 8);
    fill(rank, tensor, rank.rank + 1);
    Work work = rank.group.all_reduce(tensor);
    work.synchronize();
    EXPECT_EQ(byte_of(tensor), 3);
    EXPECT_TRUE(work.query());
  });
}

// The group's device is the GPU, yet its barrier also covers operations on host tensors.
TEST_F(CudaGroup, BarrierCoversEveryDevice) {
  run([&](Rank& rank) {
    rank.group.all_reduce(bytes(rank, 8)).wait();
    const at::Tensor on_host = at::ones({1 << 20});
    std::vector<Work> works;
    for (int i = 0; i < 8; ++i) works.push_back(rank.group.all_reduce(on_host));
    rank.group.barrier().wait();
    for (const Work& work : works) EXPECT_TRUE(work.query());
  });
}

TEST_F(CudaGroup, BrokenGroupFailsFirstGpuOperation) {
  std::latch joined(kRanks);
  std::latch tried(kRanks);  // a rank that leaves earlier is lost to the others
  run([&](Rank& rank) {
    joined.arrive_and_wait();
    rank.group.abort("enough");
    try {
      rank.group.all_reduce(bytes(rank, 8)).wait();
      ADD_FAILURE() << "no error";
    } catch (const Error& error) {
      EXPECT_EQ(error.blame(), Blame::Cancelled) << error.what();
    }
    tried.arrive_and_wait();
  });
}

TEST_F(CudaGroup, BarrierBlocksTheHost) {
  std::atomic<int> came{0};
  run([&](Rank& rank) {
    if (rank.rank == 1) {
      ++came;
      rank.group.barrier().wait();
    } else {
      Work barrier = rank.group.barrier();
      barrier.wait();
      EXPECT_TRUE(barrier.query());
      EXPECT_EQ(came.load(), 1);
    }
  });
}

TEST_F(CudaGroup, SendAndRecvWorkBetweenGpus) {
  run([&](Rank& rank) {
    const at::Tensor tensor = bytes(rank, 16);
    if (rank.rank == 0) {
      fill(rank, tensor, 7);
      rank.group.send(tensor, 1, /*tag=*/3).wait();
    } else {
      Work work = rank.group.recv(tensor, kAnySource, /*tag=*/3);
      work.wait();
      const at::Tensor copy = copy_of(rank, tensor);
      drain(rank, devices(rank));
      EXPECT_EQ(byte_of(copy), 7);
      EXPECT_EQ(work.source_rank(), 0);
    }
    drain(rank, devices(rank));
    rank.group.barrier().wait();
  });
}

TEST_F(CudaGroup, HostAndGpuOperationsCoexist) {
  run([&](Rank& rank) {
    const at::Tensor on_gpu = bytes(rank, 8);
    fill(rank, on_gpu, rank.rank + 1);
    at::Tensor on_host = at::full({8}, rank.rank + 1.0);
    Work gpu = rank.group.all_reduce(on_gpu);
    Work host = rank.group.all_reduce(on_host);
    host.wait();
    EXPECT_EQ(on_host[0].item<double>(), 3.0);
    gpu.synchronize();
    EXPECT_EQ(byte_of(on_gpu), 3);
  });
}

TEST_F(CudaGroup, AbortReleasesTheStream) {
  run([&](Rank& rank) {
    rank.group.all_reduce(bytes(rank, 8)).synchronize();
    if (rank.rank == 1) {
      rank.group.recv(at::zeros({1}), 0).wait();
      rank.group.abort("enough");
      return;
    }
    const at::Tensor tensor = bytes(rank, 8);
    fill(rank, tensor, 1);
    Work work = rank.group.all_reduce(tensor);
    work.wait();
    const at::Tensor copy = copy_of(rank, tensor);
    Work sent = rank.group.send(at::zeros({1}), 1);
    drain(rank, devices(rank));  // hangs if the failed operation held the stream
    EXPECT_EQ(error_of([&] { work.synchronize(); }).blame(), Blame::Cancelled);
    EXPECT_EQ(error_of([&] { static_cast<void>(rank.group.all_reduce(tensor)); }).blame(),
              Blame::Cancelled);
  });
}

TEST_F(CudaGroup, TensorOfAnotherGpuIsRefused) {
  run([&](Rank& rank) {
    rank.group.all_reduce(bytes(rank, 8)).synchronize();
    const at::Tensor foreign = torch_->empty({8}, at::kByte, 1 - rank.rank);
    const Error error = error_of([&] { static_cast<void>(rank.group.all_reduce(foreign)); });
    EXPECT_EQ(error.blame(), Blame::Caller);
    EXPECT_NE(error.text().find("but this rank's device is cuda:"), std::string::npos)
        << error.text();
  });
}

// Each rank's model is on both GPUs; the first tensor's GPU differs between the ranks.
TEST_F(CudaGroup, ModelOnSeveralGpusGetsAGroupEach) {
  run([&](Rank& rank) {
    const at::Tensor here = bytes(rank, 8);
    const at::Tensor there = torch_->empty({8}, at::kByte, 1 - rank.rank);
    const at::Tensor host = at::ones({8}, at::kByte);
    const std::vector<at::Tensor> model{there, here, host, there};
    EXPECT_THAT(parallel::gpus_of(rank.group, model),
                testing::ElementsAre(here.device(), there.device()));
    EXPECT_THAT(parallel::gpus_of(rank.group, {host}), testing::IsEmpty());
    parallel::check_same_model(rank.group, {{"here", here}, {"there", there}, {"host", host}});
    parallel::DeviceGroups groups(rank.group, model);
    EXPECT_EQ(groups.of(there.device()).device(), there.device());
    EXPECT_EQ(groups.of(here.device()).device(), rank.gpu);
    for (const at::Tensor& tensor : model) {
      std::memset(tensor.data_ptr(), rank.rank + 1, 8);
      groups.of(tensor.device()).all_reduce(tensor).synchronize();
      EXPECT_EQ(byte_of(tensor), 3) << tensor.device();
    }
  });
}

TEST_F(CudaGroup, ModelsOnOtherDevicesAreRefused) {
  run([&](Rank& rank) {
    const at::Tensor here = bytes(rank, 8);
    const at::Tensor there = torch_->empty({8}, at::kByte, 1 - rank.rank);
    const std::vector<std::pair<std::vector<at::Tensor>, const char*>> cases{
        {{here, there},
         "it has second Byte [8] strides [1] on GPU 2 of the rank where rank 0 has second Byte [8] "
         "strides [1] on "
         "the rank's GPU"},
        {{here, at::ones({8}, at::kByte)}, "it has second Byte [8] strides [1] where rank 0 has"}};
    for (const auto& [of_rank_1, text] : cases) {
      const std::vector<at::Tensor> model = rank.rank == 0 ? std::vector{here, here} : of_rank_1;
      const Error error = error_of([&] {
        parallel::check_same_model(rank.group, {{"first", model[0]}, {"second", model[1]}});
      });
      EXPECT_EQ(error.blame(), Blame::Caller);
      EXPECT_THAT(error.text(), testing::HasSubstr(text));
    }
  });
}

TEST_F(CudaGroup, MissingGpuIsRefusedAndRanksGoOn) {
  run([&](Rank& rank) {
    if (rank.rank == 1) {
      const Error error = error_of([&] {
        rank.group.new_group({0, 1}, {.device = c10::Device(c10::kCUDA, kRanks)});
      });
      EXPECT_EQ(error.blame(), Blame::Caller);
      EXPECT_THAT(error.text(), testing::HasSubstr("this process sees GPUs 0 to 1 only"));
    }
    EXPECT_EQ(rank.group.new_group({0, 1}, {.device = c10::Device(c10::kCPU)}).device(),
              c10::Device(c10::kCPU));
    EXPECT_EQ(rank.group.new_group({0, 1}).device(), rank.gpu);
    EXPECT_EQ(rank.group.new_group({0, 1}, {.device = c10::Device(c10::kCUDA)}).device(), rank.gpu);
  });
}

TEST_F(CudaGroup, GlooRefusesGraphCapture) {
  run([&](Rank& rank) {
    rank.group.all_reduce(bytes(rank, 8)).wait();
    const at::Tensor tensor = bytes(rank, 8);
    fill(rank, tensor, rank.rank + 1);
    drain(rank, devices(rank));
    const c10::StreamGuard current(
        torch_->new_stream(rank.rank));  // the default stream cannot be captured
    FakeDriver::Graph graph;
    ASSERT_EQ(fake_->begin_capture(stream(rank), CU_STREAM_CAPTURE_MODE_THREAD_LOCAL),
              CUDA_SUCCESS);
    const Error waits = error_of([&] { static_cast<void>(rank.group.barrier()); });
    EXPECT_EQ(waits.blame(), Blame::Caller);
    EXPECT_NE(waits.text().find("the host waits for it"), std::string::npos) << waits.text();
    Work work = rank.group.all_reduce(tensor);
    const Error refused = error_of([&] { work.wait(); });
    EXPECT_EQ(refused.blame(), Blame::Unsupported);
    EXPECT_NE(refused.text().find("make the group with backend 'nccl'"), std::string::npos)
        << refused.text();
    ASSERT_EQ(fake_->end_capture(stream(rank), graph), CUDA_SUCCESS);
    rank.group.all_reduce(tensor).wait();
    drain(rank, devices(rank));
    EXPECT_EQ(byte_of(tensor), 3);
  });
}

TEST_F(CudaGroup, FirstOperationCannotBeCaptured) {
  run([&](Rank& rank) {
    const at::Tensor tensor = bytes(rank, 8);
    fill(rank, tensor, rank.rank + 1);
    drain(rank, devices(rank));
    const c10::StreamGuard current(torch_->new_stream(rank.rank));
    FakeDriver::Graph graph;
    ASSERT_EQ(fake_->begin_capture(stream(rank), CU_STREAM_CAPTURE_MODE_THREAD_LOCAL),
              CUDA_SUCCESS);
    const Error first = error_of([&] { static_cast<void>(rank.group.all_reduce(tensor)); });
    EXPECT_EQ(first.blame(), Blame::Caller);
    EXPECT_NE(first.text().find("run one collective of the group before the capture"),
              std::string::npos)
        << first.text();
    ASSERT_EQ(fake_->end_capture(stream(rank), graph), CUDA_SUCCESS);
    rank.group.all_reduce(tensor).wait();
    drain(rank, devices(rank));
    EXPECT_EQ(byte_of(tensor), 3);
  });
}

}  // namespace
}  // namespace weft
