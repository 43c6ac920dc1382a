// Tensors of GPUs in remote calls, over the fake driver: workers of this process that see the same four GPUs.
// There are no kernels, so functions pass tensors on, copy and fill. Rows CU-009 … 025, 037, 039, 040 of the behaviours;
// those that compute are in cuda_gpu_test.cc.
#include <algorithm>
#include <condition_variable>
#include <cstring>
#include <mutex>
#include <thread>

#include <gtest/gtest.h>

#include <ATen/ops/empty.h>
#include <c10/core/StreamGuard.h>
#include <torch/csrc/distributed/c10d/HashStore.hpp>

#include <weft/cuda/memory.h>
#include <weft/engine/rpc/core.h>
#include <weft/engine/tensor/tensor.h>
#include <weft/engine/tensor/torch_cuda.h>
#include <weft/rpc.h>
#include <weft/tests/engine/rpc/workers.h>
#include <weft/tests/harness/fake_torch_cuda.h>
#include <weft/tests/harness/lent_devices.h>
#include <weft/tests/harness/ranks.h>

namespace weft {
namespace {

using namespace std::chrono_literals;
using harness::error_of;
using harness::FakeDriver;
using harness::FakeTorchCuda;
using harness::LentDevices;

const c10::Device kHost(c10::kCPU);
c10::Device gpu(int index) { return c10::Device(c10::kCUDA, static_cast<c10::DeviceIndex>(index)); }

// What called functions reach.
FakeDriver* fake = nullptr;
FakeTorchCuda* torch_cuda = nullptr;

cuda::StreamRef current(int device) { return torch_cuda->view(torch_cuda->current(device)); }
// Written on the current stream.
void fill(const at::Tensor& tensor, int byte) {
  if (tensor.is_cuda()) {
    cuda::fill(current(tensor.device().index()), tensor::slice_of(tensor), static_cast<unsigned char>(byte));
  } else {
    std::memset(tensor.mutable_data_ptr(), byte, tensor.nbytes());
  }
}
at::Tensor made(const c10::Device& device, std::int64_t bytes, int byte) {
  const at::Tensor tensor =
      device.is_cpu() ? at::empty({bytes}, at::kByte) : torch_cuda->empty({bytes}, at::kByte, device.index());
  fill(tensor, byte);
  return tensor;
}
// All its bytes are this, once what the current stream holds has run.
bool is_all(const at::Tensor& tensor, int byte) {
  if (tensor.is_cuda()) {
    auto devices = std::make_shared<tensor::CudaDevices>(fake->driver());
    EXPECT_TRUE(devices->ready(tensor.device()).synchronize(Deadline::in(20s)));
  }
  const auto* data = static_cast<const unsigned char*>(tensor.const_data_ptr());
  return std::all_of(data, data + tensor.nbytes(), [&](unsigned char one) { return one == byte; });
}

// A view, for which libtorch's own function has no kernel here.
at::Tensor part_of(const at::Tensor& whole, std::int64_t begin, std::int64_t bytes) {
  auto impl = c10::make_intrusive<c10::TensorImpl>(c10::Storage(whole.storage()), whole.key_set(), whole.dtype());
  impl->set_sizes_and_strides(at::IntArrayRef({bytes}), at::IntArrayRef({1}), begin);
  return at::Tensor(std::move(impl));
}

struct Seen {
  std::string device;
  bool right = false;
  bool on_own_stream = false;
  bool has_context = false;
  WEFT_FIELDS(device, right, on_own_stream, has_context)
};
Seen look_at(at::Tensor tensor, int byte) {
  const bool on_own_stream = tensor.is_cuda() && torch_cuda->current(tensor.device().index()).id() != 0;
  CUcontext context = nullptr;
  fake->driver()->ctx_get_current(&context);
  return {tensor.device().str(), is_all(tensor, byte), on_own_stream, context != nullptr};
}
Seen look_at_value(at::Tensor& value, int byte) { return look_at(value, byte); }
at::Tensor pass(at::Tensor tensor) { return tensor; }
// The two, and whether they are of one storage here.
std::tuple<at::Tensor, at::Tensor, bool> pass_both(at::Tensor one, at::Tensor other) {
  return {one, other, one.storage().is_alias_of(other.storage())};
}
// On which GPUs two have arrived, and another tensor where it is asked for.
struct TwoSeen {
  std::vector<std::string> devices;
  bool right = false;
  at::Tensor made;
  WEFT_FIELDS(devices, right, made)
};
TwoSeen look_at_both(at::Tensor one, at::Tensor other, c10::Device result) {
  return {{one.device().str(), other.device().str()}, is_all(one, 1) && is_all(other, 2), made(result, 64, 3)};
}
at::Tensor make(c10::Device device, std::int64_t bytes, int byte) { return made(device, bytes, byte); }
// Of bytes 1, 2, ….
std::vector<at::Tensor> make_on(std::vector<c10::Device> devices) {
  std::vector<at::Tensor> tensors;
  for (const c10::Device& device : devices) tensors.push_back(made(device, 64, 1 + static_cast<int>(tensors.size())));
  return tensors;
}
int plus(int a, int b) { return a + b; }
at::Tensor fill_value(at::Tensor& value, int byte) {
  fill(value, byte);
  return value;
}

// A stream of a function's own, held back by the test.
c10::Stream* slow = nullptr;
at::Tensor make_slowly(at::Tensor like, int byte) {
  {
    const c10::StreamGuard on(*slow);
    fill(like, byte);
  }
  auto devices = std::make_shared<tensor::CudaDevices>(fake->driver());
  devices->wait(devices->recorded(*slow), torch_cuda->current(like.device().index()));
  return like;
}

at::Tensor make_slowly_at(rpc::WorkerInfo where, at::Tensor like, int byte) {
  return rpc::this_agent().sync<&make_slowly>(where, like, byte);
}
// Answers when a call has come back and what follows it is enqueued.
Future<at::Tensor> pass_and_fill_slowly(rpc::WorkerInfo where, at::Tensor tensor, int byte) {
  return rpc::this_agent().async<&pass>(where, tensor).then([byte](const at::Tensor& back) {
    return make_slowly(back, byte);
  });
}
// Can neither be copied nor sent. Each call runs on streams of its own: what one enqueues the next one waits for.
class Shelf {
 public:
  explicit Shelf(at::Tensor tensor) : tensor_(std::move(tensor)) {}
  at::Tensor take() {
    std::lock_guard lock(mutex_);
    devices_->wait(filled_, tensor::CudaDevices::current_stream(tensor_.device()));
    return tensor_;
  }
  void write(int byte) {
    std::lock_guard lock(mutex_);
    fill(tensor_, byte);
    filled_ = devices_->ready(tensor_.device());
    written_.notify_all();
  }

 private:
  std::shared_ptr<tensor::CudaDevices> devices_ = std::make_shared<tensor::CudaDevices>(fake->driver());
  std::mutex mutex_;
  std::condition_variable written_;
  Fence filled_;
  at::Tensor tensor_;
};

class CudaRpc : public testing::TestWithParam<const char*> {
 protected:
  void SetUp() override {
    if (tensor::cuda_device_count() > 0)
      GTEST_SKIP() << "libtorch has a real GPU here; the fake one would stand in its place";
    fake_ = std::make_unique<FakeDriver>(FakeDriver::Options{.devices = 4, .threads = true, .is_two_processes = is_ipc()});
    torch_ = std::make_unique<FakeTorchCuda>(*fake_,
                                             is_ipc() ? FakeTorchCuda::Memory::Shareable : FakeTorchCuda::Memory::Pooled);
    fake = fake_.get();
    torch_cuda = torch_.get();
  }
  void TearDown() override {
    lent_.wait_until_given_back();
    torch_cuda = nullptr;
    fake = nullptr;
  }

  static bool is_ipc() { return GetParam() == std::string_view("cuda_ipc"); }
  static const char* transport() { return is_ipc() ? "shm" : GetParam(); }
  static std::shared_ptr<const transport::cuda_ipc::Identity> process_of(int rank) {
    return is_ipc() ? harness::other_process(rank) : nullptr;
  }

  using Body = std::function<void(rpc::Agent&)>;
  using Map = std::vector<std::pair<c10::Device, c10::Device>>;
  // Each worker has the map for the one behind it; worker0 runs the body.
  void run(const Map& map, const Body& body, int worker_threads = 16, int workers = 2) {
    const auto store = c10::make_intrusive<c10d::HashStore>();
    harness::run_threads(workers, [&](int rank) {
      rpc::Options options{
          .rank = rank, .world_size = workers, .store = store, .worker_threads = worker_threads, .timeout = 20s};
      options.transports = {transport()};
      if (rank + 1 < workers && !map.empty()) options.device_maps = {{"worker" + std::to_string(rank + 1), map}};
      rpc::Agent agent = rpc::init("worker" + std::to_string(rank), options, lent_.lend(*fake_, process_of(rank)));
      if (rank == 0) body(agent);
      agent.shutdown({.timeout = 30s});
    });
  }

  std::unique_ptr<FakeDriver> fake_;
  std::unique_ptr<FakeTorchCuda> torch_;
  LentDevices lent_;
};

TEST_P(CudaRpc, CU012_ArgumentsLandWhereTheyAreMappedAndTheResultComesBackByTheInverse) {
  for (const auto& [from, to] : {std::pair(0, 0), std::pair(1, 1), std::pair(0, 1), std::pair(1, 0)}) {
    run({{gpu(from), gpu(to)}}, [&, here = gpu(from), there = gpu(to)](rpc::Agent& agent) {
      for (const std::int64_t bytes : {1L, 100L, 3L << 20}) {  // a chunk, and several
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
  EXPECT_EQ(fake->calls(&cuda::Driver::ipc_open_mem_handle) > 0, is_ipc()) << "whether memory is read where it is";
}

TEST_P(CudaRpc, CU009_010_FromTheHostToAGpuAndBack) {
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

TEST_P(CudaRpc, CU010_011_FromAGpuToTheHostAndBack) {
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

TEST_P(CudaRpc, CU013_015_TwoGpusStraightAndCrossed) {
  for (const bool crossed : {false, true}) {
    run({{gpu(0), gpu(crossed ? 1 : 0)}, {gpu(1), gpu(crossed ? 0 : 1)}}, [&](rpc::Agent& agent) {
      const auto there = [&](int index) { return gpu(crossed ? 1 - index : index); };
      const auto both = agent.sync<&make_on>("worker1", std::vector<c10::Device>{there(0), there(1)});
      ASSERT_EQ(both.size(), 2U);
      for (const int index : {0, 1}) {
        EXPECT_EQ(both[static_cast<std::size_t>(index)].device(), gpu(index));
        EXPECT_TRUE(is_all(both[static_cast<std::size_t>(index)], 1 + index));
        EXPECT_EQ(agent.sync<&look_at>("worker1", made(gpu(index), 64, 5), 5).device, there(index).str());
      }
    });
  }
}

TEST_P(CudaRpc, CU013_015_TwoArgumentsOfTwoGpusAndAResultOfEitherByStraightAndCrossedMaps) {
  for (const int crossed : {0, 1}) {
    const auto there = [crossed](int index) { return gpu(index ^ crossed); };
    run({{gpu(0), there(0)}, {gpu(1), there(1)}}, [&](rpc::Agent& agent) {
      for (const int first : {0, 1}) {
        for (const int result : {0, 1}) {
          const auto seen =
              agent.sync<&look_at_both>("worker1", made(gpu(first), 64, 1), made(gpu(1 - first), 64, 2), there(result));
          EXPECT_EQ(seen.devices, (std::vector<std::string>{there(first).str(), there(1 - first).str()}));
          EXPECT_TRUE(seen.right);
          EXPECT_EQ(seen.made.device(), gpu(result)) << "by the inverse map";
          EXPECT_TRUE(is_all(seen.made, 3));
        }
      }
    });
  }
}

TEST_P(CudaRpc, CU016_FourResultsOfFourGpusComeBackByACyclicMap) {
  run({{gpu(0), gpu(1)}, {gpu(1), gpu(2)}, {gpu(2), gpu(3)}, {gpu(3), gpu(0)}}, [](rpc::Agent& agent) {
    const std::vector<c10::Device> there{gpu(0), gpu(1), gpu(2), gpu(3)};
    const auto back = agent.sync<&make_on>("worker1", there);
    ASSERT_EQ(back.size(), 4U);
    for (std::size_t i = 0; i < 4; ++i) {
      EXPECT_EQ(back[i].device(), gpu((static_cast<int>(i) + 3) % 4));
      EXPECT_TRUE(is_all(back[i], static_cast<int>(i) + 1));
    }
  });
}

TEST_P(CudaRpc, OnlyTheUsedPartTravelsAndViewsOfOneStorageStayShared) {
  run({{gpu(0), gpu(1)}}, [](rpc::Agent& agent) {
    const at::Tensor whole = made(gpu(0), 4096, 6);
    const at::Tensor view = part_of(whole, 1024, 256);
    const at::Tensor back = agent.sync<&pass>("worker1", view);
    EXPECT_EQ(back.numel(), 256);
    EXPECT_EQ(back.storage().nbytes(), 256U);
    EXPECT_TRUE(is_all(back, 6));
    const auto [one, other, were_one] = agent.sync<&pass_both>("worker1", view, part_of(whole, 1100, 64));
    EXPECT_TRUE(were_one) << "where they arrived";
    EXPECT_TRUE(one.storage().is_alias_of(other.storage())) << "and where they came back";
    EXPECT_TRUE(is_all(one, 6) && is_all(other, 6));
    EXPECT_FALSE(std::get<2>(agent.sync<&pass_both>("worker1", view, made(gpu(0), 64, 6)))) << "two are two";
    const at::Tensor empty = torch_cuda->empty({0, 3}, at::kByte, 0);
    const at::Tensor none = agent.sync<&pass>("worker1", empty);
    EXPECT_EQ(none.device(), gpu(0));
    EXPECT_EQ(none.sizes(), empty.sizes());
  });
}

TEST_P(CudaRpc, CU017_AGpusTensorWithoutAMapIsRefusedAtOnceAndTheNextCallWorks) {
  run({}, [](rpc::Agent& agent) {
    const at::Tensor tensor = made(gpu(0), 8, 1);
    for (int round = 0; round < 3; ++round) {
      const Error sync = error_of([&] { agent.sync<&pass>("worker1", tensor); });
      EXPECT_EQ(sync.blame(), Blame::Caller);
      EXPECT_NE(sync.text().find("rpc::Options::device_maps[\"worker1\"] has no entry"), std::string::npos) << sync.text();
      EXPECT_EQ(error_of([&] { agent.async<&pass>("worker1", tensor); }).blame(), Blame::Caller) << "at once";
      EXPECT_EQ(error_of([&] { agent.remote<&pass>("worker1", tensor); }).blame(), Blame::Caller);
      EXPECT_EQ(agent.sync<&plus>("worker1", 1, 2), 3);
    }
    EXPECT_TRUE(is_all(tensor, 1));
  });
}

TEST_P(CudaRpc, CU017_TheOtherGpuOfAMapIsNotMapped) {
  run({{gpu(0), gpu(0)}}, [](rpc::Agent& agent) {
    const at::Tensor tensor = made(gpu(1), 8, 1);
    EXPECT_EQ(error_of([&] { agent.sync<&pass>("worker1", tensor); }).blame(), Blame::Caller);
    EXPECT_TRUE(is_all(agent.sync<&pass>("worker1", made(gpu(0), 8, 2)), 2));
    EXPECT_TRUE(is_all(tensor, 1));
  });
}

TEST_P(CudaRpc, CU019_020_AResultWithoutAMapIsTheCallersErrorEachTimeAndUsesNothingUp) {
  constexpr int kThreads = 2;
  run(
      {},
      [](rpc::Agent& agent) {
        for (int round = 0; round < kThreads + 5; ++round) {
          const Error error = error_of([&] { agent.sync<&make>("worker1", gpu(0), 8, 1); });
          EXPECT_EQ(error.blame(), Blame::Caller);
          EXPECT_NE(error.text().find("response device mapping"), std::string::npos) << error.text();
        }
        auto there = agent.remote<&make>("worker1", gpu(0), 8, 1);
        const Error fetched = error_of([&] { there.to_here(); });
        EXPECT_NE(fetched.text().find("response device mapping"), std::string::npos) << fetched.text();
        EXPECT_EQ(agent.sync<&plus>("worker1", 1, 2), 3);
      },
      kThreads);
}

TEST_P(CudaRpc, CU021_AValueThatStaysThereIsFetchedToTheMappedDevice) {
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

// --- the order of streams

TEST_P(CudaRpc, TheArgumentIsReadBehindTheCallersStreamAndTheCallerDoesNotWaitForIt) {
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
    EXPECT_FALSE(seen->done()) << "its bytes are not there yet";
    fake->release(torch_cuda->view(side));
    EXPECT_TRUE(seen->get().right);
  });
}

TEST_P(CudaRpc, ACallInACaptureIsRefusedAndTheNextOneWorks) {
  run({{gpu(0), gpu(0)}}, [](rpc::Agent& agent) {
    const at::Tensor tensor = made(gpu(0), 100, 1);
    const c10::Stream side = torch_cuda->new_stream(0);
    FakeDriver::Graph graph;
    {
      const c10::StreamGuard on(side);
      ASSERT_EQ(fake->begin_capture(torch_cuda->view(side), CU_STREAM_CAPTURE_MODE_THREAD_LOCAL), CUDA_SUCCESS);
      const Error refused = error_of([&] { agent.async<&look_at>("worker1", tensor, 1).get(); });
      EXPECT_EQ(refused.blame(), Blame::Caller);
      EXPECT_NE(refused.text().find("cannot be captured into a CUDA graph"), std::string::npos) << refused.text();
      ASSERT_EQ(fake->end_capture(torch_cuda->view(side), graph), CUDA_SUCCESS);
    }
    EXPECT_TRUE(agent.sync<&look_at>("worker1", tensor, 1).right);
  });
}

TEST_P(CudaRpc, CU023_TheResultIsReadBehindAStreamThatTheFunctionsStreamWaitsFor) {
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

TEST_P(CudaRpc, CU025_SlowCallsMayBeNestedOverThreeWorkersAndFiveAtOnce) {
  for (const int calls : {1, 5}) {
    run(
        {{gpu(0), gpu(0)}},
        [&](rpc::Agent& agent) {
          c10::Stream own = torch_cuda->new_stream(0);
          slow = &own;
          fake->hold(torch_cuda->view(own));
          std::vector<Future<at::Tensor>> results;
          for (int call = 0; call < calls; ++call) {
            results.push_back(
                agent.async<&make_slowly_at>("worker1", agent.worker("worker2"), made(gpu(0), 4096, 0), 1 + call));
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

TEST_P(CudaRpc, CU037_ADeferredReplyIsReadBehindAContinuationThatIsSlowOnTheGpu) {
  run(
      {{gpu(0), gpu(0)}},
      [](rpc::Agent& agent) {
        c10::Stream own = torch_cuda->new_stream(0);
        slow = &own;
        fake->hold(torch_cuda->view(own));
        const auto result =
            agent.async<&pass_and_fill_slowly>("worker1", agent.worker("worker2"), made(gpu(0), 4096, 1), 6);
        while (fake->pending(torch_cuda->view(own)) == 0) std::this_thread::yield();
        EXPECT_FALSE(result.done());
        fake->release(torch_cuda->view(own));
        const c10::StreamGuard aside(torch_cuda->new_stream(0));
        EXPECT_TRUE(is_all(result.get(), 6));
        slow = nullptr;
      },
      16, 3);
}

TEST_P(CudaRpc, CU039_AnObjectThatCannotTravelIsUsedWithItsTensorThroughItsReference) {
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

TEST_P(CudaRpc, AValueThatStaysThereIsFetchedBehindTheWorkThatMakesIt) {
  run({{gpu(0), gpu(0)}}, [](rpc::Agent& agent) {
    c10::Stream own = torch_cuda->new_stream(0);
    slow = &own;
    fake->hold(torch_cuda->view(own));
    auto there = agent.remote<&make_slowly>("worker1", made(gpu(0), 4096, 1), 9);
    there.created().wait(20s);  // created as far as the host is concerned
    const int copies = fake->calls(&cuda::Driver::memcpy_async);
    const auto fetched = there.fetch();
    while (fake->calls(&cuda::Driver::memcpy_async) == copies) std::this_thread::yield();
    EXPECT_FALSE(fetched.done()) << "its copy is enqueued, behind a stream that is held";
    fake->release(torch_cuda->view(own));
    EXPECT_TRUE(is_all(fetched.get(), 9));
    slow = nullptr;
  });
}

TEST_P(CudaRpc, ACopyGoesToTheGpuOfAThirdWorkerByItsOwnersMapBehindTheWorkThatMakesIt) {
  run(
      {{gpu(0), gpu(0)}},
      [](rpc::Agent& agent) {
        c10::Stream own = torch_cuda->new_stream(0);
        slow = &own;
        fake->hold(torch_cuda->view(own));
        const auto copy = agent.remote<&make_slowly>("worker1", made(gpu(0), 4096, 1), 9).copy_to("worker2");
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

TEST_P(CudaRpc, CallsToOneselfRunOnTheCallersStreams) {
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

// --- what goes wrong

TEST_P(CudaRpc, ACopyThatTheGpuRefusesFailsItsCallAloneOnEitherSideAndWay) {
  run({{gpu(0), gpu(1)}}, [](rpc::Agent& agent) {
    EXPECT_EQ(agent.sync<&plus>("worker1", 1, 2), 3);
    const at::Tensor tensor = made(gpu(0), 64, 1);
    // From the caller's GPU, to the callee's, from that, to the caller's; or where it is read by who receives it.
    const std::vector<std::string> places = is_ipc() ? std::vector<std::string>{"cuda:1", "cuda:0"}
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

TEST_P(CudaRpc, CU040_AWorkerThatJoinsLaterIsCalledWithGpusTensorsByAMapThatNamedIt) {
  const auto store = c10::make_intrusive<c10d::HashStore>();
  const auto joined = [&](int rank, rpc::DeviceMaps maps) {
    rpc::Options options{.rank = rank, .store = store, .timeout = 20s, .transports = {transport()}};
    options.device_maps = std::move(maps);
    return rpc::init("worker" + std::to_string(rank), options, lent_.lend(*fake_, process_of(rank)));
  };
  rpc::Agent first = joined(0, {{"worker1", {{gpu(0), gpu(1)}}}, {"worker2", {{gpu(0), gpu(7)}}}});
  rpc::Agent second = joined(1, {});
  const Seen seen = first.sync<&look_at>("worker1", made(gpu(0), 64, 3), 3);
  EXPECT_EQ(seen.device, "cuda:1");
  EXPECT_TRUE(seen.right);
  EXPECT_TRUE(is_all(first.sync<&make>("worker1", gpu(1), 64, 4), 4));
  const Error error = error_of([&] { joined(2, {}); });
  EXPECT_EQ(error.blame(), Blame::Caller);
  EXPECT_NE(error.text().find("maps cuda:0 to cuda:7, and worker2 has 4 GPUs"), std::string::npos) << error.text();
  second.leave();
  first.leave();
}

// Two processes, each with a driver of its own.
class CudaRpcOfProcesses : public testing::TestWithParam<const char*> {};

TEST_P(CudaRpcOfProcesses, CU012_ArgumentsAndResultsTravelBetweenTheirGpus) {
  harness::run_alone({harness::As::Processes, GetParam(), 2}, [](rpc::Options options) {
    if (tensor::cuda_device_count() > 0) return;  // as above; cuda_gpu_test.cc has the real one
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
}  // namespace weft
