// SPDX-License-Identifier: Apache-2.0
// A small collective allocates its Op only, and nothing at all if it ends within its call. This is
// a program of its own, because it counts what operator new allocates.
#include <cstdlib>
#include <functional>
#include <new>

#include <gtest/gtest.h>

#include <weft/transport/mesh/mesh_communicator.h>

namespace {
thread_local std::size_t allocations = 0;  // of the current thread
}

[[gnu::noinline]] void* operator new(std::size_t bytes) {
  ++allocations;
  if (void* memory = std::malloc(bytes == 0 ? 1 : bytes)) return memory;
  throw std::bad_alloc();
}
[[gnu::noinline]] void operator delete(void* memory) noexcept { std::free(memory); }
[[gnu::noinline]] void operator delete(void* memory, std::size_t) noexcept { std::free(memory); }

namespace weft::transport::mesh {
namespace {

// A connection whose sends end at once.
class Swallowing final : public Connection {
 public:
  std::string_view transport() const override { return "swallowing"; }
  std::string peer() const override { return "nobody"; }
  const Capabilities& capabilities() const override { return capabilities_; }
  void receive(Handlers) override {}
  Op send(std::span<const std::byte>, std::span<const Slice>, Pin, Fence) noexcept override {
    return Op();
  }
  Op accept(std::span<const Slice>, Pin, Fence) noexcept override { return Op(); }
  void close(const Error&) noexcept override {}

 private:
  Capabilities capabilities_;
};

// Rank 0 of three.
class MeshCost : public testing::Test {
 protected:
  MeshCost() {
    for (const int peer : {1, 2}) {
      for (const Traffic traffic : {Traffic::Collectives, Traffic::Messages}) {
        core_->post(event::Adopted{peer, traffic, std::make_shared<Swallowing>()});
      }
    }
  }

  Op all_reduce() {
    number_ = 1;
    return communicator_.all_reduce(number(), ReduceOp::Sum, pin_, Fence());
  }
  // Delivers the parts that the other ranks send in the next all_reduce.
  void others_come() {
    header_.call = {Kind::AllReduce, Dtype::Float32, ReduceOp::Sum, 0, 4};
    const auto bytes = encode(header_);
    for (const int peer : {2, 1}) {  // the part of rank 2 waits until that of rank 1 is added
      core_->arrived(
          peer, Traffic::Collectives,
          {bytes, {&kSize, 1}, {reinterpret_cast<const std::byte*>(&kTheirs), sizeof kTheirs}});
    }
    ++header_.sequence;
  }
  Elements number() { return {{&number_, 4, Device::host()}, Dtype::Float32}; }

  static constexpr float kTheirs = 2;
  static constexpr std::uint64_t kSize = 4;
  static JoinOptions options() {
    JoinOptions options;
    options.size = 3;
    options.timeout = std::chrono::hours(1);
    options.loop = std::make_shared<EventLoop>("test");
    return options;
  }
  const std::shared_ptr<Core> core_ = std::make_shared<Core>(options(), "swallowing");
  MeshCommunicator communicator_{core_};
  const Pin pin_ = std::make_shared<int>(0);
  float number_ = 1;
  Header header_;
};

constexpr std::size_t kCalls = 1000;

// Counts the allocations of kCalls calls, after a warm-up in which every buffer reaches its size.
std::size_t allocations_of(const std::function<bool()>& call) {
  for (int i = 0; i < 100; ++i) {
    if (!call()) ADD_FAILURE() << "call " << i;
  }
  const std::size_t before = allocations;
  bool all_right = true;
  for (std::size_t i = 0; i < kCalls; ++i) all_right &= call();
  const std::size_t count = allocations - before;
  EXPECT_TRUE(all_right);
  return count;
}

TEST_F(MeshCost, SmallAllReduceAllocatesOnlyItsOp) {
  const std::size_t count = allocations_of([&] {
    const Op op = all_reduce();
    const bool waits = !op.ended();
    others_come();
    return waits && op.ended() && !op.error() && number_ == 5;
  });
  // The Op's flag and state; now and then a block of a queue.
  EXPECT_LE(count, kCalls * 2 + kCalls / 32);
  EXPECT_EQ(pin_.use_count(), 1);
}

TEST_F(MeshCost, LastRankAllocatesNothing) {
  const std::size_t count = allocations_of([&] {
    others_come();
    const Op op = all_reduce();
    return op.ended() && !op.error() && number_ == 5;
  });
  EXPECT_LE(count, kCalls / 32);
  EXPECT_EQ(pin_.use_count(), 1);
}

TEST_F(MeshCost, BroadcastRootAllocatesNothing) {
  const std::size_t count = allocations_of([&] {
    const Op op = communicator_.broadcast(number(), 0, pin_, Fence());
    return op.ended() && !op.error();
  });
  EXPECT_LE(count, kCalls / 32);
  EXPECT_EQ(pin_.use_count(), 1);
}

TEST_F(MeshCost, FailureInTheCallSaysWhy) {
  header_.call = {Kind::AllReduce, Dtype::Float32, ReduceOp::Max, 0, 4};
  const auto bytes = encode(header_);
  core_->arrived(
      1, Traffic::Collectives,
      {bytes, {&kSize, 1}, {reinterpret_cast<const std::byte*>(&kTheirs), sizeof kTheirs}});
  const Op op = all_reduce();
  ASSERT_TRUE(op.ended());
  ASSERT_TRUE(op.error());
  EXPECT_EQ(op.error()->blame(), Blame::Caller);
  EXPECT_NE(op.error()->text().find("all ranks must call the same operations"), std::string::npos)
      << op.error()->text();
  const Op next = all_reduce();
  ASSERT_TRUE(next.ended() && next.error());
  EXPECT_EQ(next.error()->text(), op.error()->text());
}

}  // namespace
}  // namespace weft::transport::mesh
