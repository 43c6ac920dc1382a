// SPDX-License-Identifier: Apache-2.0
// Both ends of a cuda_ipc connection on a fake GPU, in one process that plays two.
#pragma once

#include <array>
#include <cstring>
#include <memory>
#include <string>

#include <weft/cuda/fence.h>
#include <weft/cuda/flag_pool.h>
#include <weft/cuda/ipc.h>
#include <weft/cuda/memory.h>
#include <weft/cuda/retire.h>
#include <weft/tests/cuda/fake_cuda.h>
#include <weft/tests/harness/mail.h>
#include <weft/transport/cuda_ipc/cuda_ipc.h>
#include <weft/transport/inproc/faults.h>
#include <weft/transport/staged/staged_connection.h>
#include <weft/transport/staged/staged_frame.h>
#include <weft/transport/stream/stream_connection.h>

namespace weft::transport::cuda_ipc {

using harness::bytes_of;
using harness::expect_good;
using harness::failure_of;
using harness::Letter;
using harness::Mailbox;
using harness::patience;
using harness::pattern;
using harness::slice_of;
using testing::HasSubstr;

class Lanes : public cuda::FakeCuda {
 protected:
  explicit Lanes(harness::FakeDriver::Options options = {.threads = true, .is_two_processes = true})
      : FakeCuda(options) {}

  // Makes both ends over inproc; `below` may wrap each inproc connection first (in staged::over(),
  // say).
  using Below = std::function<std::shared_ptr<Connection>(std::shared_ptr<Connection>,
                                                          const std::shared_ptr<EventLoop>&)>;
  void open(const Below& below = {}) {
    auto streams = inproc::make_streams(64 << 10);
    std::shared_ptr<Connection> a =
        connect_over(std::move(streams.a), inproc::capabilities(), "inproc", near_loop);
    std::shared_ptr<Connection> b =
        connect_over(std::move(streams.b), inproc::capabilities(), "inproc", far_loop);
    if (below) a = below(std::move(a), near_loop);
    if (below) b = below(std::move(b), far_loop);
    near = over(std::move(a), stage, near_loop, here);
    far = over(std::move(b), stage, far_loop, there);
  }
  // Receives on the far end; the test accepts every message itself.
  void receive() {
    far->receive({[kept = arrived](const Arrival& arrival) {
                    std::lock_guard lock(kept->mutex);
                    kept->headers.emplace_back(reinterpret_cast<const char*>(arrival.header.data()),
                                               arrival.header.size());
                    kept->sizes.assign(arrival.sizes.begin(), arrival.sizes.end());
                  },
                  [](const Error&) {}});
  }
  std::string next() {
    const auto count = [this] {
      std::lock_guard lock(arrived->mutex);
      return arrived->headers.size();
    };
    EXPECT_TRUE(far_loop->drive([&] { return count() > seen; }, patience())) << "nothing arrives";
    std::lock_guard lock(arrived->mutex);
    return seen < arrived->headers.size() ? arrived->headers[seen++] : "";
  }

  std::shared_ptr<cuda::ShareableMemory> shareable(std::size_t bytes, std::uint32_t seed = 0) {
    auto memory = std::make_shared<cuda::ShareableMemory>(*device, bytes);
    write(memory->slice(), pattern(seed, bytes));
    return memory;
  }
  static void write(const Slice& slice, const std::vector<std::byte>& bytes) {
    if (!bytes.empty()) std::memcpy(slice.data, bytes.data(), bytes.size());
  }
  static std::vector<std::byte> read(const Slice& slice) {
    const auto* const data = static_cast<const std::byte*>(slice.data);
    return {data, data + slice.bytes};
  }

  void TearDown() override {
    near.reset();
    far.reset();
    near_loop.reset();
    far_loop.reset();
    stage.reset();
    EXPECT_TRUE(device->retirement().reclaim_all(patience()));
    FakeCuda::TearDown();
  }

  struct Kept {
    std::mutex mutex;
    std::vector<std::string> headers;
    std::vector<std::uint64_t> sizes;
  };
  Identity here = Identity::here();
  Identity there = [] {
    Identity identity = Identity::here();
    ++identity.started;
    return identity;
  }();
  cuda::Stream stream{*device};
  std::shared_ptr<staged::Stage> stage = std::make_shared<staged::Stage>(std::vector{device});
  std::shared_ptr<EventLoop> near_loop = std::make_shared<EventLoop>("near");
  std::shared_ptr<EventLoop> far_loop = std::make_shared<EventLoop>("far");
  std::shared_ptr<Connection> near;
  std::shared_ptr<Connection> far;
  std::shared_ptr<Kept> arrived = std::make_shared<Kept>();
  std::size_t seen = 0;
};

// The far end uses a second GPU only.
template <class Fixture>
class OfTwoGpus : public Fixture {
 protected:
  explicit OfTwoGpus(harness::FakeDriver::Options options) : Fixture(options) {}

  void open_apart() {
    auto streams = inproc::make_streams(64 << 10);
    const auto lane = [](auto bytes, const std::shared_ptr<EventLoop>& loop) {
      return connect_over(std::move(bytes), inproc::capabilities(), "inproc", loop);
    };
    this->near =
        over(lane(std::move(streams.a), this->near_loop), this->stage, this->near_loop, this->here);
    this->far =
        over(lane(std::move(streams.b), this->far_loop), other_stage, this->far_loop, this->there);
  }
  void TearDown() override {
    this->near.reset();
    this->far.reset();
    this->near_loop.reset();
    this->far_loop.reset();
    other_stage.reset();
    EXPECT_TRUE(other->retirement().reclaim_all(patience()));
    other.reset();
    Fixture::TearDown();
  }

  std::shared_ptr<cuda::Device> other = cuda::Device::open(this->fake.driver(), 1);
  std::shared_ptr<staged::Stage> other_stage = std::make_shared<staged::Stage>(std::vector{other});
};

}  // namespace weft::transport::cuda_ipc
