// SPDX-License-Identifier: Apache-2.0
#include <weft/cuda/fence.h>
#include <weft/cuda/memory.h>
#include <weft/cuda/stream.h>
#include <weft/tests/cuda/fake_cuda.h>

namespace weft::cuda {
namespace {

using testing::ElementsAre;

using Streams = FakeCuda;

TEST_F(Streams, RunEnqueuedWorkInOrder) {
  Stream stream(*device);
  DeviceMemory memory(stream, 4);
  fill(stream, memory.slice(), 1);
  fill(stream, memory.slice(), 2);
  const auto* bytes = static_cast<const unsigned char*>(memory.slice().data);
  EXPECT_FALSE(stream.query());
  EXPECT_TRUE(fake.step(stream));
  EXPECT_TRUE(fake.step(stream));
  EXPECT_EQ(bytes[3], 1);
  EXPECT_TRUE(fake.step(stream));
  EXPECT_EQ(bytes[3], 2);
  EXPECT_FALSE(fake.step(stream));
  EXPECT_TRUE(stream.query());
  EXPECT_THAT(fake.executed(stream),
              ElementsAre("cuMemAllocAsync", "cuMemsetD8Async", "cuMemsetD8Async"));
}

TEST_F(Streams, DestroyedOnesFinishWithoutAWait) {
  Stream longer(*device);
  DeviceMemory memory;
  {
    Stream stream(*device);
    memory = DeviceMemory(stream, 8);
    fill(stream, memory.slice(), 7);
    memory.set_stream(longer);
  }
  EXPECT_EQ(fake.host_blocks(), 0);
  EXPECT_EQ(fake.pending(), 2u);
  fake.run();
  EXPECT_EQ(*static_cast<const unsigned char*>(memory.slice().data), 7);
  EXPECT_EQ(fake.alive().streams, 1u);
}

TEST_F(Streams, MoveAndDestroyTheirHandleOnce) {
  Stream first(*device);
  const CUstream native = first.native();
  Stream second = std::move(first);
  EXPECT_EQ(second.native(), native);
  Stream third(*device, Priority::High);
  third = std::move(second);
  EXPECT_EQ(third.native(), native);
  EXPECT_EQ(fake.alive().streams, 1u);
  EXPECT_EQ(fake.calls(&Driver::stream_destroy), 1);
}

TEST_F(Streams, ViewsCompareByNativeHandle) {
  Stream stream(*device);
  const StreamRef view = stream;
  EXPECT_EQ(view, StreamRef(*device, stream.native()));
  EXPECT_FALSE(view == StreamRef(*device, nullptr));
}

// libtorch's current stream is the legacy default stream unless the user chose another.
TEST_F(Streams, CanViewTheLegacyDefaultStream) {
  const StreamRef legacy(*device, nullptr);
  Stream stream(*device);
  const Fence ready = record(legacy);
  fake.hold(legacy);
  ready.wait(stream);
  EXPECT_EQ(fake.run(), 0u);
  fake.release(legacy);
  fake.run();
  EXPECT_TRUE(ready.query());
}

class StreamsOfTwo : public FakeCuda {
 protected:
  StreamsOfTwo() : FakeCuda({.devices = 2}) {}
};

TEST_F(StreamsOfTwo, SetTheirOwnDevice) {
  auto other = Device::open(fake.driver(), 1);
  Stream stream(*other);
  DeviceGuard guard(*device);
  // The fake refuses a call that is made under another context, and complains.
  EXPECT_TRUE(stream.query());
  const Fence fence = record(stream);
  fence.wait(StreamRef(*device, nullptr));
  EXPECT_FALSE(fence.query());
  fake.run();
  EXPECT_TRUE(fence.query());
}

}  // namespace
}  // namespace weft::cuda
