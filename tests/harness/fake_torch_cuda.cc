// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <atomic>
#include <map>
#include <mutex>
#include <stdexcept>
#include <vector>

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/Allocator.h>
#include <c10/core/Storage.h>
#include <c10/core/TensorImpl.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <weft/cuda/event.h>
#include <weft/cuda/fence.h>
#include <weft/cuda/ipc.h>
#include <weft/cuda/memory.h>
#include <weft/cuda/pinned.h>
#include <weft/cuda/poll.h>
#include <weft/cuda/retire.h>
#include <weft/tests/harness/fake_torch_cuda.h>

namespace weft::harness {

namespace {

// The current device and streams of this thread: c10 keeps them by thread, and only one Guard
// lives.
thread_local c10::DeviceIndex current_device = 0;
thread_local std::map<c10::DeviceIndex, c10::StreamId> current_streams;

// Pinned memory as libtorch has it: what is freed is kept for later tensors. As there, the driver
// knows it, so copies do not make the host wait. Unlike there, it may be given out again while a
// copy to it runs.
class PinnedAllocator final : public c10::Allocator {
 public:
  explicit PinnedAllocator(cuda::Device& device) : pool_(device) {}
  c10::DataPtr allocate(std::size_t bytes) override {
    auto memory =
        std::make_unique<cuda::PinnedMemory>(pool_.allocate(std::max<std::size_t>(bytes, 1)));
    void* const address = memory->slice().data;
    {
      std::lock_guard lock(mutex_);
      begins_[address] = bytes;
    }
    return {address, memory.release(),
            [](void* owned) { delete static_cast<cuda::PinnedMemory*>(owned); },
            c10::Device(c10::kCPU)};
  }
  bool has(const void* address) const {
    std::lock_guard lock(mutex_);
    const auto after = begins_.upper_bound(const_cast<void*>(address));
    if (after == begins_.begin()) return false;
    const auto& [begin, bytes] = *std::prev(after);
    return static_cast<const char*>(address) < static_cast<const char*>(begin) + bytes;
  }
  void copy_data(void*, const void*, std::size_t) const override {
    throw std::logic_error("the fake allocator does not copy");
  }

 private:
  cuda::PinnedPool pool_;
  mutable std::mutex mutex_;
  std::map<void*, std::size_t> begins_;
};
std::atomic<PinnedAllocator*> pinned{nullptr};

// A GPU's default generator. Like libtorch's, it does not tell its state while the current stream
// is captured.
struct GpuGenerator final : at::CPUGeneratorImpl {
  explicit GpuGenerator(c10::DeviceIndex index) : CPUGeneratorImpl(7), index_(index) {}
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override;

 private:
  const c10::DeviceIndex index_;
};

// libtorch asks these hooks whether there are GPUs, on whose streams autograd's nodes would run.
struct Hooks final : at::CUDAHooksInterface {
  void init() const override {}  // initialises libtorch's allocator before the first tensor
  bool isBuilt() const override { return c10::impl::hasDeviceGuardImpl(c10::kCUDA); }
  bool hasCUDA() const override { return isBuilt(); }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return isBuilt(); }  // all are open
  bool isPinnedPtr(const void* data) const override {
    return pinned != nullptr && pinned.load()->has(data);
  }
  c10::Allocator* getPinnedMemoryAllocator() const override { return pinned; }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex index) const override {
    static std::map<c10::DeviceIndex, at::Generator> generators;
    static std::mutex mutex;
    std::lock_guard lock(mutex);
    at::Generator& generator = generators[index];
    if (!generator.defined()) generator = at::make_generator<GpuGenerator>(index);
    return generator;
  }
};

}  // namespace

class FakeTorchCuda::Guard final : public c10::impl::DeviceGuardImplInterface {
 public:
  explicit Guard(const FakeDriver& fake) {
    for (int i = 0; i < cuda::Device::count(*fake.driver()); ++i) {
      devices_.push_back(cuda::Device::open(fake.driver(), i));
    }
    current_streams.clear();
  }
  ~Guard() override {
    for (const auto& device : devices_) {
      static_cast<void>(device->retirement().reclaim_all(Deadline::in(std::chrono::seconds(20))));
    }
  }

  cuda::Device& device(c10::DeviceIndex index) const {
    return *devices_.at(static_cast<std::size_t>(index));
  }
  cuda::StreamRef view(const c10::Stream& stream) const {
    return {device(stream.device_index()), static_cast<CUstream>(getStreamNativeHandle(stream))};
  }
  int recorded_uses() const { return recorded_; }

  c10::DeviceType type() const override { return c10::kCUDA; }
  c10::Device exchangeDevice(c10::Device next) const override {
    const c10::Device former = getDevice();
    setDevice(next);
    return former;
  }
  c10::Device getDevice() const override { return {c10::kCUDA, current_device}; }
  void setDevice(c10::Device next) const override { uncheckedSetDevice(next); }
  void uncheckedSetDevice(c10::Device next) const noexcept override {
    if (next.has_index()) current_device = next.index();
  }
  c10::DeviceIndex deviceCount() const noexcept override {
    return static_cast<c10::DeviceIndex>(devices_.size());
  }

  c10::Stream getStream(c10::Device on) const override {
    const c10::DeviceIndex index = on.has_index() ? on.index() : current_device;
    return c10::Stream(c10::Stream::UNSAFE, {c10::kCUDA, index}, current_streams[index]);
  }
  c10::Stream getDefaultStream(c10::Device on) const override {
    return c10::Stream(c10::Stream::DEFAULT, on);
  }
  c10::Stream getNewStream(c10::Device on, int) const override {
    return getStreamFromGlobalPool(on, false);
  }
  c10::Stream getStreamFromGlobalPool(c10::Device on, bool) const override {
    std::lock_guard lock(mutex_);
    streams_.push_back(std::make_unique<cuda::Stream>(device(on.index())));
    return c10::Stream(c10::Stream::UNSAFE, on, static_cast<c10::StreamId>(streams_.size()));
  }
  c10::Stream exchangeStream(c10::Stream next) const override {
    const c10::Stream former = getStream(next.device());
    current_streams[next.device_index()] = next.id();
    return former;
  }
  void* getStreamNativeHandle(const c10::Stream stream) const override {
    std::lock_guard lock(mutex_);
    return stream.id() == 0 ? nullptr
                            : streams_.at(static_cast<std::size_t>(stream.id()) - 1)->native();
  }

  void record(void** event, const c10::Stream& stream, const c10::DeviceIndex,
              const c10::EventFlag) const override {
    if (*event == nullptr) *event = new cuda::Event(device(stream.device_index()));
    static_cast<cuda::Event*>(*event)->record(view(stream));
  }
  void block(void* event, const c10::Stream& stream) const override {
    if (event != nullptr) static_cast<cuda::Event*>(event)->wait(view(stream));
  }
  bool queryEvent(void* event) const override {
    return event == nullptr || static_cast<cuda::Event*>(event)->query();
  }
  void synchronizeEvent(void* event) const override {
    if (event == nullptr) return;
    const auto& recorded = *static_cast<cuda::Event*>(event);
    cuda::poll_until([&] { return recorded.query(); }, Deadline::in(std::chrono::seconds(20)));
  }
  // The streams of the pool; a default stream cannot be used.
  void synchronizeDevice(const c10::DeviceIndex index) const override {
    std::vector<cuda::StreamRef> all;
    {
      std::lock_guard lock(mutex_);
      for (const auto& stream : streams_) {
        if (&stream->device() == &device(index)) all.push_back(*stream);
      }
    }
    for (const cuda::StreamRef& stream : all)
      cuda::poll_until([&] { return stream.query(); }, Deadline::in(std::chrono::seconds(20)));
  }
  void destroyEvent(void* event, const c10::DeviceIndex) const noexcept override {
    delete static_cast<cuda::Event*>(event);
  }
  void recordDataPtrOnStream(const c10::DataPtr&, const c10::Stream&) const override {
    ++recorded_;
  }

 private:
  std::vector<std::shared_ptr<cuda::Device>> devices_;
  mutable std::mutex mutex_;
  mutable std::vector<std::unique_ptr<cuda::Stream>> streams_;
  mutable std::atomic<int> recorded_{0};
};

c10::intrusive_ptr<c10::TensorImpl> GpuGenerator::get_state() const {
  const auto* const guard =
      dynamic_cast<const FakeTorchCuda::Guard*>(c10::impl::getDeviceGuardImpl(c10::kCUDA));
  TORCH_CHECK(!guard->view(guard->getStream({c10::kCUDA, index_})).is_capturing(),
              "Cannot call CUDAGeneratorImpl::current_seed during CUDA graph capture.");
  return CPUGeneratorImpl::get_state();
}

// Allocates memory for the current stream of the current device and frees it in that stream's
// order, as libtorch's allocator would do later. Use on other streams must be over by then, whether
// recorded or not.
class FakeTorchCuda::Allocator final : public c10::Allocator {
 public:
  Allocator(std::shared_ptr<Guard> guard, Memory kind) : guard_(std::move(guard)), kind_(kind) {}
  c10::DataPtr allocate(std::size_t bytes) override {
    const c10::Device device = guard_->getDevice();
    if (bytes == 0) return {nullptr, nullptr, [](void*) {}, device};
    return on(guard_->getStream(device), bytes);
  }
  // Allocates for that stream.
  c10::DataPtr on(const c10::Stream& stream, std::size_t bytes) {
    const cuda::StreamRef view = guard_->view(stream);
    if (kind_ == Memory::Shareable) {
      auto memory = std::unique_ptr<Shared>(new Shared{view, {view.device(), bytes}});
      void* const address = memory->memory.slice().data;
      return {address, memory.release(), &release_shared, stream.device()};
    }
    auto memory = std::make_unique<cuda::DeviceMemory>(view, bytes);
    void* const address = memory->slice().data;
    return {address, memory.release(), &release, stream.device()};
  }
  void copy_data(void*, const void*, std::size_t) const override {
    throw std::logic_error("the fake allocator does not copy");
  }

 private:
  struct Shared {
    cuda::StreamRef stream;
    cuda::ShareableMemory memory;
  };
  static void release(void* memory) { delete static_cast<cuda::DeviceMemory*>(memory); }
  static void release_shared(void* held) {
    std::shared_ptr<Shared> memory(static_cast<Shared*>(held));
    const cuda::StreamRef stream = memory->stream;
    stream.device().retirement().retire(cuda::record(stream), [memory] {});
  }

  std::shared_ptr<Guard> guard_;
  const Memory kind_;
};

FakeTorchCuda::FakeTorchCuda(const FakeDriver& driver, Memory memory)
    : guard_(std::make_shared<Guard>(driver)),
      allocator_(std::make_shared<Allocator>(guard_, memory)) {
  // Never unregistered: libtorch looks for hooks once in a process, when it first asks.
  if (!at::CUDAHooksRegistry()->Has("CUDAHooks")) {
    at::CUDAHooksRegistry()->Register(
        "CUDAHooks", [](at::CUDAHooksArgs) -> std::unique_ptr<at::CUDAHooksInterface> {
          return std::make_unique<Hooks>();
        });
  }
  c10::impl::device_guard_impl_registry[static_cast<std::size_t>(c10::kCUDA)] = guard_.get();
  c10::SetAllocator(c10::kCUDA, allocator_.get());
  pinned_ = std::make_shared<PinnedAllocator>(guard_->device(0));
  pinned = static_cast<PinnedAllocator*>(pinned_.get());
}

FakeTorchCuda::~FakeTorchCuda() {
  pinned = nullptr;
  c10::SetAllocator(c10::kCUDA, nullptr);
  c10::impl::device_guard_impl_registry[static_cast<std::size_t>(c10::kCUDA)] = nullptr;
}

at::Tensor FakeTorchCuda::empty(at::IntArrayRef sizes, at::ScalarType type, int device) {
  std::size_t bytes = c10::elementSize(type);
  for (const std::int64_t size : sizes) bytes *= static_cast<std::size_t>(size);
  c10::DataPtr data = allocator_->on(current(device), std::max<std::size_t>(bytes, 1));
  c10::Storage storage(c10::Storage::use_byte_size_t(),
                       c10::SymInt(static_cast<std::int64_t>(bytes)), std::move(data), nullptr,
                       false);
  const c10::DispatchKeySet keys(
      {c10::DispatchKey::CUDA, c10::DispatchKey::ADInplaceOrView, c10::DispatchKey::AutogradCUDA});
  at::Tensor tensor(c10::make_intrusive<c10::TensorImpl>(std::move(storage), keys,
                                                         c10::scalarTypeToTypeMeta(type)));
  tensor.unsafeGetTensorImpl()->set_sizes_contiguous(sizes);
  return tensor;
}

c10::Stream FakeTorchCuda::new_stream(int device) {
  return guard_->getStreamFromGlobalPool({c10::kCUDA, static_cast<c10::DeviceIndex>(device)},
                                         false);
}

cuda::StreamRef FakeTorchCuda::view(const c10::Stream& stream) { return guard_->view(stream); }

c10::Stream FakeTorchCuda::current(int device) {
  return guard_->getStream({c10::kCUDA, static_cast<c10::DeviceIndex>(device)});
}

int FakeTorchCuda::recorded_uses() const { return guard_->recorded_uses(); }

}  // namespace weft::harness
