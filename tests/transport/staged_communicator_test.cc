// SPDX-License-Identifier: Apache-2.0
// Device memory through a communicator of the host whose every step the test controls.
// (tests/conformance checks over Gloo that the results are right.)
#include <cstring>
#include <mutex>

#include <weft/cuda/fence.h>
#include <weft/cuda/flag_pool.h>
#include <weft/cuda/memory.h>
#include <weft/profiling/trace/trace.h>
#include <weft/tests/cuda/fake_cuda.h>
#include <weft/tests/harness/device_timeline.h>
#include <weft/transport/staged/staged_communicator.h>

namespace weft::transport {
namespace {

using testing::HasSubstr;

Deadline soon() { return Deadline::in(std::chrono::seconds(30)); }

// A host communicator whose operations end only when and how the test says.
class ScriptedHost final : public Communicator, public PointToPoint {
 public:
  struct Call {
    std::string name;
    float* data = nullptr;
    std::shared_ptr<Completion> completion;
  };

  std::string_view backend() const override { return "scripted"; }
  int rank() const override { return 0; }
  int size() const override { return 2; }
  bool can_reduce(Dtype, ReduceOp) const override { return true; }
  PointToPoint* point_to_point() override { return this; }
  bool has_tags() const override { return true; }
  bool has_any_source() const override { return true; }

  Op run(const Collective& collective, Pin pin, Fence) noexcept override {
    const Slice data = collective.inputs.empty() ? Slice() : collective.inputs.front();
    return begin(std::string(transport::name(collective.kind)), data, std::move(pin));
  }
  Op send(const Elements& data, int, int, Pin pin, Fence) noexcept override {
    return begin("send", data.slice, std::move(pin));
  }
  Op recv(const Elements& data, int, int, Pin pin, Fence) noexcept override {
    return begin("recv", data.slice, std::move(pin));
  }
  void abort(const Error& why) noexcept override {
    std::vector<Call> pending;
    {
      std::lock_guard lock(mutex_);
      if (!aborted_) aborted_ = why;
      pending = calls_;
    }
    for (const Call& call : pending) call.completion->fail(why);
  }

  std::size_t calls() const {
    std::lock_guard lock(mutex_);
    return calls_.size();
  }
  Call call(std::size_t index) const {
    std::lock_guard lock(mutex_);
    return calls_.at(index);
  }
  std::optional<Error> aborted() const {
    std::lock_guard lock(mutex_);
    return aborted_;
  }

 private:
  Op begin(const std::string& name, const Slice& slice, Pin pin) {
    const auto completion = std::make_shared<Completion>(std::move(pin));
    std::lock_guard lock(mutex_);
    if (aborted_) return Op::failed(*aborted_);
    calls_.push_back({name, static_cast<float*>(slice.data), completion});
    return completion->op();
  }

  mutable std::mutex mutex_;
  std::vector<Call> calls_;
  std::optional<Error> aborted_;
};

class StagedTest : public cuda::ThreadedCuda {
 protected:
  std::shared_ptr<cuda::DeviceMemory> number(float value) {
    auto memory = std::make_shared<cuda::DeviceMemory>(stream, sizeof value);
    EXPECT_TRUE(cuda::record(stream).synchronize(soon()));
    std::memcpy(memory->slice().data, &value, sizeof value);
    return memory;
  }
  static float value_of(const cuda::DeviceMemory& memory) {
    float value = 0;
    std::memcpy(&value, memory.slice().data, sizeof value);
    return value;
  }
  static Elements floats(const cuda::DeviceMemory& memory) {
    return {memory.slice(), Dtype::Float32};
  }

  // Drives the loop until the host communicator has had `index` + 1 calls; returns the last.
  ScriptedHost::Call wait_for_call(std::size_t index) {
    EXPECT_TRUE(loop->drive([&] { return host->calls() > index; }, soon()));
    return host->call(index);
  }
  void expect_error(const Op& op, Blame blame) {
    EXPECT_TRUE(op.done().synchronize(soon())) << "the fence of a failed operation does not pass";
    ASSERT_TRUE(op.error());
    EXPECT_EQ(op.error()->blame(), blame) << op.error()->what();
  }

  void TearDown() override {
    staged.reset();
    loop.reset();
    EXPECT_TRUE(device->retirement().reclaim_all(soon()));
    ThreadedCuda::TearDown();
  }

  cuda::Stream stream{*device};
  cuda::FlagPool flags{*device};
  std::shared_ptr<EventLoop> loop = std::make_shared<EventLoop>("staged test");
  std::shared_ptr<ScriptedHost> host = std::make_shared<ScriptedHost>();
  std::shared_ptr<Communicator> staged = staged::over(host, device, loop);
};

TEST_F(StagedTest, CopiesOutRunsOnHostCopiesBack) {
  const auto a = number(3);
  const int blocks = fake.host_blocks();
  const Op op = staged->all_reduce(floats(*a), ReduceOp::Sum, a, Fence());
  const auto call = wait_for_call(0);
  EXPECT_EQ(call.name, "all_reduce");
  EXPECT_NE(static_cast<void*>(call.data), a->slice().data);
  EXPECT_EQ(*call.data, 3);
  EXPECT_FALSE(op.done().query());
  *call.data = 8;
  call.completion->finish();
  EXPECT_TRUE(op.done().synchronize(soon()));
  EXPECT_EQ(value_of(*a), 8);
  EXPECT_FALSE(op.error());
  EXPECT_EQ(fake.host_blocks(), blocks) << "the host was made to wait";
}

TEST_F(StagedTest, HostStartsOnlyAfterReady) {
  const auto a = number(3);
  const auto gate = flags.make();
  gate->wait(stream);
  const Op op = staged->all_reduce(floats(*a), ReduceOp::Sum, a, cuda::record(stream));
  // A later operation that is ready stays behind it.
  const Op later = staged->barrier(Fence());
  const float late = 5;
  std::memcpy(a->slice().data, &late, sizeof late);
  EXPECT_EQ(host->calls(), 0u);
  gate->raise();
  const auto call = wait_for_call(0);
  EXPECT_EQ(call.name, "all_reduce");
  EXPECT_EQ(*call.data, 5);
  EXPECT_EQ(wait_for_call(1).name, "barrier");
  call.completion->finish();
  host->call(1).completion->finish();
  EXPECT_TRUE(op.done().synchronize(soon()));
  EXPECT_TRUE(later.done().synchronize(soon()));
}

TEST_F(StagedTest, CopiesOnlyWhatIsReadOrWritten) {
  const auto a = number(3);
  const auto copies = [&] {
    int count = 0;
    for (const std::string& text : fake.enqueued()) count += text == "cuMemcpyAsync" ? 1 : 0;
    return count;
  };
  const int before = copies();
  const Op op = staged->broadcast(floats(*a), /*root=*/0, a, Fence());  // this rank is the root
  wait_for_call(0).completion->finish();
  EXPECT_TRUE(op.done().synchronize(soon()));
  EXPECT_EQ(copies(), before + 1);
  const Op other = staged->broadcast(floats(*a), /*root=*/1, a, Fence());
  const auto call = wait_for_call(1);
  *call.data = 7;
  call.completion->finish();
  EXPECT_TRUE(other.done().synchronize(soon()));
  EXPECT_EQ(copies(), before + 2);
  EXPECT_EQ(value_of(*a), 7);
}

#if WEFT_TRACE_ENABLED
TEST_F(StagedTest, EachCopyIsASpanWithItsBytes) {
  constinit static trace::Name bucket{trace::Layer::User, "bucket"};
  const auto a = number(3), b = number(4);
  harness::DeviceTimeline timeline;
  std::vector<Op> ops;
  {
    const trace::Range range(bucket);
    ops.push_back(staged->all_reduce(floats(*a), ReduceOp::Sum, a, Fence()));
  }
  wait_for_call(0).completion->finish();
  ops.push_back(staged->barrier(Fence()));  // copies nothing
  wait_for_call(1).completion->finish();
  ops.push_back(staged->point_to_point()->send(floats(*a), 1, 9, a, Fence()));
  wait_for_call(2).completion->finish();
  ops.push_back(staged->point_to_point()->recv(floats(*b), 1, 9, b, Fence()));
  wait_for_call(3).completion->finish();
  for (const Op& op : ops) EXPECT_TRUE(op.done().synchronize(soon()));
  EXPECT_THAT(timeline.names(4),
              testing::UnorderedElementsAre("copy to host: 4 bytes", "copy to device: 4 bytes",
                                            "copy to host: 4 bytes", "copy to device: 4 bytes"));
  EXPECT_THAT(
      timeline.arrows(),
      testing::ElementsAre("bucket > stage -> copy to device", "bucket > stage -> copy to host",
                           "stage -> copy to device", "stage -> copy to host"));
}
#endif

TEST_F(StagedTest, HostFailureReleasesStreams) {
  const auto a = number(3);
  const Op op = staged->all_reduce(floats(*a), ReduceOp::Sum, a, Fence());
  op.done().wait(stream);
  const Fence behind = cuda::record(stream);
  wait_for_call(0).completion->fail(Error(Blame::PeerLost, "rank 1 is gone"));
  EXPECT_TRUE(behind.synchronize(soon()));
  expect_error(op, Blame::PeerLost);
}

TEST_F(StagedTest, AbortReachesHostAndPassesFences) {
  const auto a = number(3);
  const Op running = staged->all_reduce(floats(*a), ReduceOp::Sum, a, Fence());
  wait_for_call(0);
  const auto gate = flags.make();
  gate->wait(stream);
  const Op waiting = staged->all_reduce(floats(*a), ReduceOp::Sum, a, cuda::record(stream));
  staged->abort(Error(Blame::Cancelled, "enough"));
  expect_error(running, Blame::Cancelled);
  EXPECT_TRUE(waiting.error());
  gate->raise();
  expect_error(waiting, Blame::Cancelled);
  EXPECT_EQ(host->calls(), 1u);
}

TEST_F(StagedTest, LostDeviceSendsNothing) {
  const auto a = number(3);
  const auto gate = flags.make();
  gate->wait(stream);
  const Op op = staged->all_reduce(floats(*a), ReduceOp::Sum, a, cuda::record(stream));
  fake.lose_context(0);
  EXPECT_TRUE(loop->drive([&] { return host->aborted().has_value(); }, soon()));
  EXPECT_EQ(host->calls(), 0u);
  EXPECT_EQ(host->aborted()->blame(), Blame::Device);
  expect_error(op, Blame::Device);
  EXPECT_THAT(take_logged(), testing::Contains(HasSubstr("is lost")));
  gate->raise();
}

TEST_F(StagedTest, PinIsHeldUntilTheCopyBack) {
  auto a = number(3);
  const std::weak_ptr<cuda::DeviceMemory> watched = a;
  const Op op = staged->all_reduce(floats(*a), ReduceOp::Sum, a, Fence());
  a.reset();
  const auto call = wait_for_call(0);
  EXPECT_FALSE(watched.expired());
  call.completion->finish();
  EXPECT_TRUE(loop->drive([&] { return watched.expired(); }, soon()));
  EXPECT_TRUE(op.done().query());
}

TEST_F(StagedTest, MessageIsSentOnceCopied) {
  const auto a = number(3);
  const auto gate = flags.make();
  gate->wait(stream);
  const Op op = staged->point_to_point()->send(floats(*a), 1, 9, a, cuda::record(stream));
  EXPECT_EQ(host->calls(), 0u);
  gate->raise();
  const auto call = wait_for_call(0);
  EXPECT_EQ(*call.data, 3);
  EXPECT_FALSE(op.done().query());
  call.completion->finish();
  EXPECT_TRUE(op.done().synchronize(soon()));
  EXPECT_FALSE(op.error());
}

TEST_F(StagedTest, ReceiveDoesNotBlockCollectives) {
  const auto a = number(3), b = number(4);
  const Op received = staged->point_to_point()->recv(floats(*a), kAnySource, 9, a, Fence());
  const Op op = staged->all_reduce(floats(*b), ReduceOp::Sum, b, Fence());
  EXPECT_EQ(wait_for_call(0).name, "recv");
  wait_for_call(1).completion->finish();
  EXPECT_TRUE(op.done().synchronize(soon()));
  EXPECT_FALSE(received.done().query());
  // A stream can wait for it nevertheless.
  received.done().wait(stream);
  const Fence behind = cuda::record(stream);
  const auto call = host->call(0);
  *call.data = 6;
  call.completion->set_source_rank(1);
  call.completion->finish();
  EXPECT_TRUE(behind.synchronize(soon()));
  EXPECT_EQ(value_of(*a), 6);
  EXPECT_EQ(received.source_rank(), 1);
  EXPECT_FALSE(received.error());
}

TEST_F(StagedTest, FailedReceiveReportsItsError) {
  const auto a = number(3);
  const Op op = staged->point_to_point()->recv(floats(*a), 1, 0, a, Fence());
  wait_for_call(0).completion->fail(Error(Blame::Timeout, "nobody sent"));
  expect_error(op, Blame::Timeout);
}

TEST_F(StagedTest, EndedLoopFailsOperations) {
  const auto a = number(3), b = number(4), c = number(5);
  const Op running = staged->all_reduce(floats(*a), ReduceOp::Sum, a, Fence());
  wait_for_call(0);
  const auto gate = flags.make();
  gate->wait(stream);
  const Op collective = staged->all_reduce(floats(*b), ReduceOp::Sum, b, cuda::record(stream));
  const Op message = staged->point_to_point()->send(floats(*c), 1, 0, c, cuda::record(stream));
  staged.reset();
  loop.reset();
  gate->raise();
  expect_error(running, Blame::Cancelled);
  expect_error(collective, Blame::Cancelled);
  expect_error(message, Blame::Cancelled);
}

// The second receive's memory is ready only after the first has ended, but its bytes arrive first.
TEST_F(StagedTest, OutOfOrderMessagesHangNoStream) {
  const auto a = number(0);
  const auto b = number(0);
  const Op first = staged->point_to_point()->recv(floats(*a), 1, 1, a, Fence());
  first.done().wait(stream);
  const Op second = staged->point_to_point()->recv(floats(*b), 1, 2, b, cuda::record(stream));
  const auto call_of_first = wait_for_call(0);
  const auto call_of_second = wait_for_call(1);
  *call_of_second.data = 2;
  call_of_second.completion->finish();
  *call_of_first.data = 1;
  call_of_first.completion->finish();
  EXPECT_TRUE(first.done().synchronize(soon()));
  EXPECT_TRUE(second.done().synchronize(soon()));
  EXPECT_EQ(value_of(*a), 1);
  EXPECT_EQ(value_of(*b), 2);
}

TEST_F(StagedTest, FailedEnqueueFailsTheGroup) {
  const auto a = number(3);
  fake.fail(&cuda::Driver::memcpy_async, CUDA_ERROR_INVALID_VALUE);
  const Op op = staged->all_reduce(floats(*a), ReduceOp::Sum, a, Fence());
  expect_error(op, Blame::Caller);
  EXPECT_TRUE(host->aborted()) << "the other ranks would wait for this one";
  // The same for the copy back, which is enqueued behind a flag.
  fake.fail(&cuda::Driver::memcpy_async, CUDA_ERROR_INVALID_VALUE, 2);
  expect_error(staged->all_reduce(floats(*a), ReduceOp::Sum, a, Fence()), Blame::Caller);
}

class StagedWithoutMemOps : public cuda::FakeCuda {
 protected:
  StagedWithoutMemOps() : FakeCuda({.threads = true, .stream_mem_ops = false}) {}
};

TEST_F(StagedWithoutMemOps, IsRefusedByName) {
  const auto loop = std::make_shared<EventLoop>("staged test");
  const Error error =
      cuda::error_from([&] { staged::over(std::make_shared<ScriptedHost>(), device, loop); });
  EXPECT_EQ(error.blame(), Blame::Unsupported);
  EXPECT_THAT(error.text(), HasSubstr("no stream memory operations"));
  EXPECT_TRUE(device->retirement().reclaim_all(soon()));
}

}  // namespace
}  // namespace weft::transport
