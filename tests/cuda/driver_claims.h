// SPDX-License-Identifier: Apache-2.0
// Claims about a CUDA driver, tested on the real one (driver_claims_gpu.cc) and on the fake with
// threads (driver_claims_fake.cc). The other tests may rely on behaviour that passes on both.
//
// A stream is held back by a gate: a flag that the host has not raised yet. A call that made the
// host wait while a gate is closed would hang the test, so passing proves that none does.
#pragma once

#include <cstring>
#include <memory>
#include <ostream>
#include <span>

#include <gtest/gtest.h>

#include <weft/base/result.h>
#include <weft/cuda/fence.h>
#include <weft/cuda/flag_pool.h>
#include <weft/cuda/memory.h>
#include <weft/cuda/pinned.h>
#include <weft/cuda/retire.h>

namespace weft::cuda {

inline constexpr std::size_t kWords = 1 << 16;
inline constexpr std::size_t kBytes = kWords * sizeof(std::uint32_t);

// Calls that a program makes around Weft to capture and launch graphs.
class Graphs {
 public:
  virtual ~Graphs() = default;
  virtual CUresult begin(
      const StreamRef& stream) = 0;  // in the driver's default mode, the strictest
  // Ends the capture and makes it the graph that launch() launches.
  virtual CUresult end(const StreamRef& stream) = 0;
  virtual CUresult launch(const StreamRef& stream) = 0;
  // Drops the fake's complaints about calls that the test expected to be refused.
  virtual void forgive() {}
};

// The driver under test. If open() fails, its error is the reason to skip.
struct DriverSource {
  const char* name;
  Result<std::shared_ptr<const Driver>> (*open)();
  std::unique_ptr<Graphs> (*graphs)();  // for the driver that open() returned last
  friend std::ostream& operator<<(std::ostream& out, const DriverSource& source) {
    return out << source.name;
  }
};

class DriverClaims : public testing::TestWithParam<DriverSource> {
 protected:
  void SetUp() override {
    auto opened = GetParam().open();
    if (!opened.ok()) GTEST_SKIP() << "no GPU: " << opened.error().text();
    driver = opened.value();
    graphs = GetParam().graphs();
    device = Device::open(driver, 0);
    pool = std::make_unique<PinnedPool>(*device);
    flags = std::make_unique<FlagPool>(*device);
    host = pool->allocate(kBytes);  // pinning may wait for the device, so it precedes any gate
    std::memset(host.slice().data, 0, kBytes);
    warm_up();
  }

  void TearDown() override {
    if (!device) return;
    graphs.reset();
    host = PinnedMemory();
    pool.reset();
    flags.reset();
    EXPECT_TRUE(device->retirement().reclaim_all(soon()));
    EXPECT_EQ(device->retirement().pending(), 0u);
    EXPECT_FALSE(device->lost());
  }

  // Makes the driver load its own kernels, which it does at their first use.
  void warm_up() {
    Stream stream(*device);
    const DeviceMemory memory(stream, kBytes);
    fill(stream, memory.slice(), 0);
    copy(stream, host.slice(), memory.slice());
    ASSERT_TRUE(record(stream).synchronize(soon()));
  }

  static Deadline soon() { return Deadline::in(std::chrono::seconds(30)); }

  // Holds the stream back until the flag is raised.
  std::shared_ptr<MappedFlag> gate(const StreamRef& stream) {
    auto flag = flags->make();
    flag->wait(stream);
    return flag;
  }
  std::span<const std::uint32_t> words() const {
    return {static_cast<const std::uint32_t*>(host.slice().data), kWords};
  }

  std::shared_ptr<const Driver> driver;
  std::unique_ptr<Graphs> graphs;
  std::shared_ptr<Device> device;
  std::unique_ptr<PinnedPool> pool;
  std::unique_ptr<FlagPool> flags;
  PinnedMemory host;
};

}  // namespace weft::cuda
