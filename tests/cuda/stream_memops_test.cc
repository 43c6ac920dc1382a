// SPDX-License-Identifier: Apache-2.0
#include <weft/cuda/memory.h>
#include <weft/cuda/pinned.h>
#include <weft/cuda/stream_memops.h>
#include <weft/tests/cuda/fake_cuda.h>

namespace weft::cuda {
namespace {

using testing::AllOf;
using testing::HasSubstr;

class MemOps : public FakeCuda {
 protected:
  explicit MemOps(harness::FakeDriver::Options options = {}) : FakeCuda(options) {
    memory = pool.allocate(64);
    word() = 0;
  }
  std::uint32_t& word(std::size_t index = 0) {
    return static_cast<std::uint32_t*>(memory.slice().data)[index];
  }
  CUdeviceptr address(std::size_t index = 0) const { return memory.address() + 4 * index; }
  void TearDown() override {
    memory = PinnedMemory();
    FakeCuda::TearDown();
  }

  Stream stream{*device};
  PinnedPool pool{*device};
  PinnedMemory memory;
};

TEST_F(MemOps, WaitHoldsUntilTheWordCompares) {
  wait_value(stream, address(), 5);
  word() = 4;
  EXPECT_FALSE(fake.step(stream));
  word() = 5;
  EXPECT_TRUE(fake.step(stream));
}

TEST_F(MemOps, DefaultCompareIsCyclic) {
  word() = 7;
  wait_value(stream, address(), 5);
  EXPECT_TRUE(fake.step(stream)) << "a later value of a counter satisfies an earlier wait";
  word() = 1;
  wait_value(stream, address(), 0xffffffff);
  EXPECT_TRUE(fake.step(stream)) << "also across the wrap";
  word() = 0xffffffff;
  wait_value(stream, address(), 1);
  EXPECT_FALSE(fake.step(stream));
  word() = 1;
  EXPECT_TRUE(fake.step(stream));
}

TEST_F(MemOps, EqualAndAnyBitCompareCorrectly) {
  word() = 7;
  wait_value(stream, address(), 5, Compare::Equal);
  EXPECT_FALSE(fake.step(stream));
  word() = 5;
  EXPECT_TRUE(fake.step(stream));
  wait_value(stream, address(), 0b1010, Compare::AnyBit);
  EXPECT_FALSE(fake.step(stream));
  word() = 0b0010;
  EXPECT_TRUE(fake.step(stream));
}

TEST_F(MemOps, WriteRunsInStreamOrder) {
  fake.hold(stream);
  write_value(stream, address(), 3);
  EXPECT_EQ(word(), 0u);
  fake.release(stream);
  fake.run();
  EXPECT_EQ(word(), 3u);
}

TEST_F(MemOps, OneStreamReleasesAnother) {
  Stream other(*device);
  wait_value(other, address(), 1);
  EXPECT_FALSE(fake.step(other));
  write_value(stream, address(), 1);
  fake.run(stream);
  EXPECT_TRUE(fake.step(other));
}

TEST_F(MemOps, BatchesOver255AreSplitInOrder) {
  MemOpBatch batch;
  for (std::uint32_t i = 1; i <= 300; ++i) {
    batch.write(address(), i);
    batch.wait(address(), i, Compare::Equal);
  }
  EXPECT_EQ(batch.size(), 600u);
  batch.submit(stream);
  EXPECT_EQ(fake.calls(&Driver::stream_batch_mem_op), 3);
  EXPECT_EQ(fake.pending(stream), 600u);
  // Each wait is satisfied by the write before it only if nothing was lost or reordered at the
  // seams.
  EXPECT_EQ(fake.run(stream), 600u);
  EXPECT_EQ(word(), 300u);
}

TEST_F(MemOps, BatchUpTo255IsAtMostOneCall) {
  MemOpBatch batch;
  batch.submit(stream);
  EXPECT_EQ(fake.calls(&Driver::stream_batch_mem_op), 0);
  for (std::uint32_t i = 0; i < 255; ++i) batch.write(address(), i);
  batch.submit(stream);
  batch.submit(stream);
  EXPECT_EQ(fake.calls(&Driver::stream_batch_mem_op), 2);
  fake.run();
}

TEST_F(MemOps, FailedBatchSaysHowMuchIsEnqueued) {
  MemOpBatch batch;
  for (std::uint32_t i = 0; i < 300; ++i) batch.write(address(), i);
  fake.fail(&Driver::stream_batch_mem_op, CUDA_ERROR_OUT_OF_MEMORY, 2);
  const Error error = error_from([&] { batch.submit(stream); });
  EXPECT_EQ(error.blame(), Blame::Busy);
  EXPECT_THAT(error.text(), HasSubstr("255 of 300 are enqueued"));
  EXPECT_EQ(fake.run(), 255u);
}

TEST_F(MemOps, UnalignedWordIsACallerError) {
  EXPECT_EQ(error_from([&] { wait_value(stream, address() + 2, 1); }).blame(), Blame::Caller);
  fake.take_complaints();
}

class NoMemOps : public MemOps {
 protected:
  NoMemOps() : MemOps({.stream_mem_ops = false}) {}
};

TEST_F(NoMemOps, UnsupportedErrorSaysWhatToUse) {
  MemOpBatch batch;
  batch.wait(address(), 1);
  for (const Error& error : {error_from([&] { wait_value(stream, address(), 1); }),
                             error_from([&] { write_value(stream, address(), 1); }),
                             error_from([&] { batch.submit(stream); })}) {
    EXPECT_EQ(error.blame(), Blame::Unsupported);
    EXPECT_THAT(error.text(), AllOf(HasSubstr("cuda:0 (fake GPU) has no stream memory operations"),
                                    HasSubstr("events")));
  }
}

class NoFlush : public MemOps {
 protected:
  NoFlush() : MemOps({.flush_remote_writes = false}) {}
};

TEST_F(NoFlush, IsRefusedBeforeTheDriverCall) {
  MemOpBatch batch;
  batch.wait(address(), 1, Compare::GreaterOrEqual, Flush::RemoteWrites);
  EXPECT_EQ(error_from([&] { batch.submit(stream); }).blame(), Blame::Unsupported);
  EXPECT_EQ(error_from([&] {
              wait_value(stream, address(), 1, Compare::Equal, Flush::RemoteWrites);
            }).blame(),
            Blame::Unsupported);
  EXPECT_EQ(fake.calls(&Driver::stream_wait_value32) + fake.calls(&Driver::stream_batch_mem_op), 0);
}

TEST_F(MemOps, FlushIsPassedToTheDriver) {
  word() = 1;
  wait_value(stream, address(), 1, Compare::GreaterOrEqual, Flush::RemoteWrites);
  EXPECT_TRUE(fake.step(stream));
}

}  // namespace
}  // namespace weft::cuda
