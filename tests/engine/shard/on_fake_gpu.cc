// SPDX-License-Identifier: Apache-2.0
#include "on_fake_gpu.h"

#include <algorithm>
#include <stdexcept>
#include <string_view>
#include <utility>

#include <ATen/EmptyTensor.h>
#include <ATen/core/ATen_fwd.h>
#include <ATen/native/TensorShape.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/view_native.h>
#include <torch/library.h>

#include <weft/cuda/fence.h>
#include <weft/profiling/trace/flight_recorder.h>

namespace weft::fake_gpu {

harness::FakeDriver* driver = nullptr;
harness::FakeTorchCuda* cuda_of_torch = nullptr;
thread_local std::function<void()> before_product;

namespace {

cuda::StreamRef stream_of(const at::Tensor& tensor) {
  return cuda_of_torch->view(cuda_of_torch->current(tensor.get_device()));
}

// Enqueues work on the current stream of the tensor's device, as a kernel.
void enqueue(const at::Tensor& tensor, const std::string& name, std::function<void()> run) {
  EXPECT_EQ(driver->enqueue(stream_of(tensor).native(), name, std::move(run)), CUDA_SUCCESS);
}

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
// "copy", and between the host and a GPU "copy in" and "copy out", which hold the host as the
// driver's copies do.
at::Tensor& copy(at::Tensor& self, const at::Tensor& source, bool non_blocking) {
  const at::Tensor& on_gpu = self.is_cuda() ? self : source;
  const char* const name = source.is_cpu() ? "copy in" : self.is_cpu() ? "copy out" : "copy";
  enqueue(on_gpu, name, [to = View(self), from = View(source)] {
    for (std::int64_t i = 0; i < to.count; ++i) to[i] = from[i];
  });
  if (self.is_cuda() && source.is_cuda()) return self;
  const at::Tensor& on_host = self.is_cuda() ? source : self;
  if (non_blocking) {
    EXPECT_TRUE(on_host.numel() == 0 || on_host.is_pinned()) << "the host would wait";
  } else {
    EXPECT_TRUE(
        cuda::record(stream_of(on_gpu)).synchronize(Deadline::in(std::chrono::seconds(20))));
  }
  return self;
}
at::Tensor& fill(at::Tensor& self, const at::Scalar& value) {
  enqueue(self, "fill", [to = View(self), number = value.toFloat()] {
    for (std::int64_t i = 0; i < to.count; ++i) to[i] = number;
  });
  return self;
}
at::Tensor& zero(at::Tensor& self) { return fill(self, 0); }
at::Tensor& add(at::Tensor& self, const at::Tensor& other, const at::Scalar&) {
  enqueue(self, "add", [to = View(self), x = View(other)] {
    for (std::int64_t i = 0; i < to.count; ++i) to[i] += x[i];
  });
  return self;
}
at::Scalar item(const at::Tensor& self) {
  EXPECT_TRUE(cuda::record(stream_of(self)).synchronize(Deadline::in(std::chrono::seconds(20))));
  return View(self)[0];
}
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

}  // namespace

std::uint64_t last_operation() {
  std::uint64_t last = 0;
  for (const trace::Record& record : trace::flight_recorder().read())
    last = std::max(last, record.ticket);
  return last;
}

std::ptrdiff_t ended_gathers(std::uint64_t after) {
  return std::ranges::count_if(
      trace::flight_recorder().read(), [after](const trace::Record& record) {
        return record.ticket > after && std::string_view(record.name) == "all_gather" &&
               record.state == trace::State::Done;
      });
}

struct CachingAllocator::Block {
  std::shared_ptr<CachingAllocator> owner;
  Key key;
  c10::DataPtr memory;
};

c10::DataPtr CachingAllocator::allocate(std::size_t bytes) {
  const auto* const guard = c10::impl::getDeviceGuardImpl(c10::kCUDA);
  const c10::Device device = guard->getDevice();
  if (bytes == 0) return below_->allocate(0);
  const Key key(device.index(), guard->getStream(device).id(), bytes);
  c10::DataPtr memory;
  {
    std::lock_guard lock(mutex_);
    Count& count = counts_[{device.index(), bytes}];
    count.most = std::max(count.most, ++count.now);
    auto& idle = idle_[key];
    if (!idle.empty()) {
      memory = std::move(idle.back());
      idle.pop_back();
    }
  }
  if (!memory) memory = below_->allocate(bytes);
  void* const address = memory.get();
  return {address, new Block{shared_from_this(), key, std::move(memory)}, &free, device};
}

void CachingAllocator::free(void* block) {
  const std::unique_ptr<Block> freed(static_cast<Block*>(block));
  CachingAllocator& owner = *freed->owner;
  std::lock_guard lock(owner.mutex_);
  --owner.counts_[{std::get<0>(freed->key), std::get<2>(freed->key)}].now;
  owner.idle_[freed->key].push_back(std::move(freed->memory));
}

void CachingAllocator::copy_data(void*, const void*, std::size_t) const {
  throw std::logic_error("the fake allocator does not copy");
}

int CachingAllocator::most(c10::Device device, std::size_t bytes) const {
  std::lock_guard lock(mutex_);
  const auto found = counts_.find({device.index(), bytes});
  return found == counts_.end() ? 0 : found->second.most;
}

void CachingAllocator::forget_most() {
  std::lock_guard lock(mutex_);
  for (auto& [key, count] : counts_) count.most = count.now;
}

void CachingAllocator::clear() {
  std::lock_guard lock(mutex_);
  idle_.clear();
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
  library.impl("add_.Tensor", &add);
  library.impl("_local_scalar_dense", &item);
  library.impl("cat.out", &cat_out);
  library.impl("mul.out", &multiply_out);
  library.impl("mul.Tensor", &multiply);
}

void OnFakeGpus::SetUp() {
  if (tensor::cuda_device_count() > 0)
    GTEST_SKIP() << "libtorch has a real GPU here; the fake one would stand in its place";
  fake_ = std::make_unique<harness::FakeDriver>(
      harness::FakeDriver::Options{.devices = 2, .threads = true});
  torch_ = std::make_unique<harness::FakeTorchCuda>(*fake_);
  driver = fake_.get();
  cuda_of_torch = torch_.get();
  give_kernels();
  memory_ = std::make_shared<CachingAllocator>(c10::GetAllocator(c10::kCUDA));
  c10::SetAllocator(c10::kCUDA, memory_.get());
}

void OnFakeGpus::TearDown() {
  if (memory_) memory_->clear();
}

void OnFakeGpus::run(const std::function<void(Rank&)>& body, const std::string& backend) {
  const auto store = c10::make_intrusive<c10d::HashStore>();
  harness::run_threads(2, [&](int rank) {
    const c10::Device gpu(c10::kCUDA, static_cast<c10::DeviceIndex>(rank));
    // The fake driver's libraries know no default stream.
    const c10::StreamGuard guard(torch_->new_stream(rank));
    auto devices = std::make_shared<tensor::CudaDevices>(fake_->driver());
    Rank one{group::init({.backend = backend,
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

void OnFakeGpus::set_weights(const Product& model, float first) {
  const torch::NoGradGuard no_grad;
  for (auto& shard : model.parameters()) shard.fill_(first++);
}

void OnFakeGpus::expect_training(Sharded& sharded, const Rank& rank,
                                 std::initializer_list<float> first, std::int64_t rows) {
  for (const float one : first) {
    set_weights(*sharded.module(), one);
    step(sharded, rank, rows);
    expect_gradients(*sharded.module(), one);
  }
}

void OnFakeGpus::warm_up(Sharded& sharded, Rank& rank, std::int64_t rows) {
  for (int i = 0; i < 2; ++i) step(sharded, rank, rows);
  rank.drain();
  meet();
}

std::uint64_t OnFakeGpus::operation_until_now(Rank& rank) {
  rank.drain();
  meet();
  const auto last = last_operation();
  meet();
  return last;
}

void OnFakeGpus::forget_most(Rank& rank) {
  if (rank.number() == 0) memory_->forget_most();
  meet();
}

void OnFakeGpus::expect_gather_beside_kernels(Sharded& sharded, Rank& rank) {
  step(sharded, rank);
  const auto before = operation_until_now(rank);
  before_product = [&] {  // the first product of forward
    rank.drain();         // until its unit is gathered
    fake_->hold(rank.stream());
    meet();
    EXPECT_TRUE(harness::comes_true([&] { return ended_gathers(before) == 4; }))
        << "two units on two ranks; there are " << ended_gathers(before);
    meet();
    fake_->release(rank.stream());
  };
  step(sharded, rank);
}

void expect_gradients(const Product& model, float first, float times) {
  float product = 1;
  for (std::size_t i = 0; i < model.used; ++i) product *= first + static_cast<float>(i);
  for (std::size_t i = 0; i < model.used; ++i) {
    const at::Tensor gradient = model.parameters()[i].grad();
    ASSERT_TRUE(gradient.defined()) << i;
    const float expected = times * 1.5F * product / (first + static_cast<float>(i));
    const View view(gradient);
    for (std::int64_t element = 0; element < view.count; ++element)
      EXPECT_EQ(view[element], expected) << i << ", element " << element;
  }
}

}  // namespace weft::fake_gpu
