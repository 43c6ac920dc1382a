// SPDX-License-Identifier: Apache-2.0
#include <cstdlib>
#include <cstring>
#include <optional>

#include <weft/cuda/fence.h>
#include <weft/cuda/flag_pool.h>
#include <weft/cuda/ipc.h>
#include <weft/cuda/memory.h>
#include <weft/cuda/pinned.h>
#include <weft/cuda/poll.h>
#include <weft/cuda/retire.h>
#include <weft/tests/conformance/communicator/cuda_ranks.h>

namespace weft::conformance {

namespace {

// The streams and pools of one rank's test code.
struct Bench {
  explicit Bench(std::shared_ptr<cuda::Device> on)
      : device(std::move(on)), pinned(*device), flags(*device) {
    // The driver loads its own kernels at their first use; the load must not queue behind a gate.
    cuda::PinnedMemory host = pinned.allocate(64);
    const cuda::DeviceMemory memory(copies, 64);
    cuda::fill(copies, memory.slice(), 0);
    cuda::copy(copies, host.slice(), memory.slice());
    cuda::copy(copies, memory.slice(), host.slice());
    finish();
  }
  void finish() const {
    EXPECT_TRUE(cuda::record(copies).synchronize(Deadline::in(std::chrono::seconds(60))));
  }

  std::shared_ptr<cuda::Device> device;
  cuda::Stream copies{*device};
  cuda::Stream gated{*device};
  cuda::PinnedPool pinned;
  cuda::FlagPool flags;
};

class CudaMemory final : public Memory {
 public:
  CudaMemory(std::shared_ptr<Bench> bench, OnDevice kind, std::size_t bytes)
      : bench_(std::move(bench)), host_(bench_->pinned.allocate(bytes)) {
    if (kind == OnDevice::Shareable) {
      shareable_.emplace(*bench_->device, bytes);
    } else {
      pooled_.emplace(bench_->copies, bytes);
    }
    bench_->finish();  // from now on the communicator's streams may use it
  }
  Slice slice() const override { return shareable_ ? shareable_->slice() : pooled_->slice(); }
  void write(const void* from) override {
    if (slice().bytes == 0) return;
    std::memcpy(host_.slice().data, from, slice().bytes);
    cuda::copy(bench_->copies, slice(), host_.slice());
    bench_->finish();
  }
  void read(void* to) override {
    if (slice().bytes == 0) return;
    cuda::copy(bench_->copies, host_.slice(), slice());
    bench_->finish();
    std::memcpy(to, host_.slice().data, slice().bytes);
  }

 private:
  std::shared_ptr<Bench> bench_;
  cuda::PinnedMemory host_;
  std::optional<cuda::DeviceMemory> pooled_;
  std::optional<cuda::ShareableMemory> shareable_;
};

}  // namespace

const Result<std::shared_ptr<const cuda::Driver>>& real_driver() {
  static const auto opened = [] {
    // Each stream of the ranks needs a hardware queue of its own (staged.h), and no kernel may be
    // loaded while a stream waits for a flag.
    setenv("CUDA_DEVICE_MAX_CONNECTIONS", "32", /*overwrite=*/0);
    setenv("CUDA_MODULE_LOADING", "EAGER", /*overwrite=*/0);
    return cuda::Driver::open();
  }();
  return opened;
}

void equip(Rank& rank, const std::shared_ptr<cuda::Device>& device, OnDevice kind) {
  const auto bench = std::make_shared<Bench>(device);
  rank.allocate = [bench, kind](std::size_t bytes) {
    return std::make_shared<CudaMemory>(bench, kind, bytes);
  };
  rank.gate = [bench] {
    const auto flag = bench->flags.make();
    flag->wait(bench->gated);
    return Gate{cuda::record(bench->gated), [flag] { flag->raise(); }};
  };
}

void reclaim(std::shared_ptr<cuda::Device> device) {
  const auto is_last = [&] {
    static_cast<void>(device->retirement().reclaim_all(Deadline::in(std::chrono::seconds(1))));
    return device.use_count() == 1 && device->retirement().pending() == 0;
  };
  EXPECT_TRUE(cuda::poll_until(is_last, Deadline::in(std::chrono::seconds(20))))
      << "something still holds on to " << describe(device->id());
}

}  // namespace weft::conformance
