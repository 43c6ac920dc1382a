// SPDX-License-Identifier: Apache-2.0
// Tests the design's ordering rules on a minimal transport. A data call (Slice, Pin, Fence ready)
// -> Op runs on a communication stream of its own, and host code ("the network") in the middle
// finishes it.
#include <cstring>
#include <deque>
#include <thread>

#include <weft/base/op.h>
#include <weft/cuda/fence.h>
#include <weft/cuda/flag_pool.h>
#include <weft/cuda/memory.h>
#include <weft/cuda/pinned.h>
#include <weft/tests/cuda/fake_cuda.h>

namespace weft::cuda {
namespace {

// Sends device memory "to a peer", which is another device buffer. The stream copies it to pinned
// memory, the host forwards it by raising a flag, and the stream then copies it to the destination.
class Wire {
 public:
  explicit Wire(Device& device) : stream_(device), pool_(device), flags_(device) {}

  // Never blocks. done() passes when `to` has the bytes or the call has failed.
  Op send(Slice to, Slice from, Pin pin, const Fence& ready) {
    auto staging = std::make_shared<PinnedMemory>(pool_.allocate(from.bytes));
    auto keep =
        std::make_shared<std::pair<Pin, std::shared_ptr<PinnedMemory>>>(std::move(pin), staging);
    ready.wait(stream_);
    copy(stream_, staging->slice(), from);
    Hop hop{record(stream_), flags_.make(), Completion(Pin()), std::nullopt};
    hop.arrived->wait(stream_);
    copy(stream_, to, staging->slice());
    hop.completion = Completion(std::move(keep), record(stream_));
    const Op op = hop.completion.op();
    hops_.push_back(std::move(hop));
    return op;
  }

  // Runs the network once: forwards the bytes that have left the device, or fails them. True if
  // anything moved.
  bool poll(const std::optional<Error>& failure = std::nullopt) {
    bool moved = false;
    for (Hop& hop : hops_) {
      if (!hop.arrived->query() && (failure || hop.left.query())) {
        hop.failure = failure;
        hop.arrived->raise();  // also after a failure: the stream must go on
        moved = true;
      }
    }
    while (!hops_.empty() && hops_.front().completion.op().done().query()) {
      Hop& hop = hops_.front();
      const auto lost = stream_.device().lost();
      if (lost || hop.failure) {
        hop.completion.fail(lost ? *lost : *hop.failure);
      } else {
        hop.completion.finish();
      }
      hops_.pop_front();
      moved = true;
    }
    return moved;
  }

  const Stream& stream() const { return stream_; }

 private:
  struct Hop {
    Fence left;
    std::shared_ptr<MappedFlag> arrived;
    Completion completion;
    std::optional<Error> failure;
  };
  Stream stream_;
  PinnedPool pool_;
  FlagPool flags_;
  std::deque<Hop> hops_;
};

class Ordering : public FakeCuda {
 protected:
  explicit Ordering(harness::FakeDriver::Options options = {}) : FakeCuda(options) {}

  void SetUp() override {
    source = std::make_shared<DeviceMemory>(compute, 64);
    target = std::make_shared<DeviceMemory>(compute, 64);
    // The first send allocates the pools' first slabs, which may block.
    settle(wire.send(target->slice(), source->slice(), nullptr, record(compute)));
    blocks = fake.host_blocks();
  }
  // Lets streams and network take turns until the Op is done.
  virtual void settle(const Op& op) {
    while (!op.done().query()) {
      if (fake.run() == 0 && !wire.poll()) FAIL() << "nothing moves any more";
    }
    wire.poll();
  }
  unsigned char first_byte(const std::shared_ptr<DeviceMemory>& memory) {
    return *static_cast<const unsigned char*>(memory->slice().data);
  }

  Stream compute{*device};
  Wire wire{*device};
  std::shared_ptr<DeviceMemory> source;
  std::shared_ptr<DeviceMemory> target;
  int blocks = 0;
};

TEST_F(Ordering, StreamReadsOnlyAfterTheFence) {
  fill(compute, source->slice(), 1);
  const Op op = wire.send(target->slice(), source->slice(), source, record(compute));
  EXPECT_EQ(fake.run(wire.stream()), 0u) << "the bytes are not ready";
  fake.run(compute);
  settle(op);
  EXPECT_EQ(first_byte(target), 1);
  EXPECT_FALSE(op.error());
}

TEST_F(Ordering, LaterWorkIsNotWaitedFor) {
  fill(compute, source->slice(), 1);
  const Fence ready = record(compute);
  const Op op = wire.send(target->slice(), source->slice(), source, ready);
  fill(compute, source->slice(), 2);
  fake.step(compute);
  fake.step(compute);
  EXPECT_TRUE(ready.query());
  EXPECT_GT(fake.run(wire.stream()), 0u);
  EXPECT_TRUE(wire.poll());
  fake.run(wire.stream());
  EXPECT_EQ(first_byte(target), 1);
  settle(op);
  fake.run();
}

TEST_F(Ordering, OnlyTheConsumerWaitsForTheOp) {
  fill(compute, source->slice(), 3);
  const Op op = wire.send(target->slice(), source->slice(), source, record(compute));
  const auto result = std::make_shared<DeviceMemory>(compute, 64);
  op.done().wait(compute);
  copy(compute, result->slice(), target->slice());  // as the optimizer would
  settle(op);
  fake.run();
  EXPECT_EQ(first_byte(result), 3);
  EXPECT_EQ(fake.host_blocks(), blocks) << "some call made the host wait";
  EXPECT_EQ(fake.calls(&Driver::stream_synchronize), 0);
  EXPECT_EQ(fake.calls(&Driver::event_synchronize), 0);
  EXPECT_EQ(fake.calls(&Driver::ctx_synchronize), 0);
}

TEST_F(Ordering, PinIsHeldUntilTheOpIsDone) {
  fill(compute, source->slice(), 4);
  const std::weak_ptr<DeviceMemory> watch = source;
  const Slice from = source->slice();
  const Op op = wire.send(target->slice(), from, std::move(source), record(compute));
  EXPECT_FALSE(watch.expired()) << "the caller has dropped its memory";
  fake.run();
  EXPECT_FALSE(watch.expired()) << "the bytes have left, but the Op is not done";
  settle(op);
  EXPECT_TRUE(watch.expired());
  EXPECT_EQ(first_byte(target), 4);
  fake.run();
  EXPECT_EQ(fake.alive().device_allocations, 1u) << "freed once, in the order of its stream";
}

TEST_F(Ordering, FailedOpReleasesTheStream) {
  const std::weak_ptr<DeviceMemory> watch = source;
  const Slice from = source->slice();
  const Op lost = wire.send(target->slice(), from, std::move(source), record(compute));
  const auto other = std::make_shared<DeviceMemory>(compute, 64);
  fill(compute, other->slice(), 5);
  const Op queued = wire.send(target->slice(), other->slice(), other, record(compute));
  lost.done().wait(compute);
  fill(compute, other->slice(), 6);
  fake.run();
  EXPECT_FALSE(lost.done().query());
  EXPECT_TRUE(wire.poll(Error(Blame::PeerLost, "rank 1 is lost")));
  fake.run();
  wire.poll();
  ASSERT_TRUE(lost.done().query());
  EXPECT_EQ(lost.error()->blame(), Blame::PeerLost);
  EXPECT_EQ(queued.error()->blame(), Blame::PeerLost);
  EXPECT_TRUE(watch.expired());
  fake.run();
  EXPECT_EQ(fake.pending(), 0u) << "no stream hangs on a dead peer";
  EXPECT_EQ(fake.host_blocks(), blocks);
}

TEST_F(Ordering, LostDeviceFailsTheOp) {
  const Op op = wire.send(target->slice(), source->slice(), source, record(compute));
  fake.lose_context(0);
  wire.poll();
  EXPECT_TRUE(op.done().query());
  ASSERT_TRUE(op.error());
  EXPECT_EQ(op.error()->blame(), Blame::Device);
  take_logged();
}

TEST_F(Ordering, DestructorsDoNotBlock) {
  {
    Wire another(*device);
    Stream stream(*device);
    const auto memory = std::make_shared<DeviceMemory>(stream, 64);
    blocks = fake.host_blocks();
    memory->set_stream(compute);
    record(stream).wait(compute);
  }
  EXPECT_EQ(fake.host_blocks(), blocks);
  fake.run();
}

// The same with real threads: one for each stream, and the caller's, which runs the network.
class ThreadedOrdering : public Ordering {
 protected:
  ThreadedOrdering() : Ordering({.threads = true}) {}
  void settle(const Op& op) override {
    while (!op.done().query()) wire.poll();
    wire.poll();
  }
};

TEST_F(ThreadedOrdering, ManyOpsArriveWholeAndInOrder) {
  constexpr int kRounds = 100;
  std::vector<Op> ops;
  std::vector<std::shared_ptr<DeviceMemory>> results;
  for (int round = 0; round < kRounds; ++round) {
    const auto from = std::make_shared<DeviceMemory>(compute, 4096);
    results.push_back(std::make_shared<DeviceMemory>(compute, 4096));
    fill(compute, from->slice(), static_cast<unsigned char>(round));
    ops.push_back(wire.send(results.back()->slice(), from->slice(), from, record(compute)));
    wire.poll();
  }
  for (const Op& op : ops) settle(op);
  for (int round = 0; round < kRounds; ++round) {
    const auto* bytes =
        static_cast<const unsigned char*>(results[static_cast<std::size_t>(round)]->slice().data);
    EXPECT_EQ(bytes[0], round);
    EXPECT_EQ(bytes[4095], round);
  }
}

}  // namespace
}  // namespace weft::cuda
