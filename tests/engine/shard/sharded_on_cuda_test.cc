// SPDX-License-Identifier: Apache-2.0
// Sharded models on the fake driver's GPUs, one for each rank: what waits for what. libtorch has no
// kernels there, so this file gives it the few that a model of products and its sharding need.
#include <algorithm>
#include <barrier>
#include <string_view>

#include <gtest/gtest.h>

#include <ATen/EmptyTensor.h>
#include <ATen/core/ATen_fwd.h>
#include <ATen/native/TensorShape.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/Event.h>
#include <c10/core/StreamGuard.h>
#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <torch/library.h>
#include <torch/nn/module.h>

#include <weft/engine/group/core.h>
#include <weft/engine/shard/libtorch_internals.h>
#include <weft/engine/tensor/torch_cuda.h>
#include <weft/fully_shard.h>
#include <weft/profiling/trace/flight_recorder.h>
#include <weft/tests/harness/fake_torch_cuda.h>
#include <weft/tests/harness/ranks.h>

namespace weft {
namespace {

harness::FakeDriver* driver = nullptr;
harness::FakeTorchCuda* cuda_of_torch = nullptr;

// Enqueues work on the current stream of the tensor's device, as a kernel.
void enqueue(const at::Tensor& tensor, const std::string& name, std::function<void()> run) {
  const auto stream = cuda_of_torch->view(cuda_of_torch->current(tensor.get_device()));
  EXPECT_EQ(driver->enqueue(stream.native(), name, std::move(run)), CUDA_SUCCESS);
}

// Where a kernel finds the elements of a float tensor when it runs; it does not keep the memory.
struct View {
  explicit View(const at::Tensor& tensor)
      : sizes(tensor.sizes().vec()),
        strides(tensor.strides().vec()),
        data(tensor.numel() == 0 ? nullptr : static_cast<float*>(tensor.mutable_data_ptr())),
        count(tensor.numel()) {}
  float& operator[](std::int64_t element) const {
    std::int64_t offset = 0;
    for (std::size_t i = sizes.size(); i-- > 0; element /= sizes[i])
      offset += element % sizes[i] * strides[i];
    return data[offset];
  }
  std::vector<std::int64_t> sizes, strides;
  float* data;
  std::int64_t count;
};

at::Tensor empty(at::IntArrayRef sizes, std::optional<at::ScalarType> type,
                 std::optional<at::Layout>, std::optional<at::Device> device, std::optional<bool>,
                 std::optional<at::MemoryFormat> format) {
  const c10::OptionalDeviceGuard guard(device);
  return at::detail::empty_generic(sizes, c10::GetAllocator(c10::kCUDA),
                                   c10::DispatchKeySet(c10::DispatchKey::CUDA),
                                   type.value_or(at::kFloat), format);
}
at::Tensor empty_strided(at::IntArrayRef sizes, at::IntArrayRef strides,
                         std::optional<at::ScalarType> type, std::optional<at::Layout>,
                         std::optional<at::Device> device, std::optional<bool>) {
  const c10::OptionalDeviceGuard guard(device);
  return at::detail::empty_strided_generic(sizes, strides, c10::GetAllocator(c10::kCUDA),
                                           c10::DispatchKeySet(c10::DispatchKey::CUDA),
                                           type.value_or(at::kFloat));
}
at::Tensor& set(at::Tensor& self, at::Storage source, std::int64_t offset, at::IntArrayRef sizes,
                at::IntArrayRef strides) {
  self.unsafeGetTensorImpl()->set_storage_keep_dtype(std::move(source));
  self.unsafeGetTensorImpl()->set_sizes_and_strides(sizes, strides, offset);
  return self;
}
at::Tensor& copy(at::Tensor& self, const at::Tensor& source, bool) {
  enqueue(self, "copy", [to = View(self), from = View(source)] {
    for (std::int64_t i = 0; i < to.count; ++i) to[i] = from[i];
  });
  return self;
}
at::Tensor& fill(at::Tensor& self, const at::Scalar& value) {
  enqueue(self, "fill", [to = View(self), number = value.toFloat()] {
    for (std::int64_t i = 0; i < to.count; ++i) to[i] = number;
  });
  return self;
}
at::Tensor& zero(at::Tensor& self) { return fill(self, 0); }
at::Tensor& multiply_out(const at::Tensor& a, const at::Tensor& b, at::Tensor& out) {
  if (a.is_cpu()) return multiply_out(b, a, out);
  if (b.is_cpu()) {  // a number
    enqueue(out, "multiply", [to = View(out), x = View(a), number = b.item<float>()] {
      for (std::int64_t i = 0; i < to.count; ++i) to[i] = x[i] * number;
    });
  } else {
    enqueue(out, "multiply", [to = View(out), x = View(a), y = View(b)] {
      for (std::int64_t i = 0; i < to.count; ++i) to[i] = x[i] * y[i];
    });
  }
  return out;
}
// Called before this thread's next product is enqueued.
thread_local std::function<void()> before_product;
at::Tensor multiply(const at::Tensor& a, const at::Tensor& b) {
  if (const auto call = std::exchange(before_product, nullptr)) call();
  at::Tensor out = empty_strided(a.sizes(), a.strides(), a.scalar_type(), {}, a.device(), {});
  return multiply_out(a, b, out);
}

at::Tensor& cat_out(const at::ITensorListRef& parts, std::int64_t dim, at::Tensor& out) {
  std::int64_t first = 0;
  for (const at::Tensor& part : parts) {
    at::Tensor place = out.narrow(dim, first, part.size(dim));
    copy(place, part, false);
    first += part.size(dim);
  }
  return out;
}

void give_kernels() {
  static torch::Library library(torch::Library::IMPL, "aten", c10::DispatchKey::CUDA, __FILE__,
                                __LINE__);
  static bool is_done = false;
  if (std::exchange(is_done, true)) return;
  library.impl("empty.memory_format", &empty);
  library.impl("empty_strided", &empty_strided);
  library.impl("set_.source_Storage_storage_offset", &set);
  library.impl("as_strided", &at::native::as_strided_tensorimpl);
  library.impl("view", &at::native::view);
  library.impl("copy_", &copy);
  library.impl("fill_.Scalar", &fill);
  library.impl("zero_", &zero);
  library.impl("cat.out", &cat_out);
  library.impl("mul.out", &multiply_out);
  library.impl("mul.Tensor", &multiply);
}

struct Scaled : torch::nn::Module {
  explicit Scaled(at::Tensor values) : weight(register_parameter("weight", std::move(values))) {}
  at::Tensor weight;
};

// The product of the input and all weights.
struct Product : torch::nn::Module {
  static constexpr int kParts = 4;
  explicit Product(c10::Device device) {
    for (int i = 0; i < kParts; ++i) {
      const at::Tensor values = at::empty({3, 2}, at::TensorOptions(at::kFloat).device(device));
      values.fill_(i + 2);
      parts.push_back(
          register_module("part" + std::to_string(i), std::make_shared<Scaled>(values)));
    }
  }
  at::Tensor forward(at::Tensor x) {
    for (const std::size_t i : used) {
      x = x * parts[i]->weight;
      if (on_backward) x.register_hook([this, i](const at::Tensor&) { on_backward(i); });
    }
    return x;
  }
  std::vector<std::shared_ptr<Scaled>> parts;
  std::vector<std::size_t> used = {0, 1, 2, 3};
  std::function<void(std::size_t part)> on_backward;  // before that of the part
};

// The product of the input's square and all weights, of which part 1 is taken on a side stream.
struct ProductOfTwoStreams : Product {
  ProductOfTwoStreams(c10::Device device, c10::Stream side) : Product(device), side(side) {}
  at::Tensor forward(const at::Tensor& x) {
    const c10::Stream main = cuda_of_torch->current(x.get_device());
    at::Tensor product = x * parts[0]->weight;
    join(side, main);
    {
      const c10::StreamGuard guard(side);
      aside = x * parts[1]->weight;
    }
    product = product * parts[2]->weight;
    product = product * parts[3]->weight;
    join(main, side);
    return aside * product;
  }
  static void join(const c10::Stream& stream, const c10::Stream& other) {
    c10::Event event(c10::kCUDA);
    event.record(other);
    event.block(stream);
  }
  const c10::Stream side;
  at::Tensor aside;  // until the main stream has used it
};

class ShardedOnCuda : public ::testing::Test {
 protected:
  struct Rank {
    ProcessGroup group;
    c10::Device gpu;
    std::shared_ptr<tensor::CudaDevices> devices;
    cuda::StreamRef stream() const {
      return cuda_of_torch->view(cuda_of_torch->current(gpu.index()));
    }
    // The host waits for the current stream.
    void drain() {
      EXPECT_TRUE(devices->ready(gpu).synchronize(Deadline::in(std::chrono::seconds(20))));
    }
  };

  void SetUp() override {
    if (tensor::cuda_device_count() > 0)
      GTEST_SKIP() << "libtorch has a real GPU here; the fake one would stand in its place";
    fake_ = std::make_unique<harness::FakeDriver>(
        harness::FakeDriver::Options{.devices = 2, .threads = true});
    torch_ = std::make_unique<harness::FakeTorchCuda>(*fake_);
    driver = fake_.get();
    cuda_of_torch = torch_.get();
    give_kernels();
  }

  void run(const std::function<void(Rank&)>& body) {
    const auto store = c10::make_intrusive<c10d::HashStore>();
    harness::run_threads(2, [&](int rank) {
      const c10::Device gpu(c10::kCUDA, static_cast<c10::DeviceIndex>(rank));
      // The fake driver's libraries know no default stream.
      const c10::StreamGuard guard(torch_->new_stream(rank));
      auto devices = std::make_shared<tensor::CudaDevices>(fake_->driver());
      Rank one{group::init({.backend = "gloo",
                            .rank = rank,
                            .world_size = 2,
                            .store = store,
                            .timeout = std::chrono::seconds(20),
                            .device = gpu},
                           devices),
               gpu, devices};
      body(one);
    });
  }

  static void step(FullyShardedDataParallel<Product>& sharded, const Rank& rank) {
    for (const auto& shard : sharded.module()->parameters()) shard.mutable_grad().reset();
    pass(sharded, rank);
  }
  static void pass(FullyShardedDataParallel<Product>& sharded, const Rank& rank) {
    const at::Tensor ones = at::empty({3, 2}, at::TensorOptions(at::kFloat).device(rank.gpu));
    ones.fill_(1);
    const at::Tensor x = at::empty_like(ones);
    x.fill_(rank.gpu.index() + 1);
    sharded(x).backward(ones);
  }

  std::unique_ptr<harness::FakeDriver> fake_;
  std::unique_ptr<harness::FakeTorchCuda> torch_;
};

// The gradients after one step with x = 1 and 2 and the weights first, first + 1, …
void expect_gradients(const Product& model, float first) {
  float product = 1;
  for (int i = 0; i < Product::kParts; ++i) product *= first + static_cast<float>(i);
  for (int i = 0; i < Product::kParts; ++i) {
    const View gradient(model.parameters()[static_cast<std::size_t>(i)].grad());
    EXPECT_EQ(gradient[0], 1.5F * product / (first + static_cast<float>(i))) << i;
  }
}

TEST_F(ShardedOnCuda, GradientsAreAverages) {
  run([&](Rank& rank) {
    const auto model = std::make_shared<Product>(rank.gpu);
    FullyShardedDataParallel sharded(model, rank.group);
    step(sharded, rank);
    rank.drain();
    expect_gradients(*model, 2);
  });
}

// libtorch's thread for the GPU averages them when it ends the backward.
TEST_F(ShardedOnCuda, GradientsOfUnitsThatTheLastBackwardDoesNotUseAreAverages) {
  run([&](Rank& rank) {
    const auto model = std::make_shared<Product>(rank.gpu);
    FullyShardedDataParallel sharded(model, rank.group);
    model->used = {3};
    {
      const auto local = sharded.no_sync();
      pass(sharded, rank);
    }
    model->used = {0, 1, 2};
    pass(sharded, rank);
    rank.drain();
    const float expected[] = {1.5F * 3 * 4, 1.5F * 2 * 4, 1.5F * 2 * 3, 1.5F};
    for (std::size_t i = 0; i < model->parts.size(); ++i)
      EXPECT_EQ(View(model->parameters()[i].grad())[0], expected[i]) << i;
  });
}

// The optimizer's step is still to run when forward and backward are enqueued.
TEST_F(ShardedOnCuda, AStepHoldsStreamsNotTheHost) {
  std::barrier meeting(2);
  run([&](Rank& rank) {
    const auto model = std::make_shared<Product>(rank.gpu);
    FullyShardedDataParallel sharded(model, rank.group);
    for (int i = 0; i < 2; ++i) step(sharded, rank);
    rank.drain();
    meeting.arrive_and_wait();
    const int blocked = fake_->host_blocks();
    fake_->hold(rank.stream());
    {
      const torch::NoGradGuard no_grad;
      float value = 3;
      for (auto& shard : model->parameters()) shard.fill_(value++);
    }
    step(sharded, rank);
    EXPECT_EQ(fake_->host_blocks(), blocked);
    meeting.arrive_and_wait();
    fake_->release(rank.stream());
    rank.drain();
    expect_gradients(*model, 3);
  });
}

// The unit's memory is freed on the main stream while its product is still to run on the side one.
TEST_F(ShardedOnCuda, AUnitOnASideStreamKeepsItsMemoryUntilItHasRun) {
  std::barrier meeting(2);
  run([&](Rank& rank) {
    const torch::NoGradGuard no_grad;
    const auto model =
        std::make_shared<ProductOfTwoStreams>(rank.gpu, torch_->new_stream(rank.gpu.index()));
    const auto side = torch_->view(model->side);
    FullyShardedDataParallel sharded(model, rank.group);
    const at::Tensor x = at::empty({3, 2}, at::TensorOptions(at::kFloat).device(rank.gpu));
    x.fill_(rank.gpu.index() + 1);
    sharded(x);  // from now on part 1 is gathered on the main stream, behind part 0
    rank.drain();
    meeting.arrive_and_wait();
    const int blocked = fake_->host_blocks();
    meeting.arrive_and_wait();
    fake_->hold(side);
    const at::Tensor product = sharded(x);
    EXPECT_EQ(fake_->host_blocks(), blocked);
    meeting.arrive_and_wait();
    fake_->release(side);
    rank.drain();
    const auto input = static_cast<float>(rank.gpu.index() + 1);
    EXPECT_EQ(View(product)[0], input * input * 2 * 3 * 4 * 5);
  });
}

// On both ranks together.
std::ptrdiff_t ended(std::string_view name) {
  return std::ranges::count_if(trace::flight_recorder().read(), [&](const trace::Record& record) {
    return std::string_view(record.name) == name && record.state == trace::State::Done;
  });
}
std::ptrdiff_t ended_gathers() { return ended("all_gather"); }

// The kernels of part 2's backward are enqueued and cannot run until part 3's gradients are there.
TEST_F(ShardedOnCuda, GradientsAreReducedBesideTheKernelsOfTheNextBackward) {
  std::barrier meeting(2);
  run([&](Rank& rank) {
    const auto model = std::make_shared<Product>(rank.gpu);
    FullyShardedDataParallel sharded(model, rank.group);
    step(sharded, rank);
    rank.drain();
    meeting.arrive_and_wait();
    const auto before = ended("reduce_scatter");
    meeting.arrive_and_wait();
    const auto stream = rank.stream();
    model->on_backward = [&](std::size_t part) {
      if (part == 2) {
        rank.drain();  // until part 3's gradients are packed
        fake_->hold(stream);
      } else if (part == 1) {
        EXPECT_GT(fake_->pending(stream), 0U);
        meeting.arrive_and_wait();
        EXPECT_TRUE(harness::comes_true([&] { return ended("reduce_scatter") == before + 2; }))
            << "one unit on two ranks; there are " << ended("reduce_scatter") - before;
        meeting.arrive_and_wait();
        fake_->release(stream);
      }
    };
    step(sharded, rank);
    rank.drain();
    expect_gradients(*model, 2);
  });
}

TEST_F(ShardedOnCuda, TheNextUnitIsGatheredBesideTheKernelsOfThisOne) {
  std::barrier meeting(2);
  run([&](Rank& rank) {
    const auto model = std::make_shared<Product>(rank.gpu);
    FullyShardedDataParallel sharded(model, rank.group);
    step(sharded, rank);
    rank.drain();
    meeting.arrive_and_wait();
    const auto before = ended_gathers();
    meeting.arrive_and_wait();
    before_product = [&] {  // the first product of forward
      rank.drain();         // until its unit is gathered
      fake_->hold(rank.stream());
      meeting.arrive_and_wait();
      EXPECT_TRUE(harness::comes_true([&] { return ended_gathers() == before + 4; }))
          << "two units on two ranks; there are " << ended_gathers() - before;
      meeting.arrive_and_wait();
      fake_->release(rank.stream());
    };
    step(sharded, rank);
    rank.drain();
  });
}

}  // namespace
}  // namespace weft
