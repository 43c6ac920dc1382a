// SPDX-License-Identifier: Apache-2.0
#include <cstdlib>
#include <map>

#include <weft/base/error.h>
#include <weft/cuda/device.h>
#include <weft/cuda/driver.h>
#include <weft/cuda/fence.h>
#include <weft/cuda/ipc.h>
#include <weft/cuda/memory.h>
#include <weft/cuda/poll.h>
#include <weft/cuda/retire.h>
#include <weft/profiling/bench/transport_on_gpu.h>
#include <weft/transport/cuda_ipc/cuda_ipc.h>

namespace weft::bench {

namespace {

std::shared_ptr<cuda::Device> open_device() {
  // Streams that wait for each other need a hardware queue each, and no kernel may be loaded while
  // they wait.
  setenv("CUDA_DEVICE_MAX_CONNECTIONS", "32", /*overwrite=*/0);
  setenv("CUDA_MODULE_LOADING", "EAGER", /*overwrite=*/0);
  return cuda::Device::open(cuda::Driver::open().value(), 0);
}

// Reclaims retired resources while the context exists; the loop may still be releasing its last
// connection.
void reclaim(const std::shared_ptr<cuda::Device>& device) {
  const auto is_last = [&] {
    static_cast<void>(device->retirement().reclaim_all(Deadline::in(std::chrono::seconds(1))));
    return device.use_count() == 1 && device->retirement().pending() == 0;
  };
  static_cast<void>(cuda::poll_until(is_last, Deadline::in(std::chrono::seconds(5))));
}

class Lanes final : public GpuLanes {
 public:
  // The connections must have been destroyed.
  ~Lanes() override {
    memory_.clear();
    stage_.reset();
    reclaim(device_);
  }

  std::shared_ptr<transport::Connection> over(std::shared_ptr<transport::Connection> below,
                                              const std::shared_ptr<EventLoop>& loop) override {
    return transport::cuda_ipc::over(std::move(below), stage_, loop);
  }

  Slice memory(const void* owner, std::size_t piece, std::size_t bytes) override {
    auto& kept = memory_[{owner, piece}];
    if (!kept || kept->slice().bytes < bytes)
      kept = std::make_unique<cuda::ShareableMemory>(*device_, bytes);
    return kept->slice().part(0, bytes);
  }

 private:
  const std::shared_ptr<cuda::Device> device_ = open_device();
  std::shared_ptr<transport::staged::Stage> stage_ = std::make_shared<transport::staged::Stage>(
      std::vector<std::shared_ptr<cuda::Device>>{device_});
  std::map<std::pair<const void*, std::size_t>, std::unique_ptr<cuda::ShareableMemory>> memory_;
};

}  // namespace

std::optional<std::string> why_no_gpu() {
  auto driver = cuda::Driver::open();
  if (!driver.ok()) return driver.error().text();
  if (cuda::Device::count(*driver.value()) == 0) return "the driver sees no GPU";
  return std::nullopt;
}

std::shared_ptr<GpuLanes> GpuLanes::open() { return std::make_shared<Lanes>(); }

Participant device_copy() {
  struct Copies {
    std::shared_ptr<cuda::Device> device = open_device();
    cuda::Stream stream{*device};
    std::unique_ptr<cuda::ShareableMemory> from, to;

    ~Copies() {
      from.reset();
      to.reset();
      static_cast<void>(device->retirement().reclaim_all(Deadline::in(std::chrono::seconds(5))));
    }
    double run(std::size_t bytes, int count) {
      if (!from || from->slice().bytes < bytes) {
        from = std::make_unique<cuda::ShareableMemory>(*device, bytes);
        to = std::make_unique<cuda::ShareableMemory>(*device, bytes);
      }
      const double begin = seconds();
      for (int i = 0; i < count; ++i)
        cuda::copy(stream, to->slice().part(0, bytes), from->slice().part(0, bytes));
      const Fence last = cuda::record(stream);
      while (!last.query()) {
      }
      return seconds() - begin;
    }
  };
  const auto copies = std::make_shared<Copies>();
  return {[copies](std::size_t bytes, int count) {
            std::vector<double> times;
            for (int i = 0; i < count; ++i) times.push_back(copies->run(bytes, 2));
            return times;
          },
          [copies](std::size_t bytes, int count) { return copies->run(bytes, count); }};
}

}  // namespace weft::bench
