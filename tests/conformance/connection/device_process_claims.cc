// SPDX-License-Identifier: Apache-2.0
// Device memory between two processes, each with a driver of its own: connections through pinned
// memory, on fake GPUs.
#include <array>

#include <weft/cuda/fence.h>
#include <weft/tests/conformance/communicator/cuda_ranks.h>
#include <weft/tests/conformance/connection/far.h>
#include <weft/tests/conformance/connection/staged_pairs.h>

namespace weft::conformance {
namespace {

// The GPU of one end, and helpers for the test there.
class Side {
 public:
  explicit Side(const std::shared_ptr<transport::Transport>& transport)
      : device_(std::dynamic_pointer_cast<StagedTransport>(transport)->device()) {
    equip(bench, device_);
  }
  std::shared_ptr<Memory> on_device(const std::vector<std::byte>& bytes) const {
    auto memory = bench.allocate(bytes.size());
    memory->write(bytes.data());
    return memory;
  }
  bool holds(Memory& memory, const std::vector<std::byte>& expected) const {
    std::vector<std::byte> bytes(memory.slice().bytes);
    memory.read(bytes.data());
    return same(bytes, expected);
  }
  cuda::Device& device() const { return *device_; }

  Rank bench;

 private:
  std::shared_ptr<cuda::Device> device_;
};

// Counts the messages that reach one end; take() accepts the next one.
class Inlet {
 public:
  Inlet(Connection& connection, std::shared_ptr<EventLoop> loop)
      : connection_(connection), loop_(std::move(loop)) {
    connection_.receive({[come = come_](const Arrival&) { ++*come; }, [](const Error&) {}});
  }
  Op take(const std::shared_ptr<Memory>& to, Fence ready = {}) {
    ++taken_;
    EXPECT_TRUE(loop_->drive([this] { return *come_ >= taken_; }, patience())) << "nothing arrives";
    return connection_.accept(std::array{to->slice()}, to, std::move(ready));
  }

 private:
  Connection& connection_;
  const std::shared_ptr<EventLoop> loop_;
  const std::shared_ptr<std::atomic<int>> come_ = std::make_shared<std::atomic<int>>(0);
  int taken_ = 0;
};

using DeviceProcessClaims = ConnectionProcessClaims;

TEST_P(DeviceProcessClaims, EchoDeviceMemoryOfAllSizes) {
  constexpr std::array<std::size_t, 6> kSizes{0, 1, 65'537, 512u << 10, (5u << 20) + 13, 3};
  const bool is_started = start([&](Far& far) {
    const Side side(far.transport);
    Inlet inlet(*far.connection, far.loop);
    for (const std::size_t bytes : kSizes) {
      const auto memory = side.bench.allocate(bytes);
      const Op taken = inlet.take(memory);
      // No host thread waits for the received bytes before they are sent back.
      expect_good(far.connection->send({}, std::array{memory->slice()}, memory, taken.done()));
      expect_good(taken);
    }
    far.wait_for_word();
  });
  if (!is_started) return;
  {
    const Side side(transport);
    Inlet inlet(*near, loop);
    std::uint32_t round = 0;
    for (const std::size_t bytes : kSizes) {
      const auto payload = pattern(++round, bytes);
      const auto from = side.on_device(payload), back = side.bench.allocate(bytes);
      const Op sent = near->send({}, std::array{from->slice()}, from, {});
      expect_good(inlet.take(back));
      expect_good(sent);
      EXPECT_TRUE(side.holds(*back, payload)) << bytes;
    }
  }
  child->say("enough");
  child->expect_success();
}

// Each process orders its memory by its own streams.
TEST_P(DeviceProcessClaims, MemoryIsUsedOnlyAfterTheStreams) {
  constexpr std::size_t kBytes = 3 << 20;
  const bool is_started = start([&](Far& far) {
    const Side side(far.transport);
    Inlet inlet(*far.connection, far.loop);
    const auto before = pattern(7, kBytes);
    const auto to = side.on_device(before);
    const Gate gate = side.bench.gate();
    const Op taken = inlet.take(to, gate.fence);
    EXPECT_TRUE(side.holds(*to, before));
    gate.open();
    expect_good(taken);
    EXPECT_TRUE(side.holds(*to, pattern(2, kBytes)));
    far.wire.say("it is there");
    far.wait_for_word();
  });
  if (!is_started) return;
  {
    const Side side(transport);
    const auto from = side.on_device(pattern(1, kBytes));
    const Gate gate = side.bench.gate();
    const Op sent = near->send({}, std::array{from->slice()}, from, gate.fence);
    for (int turn = 0; turn < 10; ++turn) flush(*loop);
    EXPECT_FALSE(sent.ended());
    from->write(pattern(2, kBytes).data());
    gate.open();
    EXPECT_EQ(child->hear(), "it is there");
    expect_good(sent);
  }
  child->say("enough");
  child->expect_success();
}

TEST_P(DeviceProcessClaims, KilledPeerFailsOpsAndHangsNoStream) {
  constexpr std::size_t kBytes = 64 << 20;
  const bool is_started = start([&](Far& far) {
    const Side side(far.transport);
    const auto from = side.on_device(pattern(1, kBytes));
    const Op sent = far.connection->send({}, std::array{from->slice()}, from, {});
    far.wait_for_word();
  });
  if (!is_started) return;
  const Side side(transport);
  Inlet inlet(*near, loop);
  const auto to = side.bench.allocate(kBytes), from = side.on_device(pattern(2, kBytes));
  const Gate gate = side.bench.gate();  // so that the accept does not end before the peer is killed
  const Op taken = inlet.take(to, gate.fence);
  const Op stuck = near->send({}, std::array{from->slice()}, from, {});
  cuda::Stream stream(side.device());
  taken.done().wait(stream);
  stuck.done().wait(stream);
  const Fence behind = cuda::record(stream);
  child->kill();
  EXPECT_EQ(failure_of(stuck).blame(), Blame::PeerLost);
  gate.open();
  EXPECT_EQ(failure_of(taken).blame(), Blame::PeerLost);
  EXPECT_TRUE(behind.synchronize(patience())) << "a stream hangs on a failed operation";
}

INSTANTIATE_TEST_SUITE_P(Transport, DeviceProcessClaims, testing::ValuesIn(connecting_backends()),
                         [](const auto& one) { return one.param; });
GTEST_ALLOW_UNINSTANTIATED_PARAMETERIZED_TEST(DeviceProcessClaims);

}  // namespace
}  // namespace weft::conformance
