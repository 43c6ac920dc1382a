// SPDX-License-Identifier: Apache-2.0
// Connections through pinned memory whose GPU, peer or loop fails. The claims for every backend are
// in tests/conformance/connection.
#include <algorithm>
#include <array>
#include <atomic>
#include <cstring>
#include <map>

#include <weft/cuda/fence.h>
#include <weft/cuda/memory.h>
#include <weft/profiling/trace/trace.h>
#include <weft/tests/cuda/fake_cuda.h>
#include <weft/tests/harness/device_timeline.h>
#include <weft/tests/harness/mail.h>
#include <weft/transport/inproc/faults.h>
#include <weft/transport/staged/staged_connection.h>
#include <weft/transport/staged/staged_frame.h>
#include <weft/transport/stream/stream_connection.h>

namespace weft::transport {
namespace {

using harness::bytes_of;
using harness::expect_good;
using harness::failure_of;
using harness::Mailbox;
using harness::patience;
using harness::pattern;
using harness::slice_of;
using staged::kChunkBytes;
using testing::HasSubstr;

class StagedConnectionTest : public cuda::ThreadedCuda {
 protected:
  StagedConnectionTest() {
    auto streams = inproc::make_streams(64 << 10);
    raw = connect_over(std::move(streams.a), inproc::capabilities(), "inproc", raw_loop);
    far = staged::over(connect_over(std::move(streams.b), inproc::capabilities(), "inproc", loop),
                       stage, loop);
  }
  // Makes the near end a staged connection too, as the far end expects.
  void stage_near() { near = staged::over(std::move(raw), stage, raw_loop); }

  std::shared_ptr<cuda::DeviceMemory> on_device(std::size_t bytes) {
    auto memory = std::make_shared<cuda::DeviceMemory>(stream, bytes);
    EXPECT_TRUE(cuda::record(stream).synchronize(patience()));
    const auto content = pattern(1, bytes);
    std::memcpy(memory->slice().data, content.data(), bytes);
    return memory;
  }
  int copies() const { return fake.calls(&cuda::Driver::memcpy_async); }

  void TearDown() override {
    near.reset();
    far.reset();
    raw.reset();
    raw_loop.reset();
    loop.reset();
    stage.reset();
    EXPECT_TRUE(device->retirement().reclaim_all(patience()));
    ThreadedCuda::TearDown();
  }

  cuda::Stream stream{*device};
  std::shared_ptr<staged::Stage> stage = std::make_shared<staged::Stage>(std::vector{device});
  std::shared_ptr<EventLoop> raw_loop = std::make_shared<EventLoop>("near");
  std::shared_ptr<EventLoop> loop = std::make_shared<EventLoop>("far");
  std::shared_ptr<Connection> raw;
  std::shared_ptr<Connection> near;
  std::shared_ptr<Connection> far;
};

TEST_F(StagedConnectionTest, CopiesOnlyAsFarAsChunksAllow) {
  stage_near();
  const auto pinned = stage->pinned().usage().used_bytes;
  const int before = copies();
  const auto a = on_device(64 * kChunkBytes);
  const Op sent = near->send({}, std::array{a->slice()}, a, {});
  const int at_once = copies() - before;
  EXPECT_GE(at_once, 3) << "no further chunk is copied while the first is sent";
  for (int i = 0; i < 20; ++i)
    raw_loop->drive([] { return false; }, Deadline::in(std::chrono::milliseconds(1)));
  EXPECT_LE(copies() - before, at_once + 1)
      << "more chunks were copied though none has been received";
  Mailbox mail(*far, loop);
  EXPECT_EQ(mail.next().payloads.at(0), pattern(1, 64 * kChunkBytes));
  expect_good(sent);
  EXPECT_EQ(copies() - before, 64);
  EXPECT_EQ(stage->pinned().usage().used_bytes, pinned);
}

#if WEFT_TRACE_ENABLED
TEST_F(StagedConnectionTest, EachPieceIsASpanOutAndIn) {
  constinit static trace::Name gradient{trace::Layer::User, "send gradient"};
  stage_near();
  const auto from = on_device(kChunkBytes + 7), to = on_device(kChunkBytes + 7);
  std::atomic<bool> arrived{false};
  far->receive({[&](const Arrival&) { arrived = true; }, [](const Error&) {}});
  harness::DeviceTimeline timeline;
  Op sent;
  {
    const trace::Range range(gradient);
    sent = near->send({}, std::array{from->slice()}, from, {});
  }
  ASSERT_TRUE(loop->drive([&] { return arrived.load(); }, patience()));
  expect_good(far->accept(std::array{to->slice()}, to, {}));
  expect_good(sent);
  std::map<std::string, std::vector<std::uint64_t>> bytes;
  for (const auto& span : timeline.ended(4)) bytes[span.name].push_back(span.bytes);
  EXPECT_EQ(bytes, (std::map<std::string, std::vector<std::uint64_t>>{
                       {"copy to host", {kChunkBytes, 7}}, {"copy to device", {kChunkBytes, 7}}}));
  EXPECT_THAT(timeline.arrows(),
              testing::Contains("send gradient > enqueue copies -> copy to host"));
}
#endif

TEST_F(StagedConnectionTest, FailedFirstCopyFailsItsMessage) {
  stage_near();
  Mailbox mail(*far, loop);
  for (const std::size_t bytes : {std::size_t{100}, 3 * kChunkBytes}) {
    const auto a = on_device(bytes);
    fake.fail(&cuda::Driver::memcpy_async, CUDA_ERROR_INVALID_VALUE);
    const Error refused = failure_of(near->send(bytes_of("bad"), std::array{a->slice()}, a, {}));
    EXPECT_EQ(refused.blame(), Blame::Caller);
    EXPECT_THAT(refused.text(), HasSubstr("through pinned memory"));
    expect_good(near->send(bytes_of("good"), std::array{a->slice()}, a, {}));
    EXPECT_EQ(mail.next().header, "good");
  }
}

TEST_F(StagedConnectionTest, FailedLaterCopyEndsConnection) {
  stage_near();
  Mailbox mail(*far, loop);
  const auto a = on_device(20 * kChunkBytes);
  fake.fail(&cuda::Driver::memcpy_async, CUDA_ERROR_INVALID_VALUE, 15);
  const Op sent = near->send(bytes_of("cut"), std::array{a->slice()}, a, {});
  EXPECT_EQ(failure_of(sent).blame(), Blame::Caller);
  EXPECT_EQ(mail.wait_closed().blame(), Blame::PeerLost);
  EXPECT_EQ(mail.count(), 0u) << "half a message was delivered as a whole one";
  EXPECT_EQ(failure_of(near->send({}, {}, nullptr, {})).blame(), Blame::Caller);
}

TEST_F(StagedConnectionTest, FailedCopyInFailsOnlyTheAccept) {
  stage_near();
  const auto to = on_device(100);
  std::atomic<int> arrived{0};
  far->receive({[&](const Arrival&) { ++arrived; }, [](const Error&) {}});
  const auto payload = pattern(2, 100);
  near->send({}, std::array{slice_of(payload)}, nullptr, {});
  near->send({}, std::array{slice_of(payload)}, nullptr, {});
  ASSERT_TRUE(loop->drive([&] { return arrived == 1; }, patience()));
  fake.fail(&cuda::Driver::memcpy_async, CUDA_ERROR_INVALID_VALUE);
  EXPECT_EQ(failure_of(far->accept(std::array{to->slice()}, to, {})).blame(), Blame::Caller);
  ASSERT_TRUE(loop->drive([&] { return arrived == 2; }, patience()));
  expect_good(far->accept(std::array{to->slice()}, to, {}));
}

TEST_F(StagedConnectionTest, LostDeviceSendsNothingUncopied) {
  stage_near();
  Mailbox mail(*far, loop);
  const auto a = on_device(100);
  const auto gate = stage->flags().make();
  gate->wait(stream);
  const Op sent = near->send(bytes_of("garbage"), std::array{a->slice()}, a, cuda::record(stream));
  fake.lose_context(0);
  EXPECT_EQ(failure_of(sent).blame(), Blame::Device);
  near->send(bytes_of("from the host"), {}, nullptr, {});
  EXPECT_EQ(mail.next().header, "from the host");
  EXPECT_EQ(failure_of(near->send({}, std::array{a->slice()}, a, {})).blame(), Blame::Device);
  EXPECT_THAT(take_logged(), testing::Contains(HasSubstr("is lost")));
  gate->raise();
}

TEST_F(StagedConnectionTest, EndedLoopFailsPendingSends) {
  stage_near();
  const auto a = on_device(3 * kChunkBytes);
  const auto gate = stage->flags().make();
  gate->wait(stream);
  const Op device_memory = near->send({}, std::array{a->slice()}, a, cuda::record(stream));
  const auto flag = std::make_shared<HostFlag>();
  const Op behind = near->send({}, std::array{a->slice()}, a, Fence(flag));
  near.reset();
  raw_loop.reset();
  EXPECT_EQ(failure_of(device_memory).blame(), Blame::Cancelled);
  EXPECT_EQ(failure_of(behind).blame(), Blame::Cancelled);
  gate->raise();
}

TEST_F(StagedConnectionTest, EndWithoutAGpuReceivesChunks) {
  near = staged::over(std::move(raw),
                      std::make_shared<staged::Stage>(std::vector<std::shared_ptr<cuda::Device>>()),
                      raw_loop);
  Mailbox mail(*near, raw_loop);
  const auto a = on_device(3 * kChunkBytes + 1);
  far->send(bytes_of("chunks"), std::array{a->slice()}, a, {});
  EXPECT_EQ(mail.next().payloads.at(0), pattern(1, 3 * kChunkBytes + 1));
  const Error refused = failure_of(near->send({}, std::array{a->slice()}, a, {}));
  EXPECT_EQ(refused.blame(), Blame::Caller);
  EXPECT_THAT(refused.text(), HasSubstr("without a GPU"));
}

TEST_F(StagedConnectionTest, MalformedMessagesEndTheConnection) {
  const auto lead = staged::encode_lead(
      bytes_of("x"), std::array{Slice{nullptr, 2 * kChunkBytes, Device::host()}});
  const auto chunk = std::make_shared<const std::vector<std::byte>>(pattern(1, kChunkBytes + 1));
  const auto kind = [](int number) { return std::vector{static_cast<std::byte>(number)}; };
  struct Case {
    std::vector<std::vector<std::byte>> headers;
    std::size_t payload;  // of the last message
    const char* text;
  };
  auto cut = lead, many = lead, small = lead;
  cut.resize(10);
  many[4] = std::byte{0xff};
  small[7] = std::byte{0};
  const std::vector<Case> cases{{{{}}, 0, "without a kind"},
                                {{kind(9)}, 0, "kind 9"},
                                {{kind(3)}, 5, "without a lead"},
                                {{kind(3)}, 0, "not a single payload"},
                                {{cut}, 0, "truncated"},
                                {{many}, 0, "payloads"},
                                {{small}, 0, "fit into one piece"},
                                {{lead}, 7, "wrong shape"},
                                {{lead, kind(1)}, 0, "inside another"},
                                {{kind(1)}, kChunkBytes + 1, "chunks are due"},
                                {{lead, kind(3)}, kChunkBytes + 1, "a chunk of"}};
  for (const Case& one : cases) {
    SCOPED_TRACE(one.text);
    auto streams = inproc::make_streams(64 << 10);
    const auto stranger =
        connect_over(std::move(streams.a), inproc::capabilities(), "inproc", raw_loop);
    const auto end = staged::over(
        connect_over(std::move(streams.b), inproc::capabilities(), "inproc", loop), stage, loop);
    Mailbox mail(*end, loop);
    for (std::size_t i = 0; i < one.headers.size(); ++i) {
      const bool is_last = i + 1 == one.headers.size();
      const std::vector<Slice> payloads(is_last && one.payload > 0 ? 1 : 0,
                                        slice_of(*chunk).part(0, one.payload));
      stranger->send(one.headers[i], payloads, chunk, {});
    }
    const Error why = mail.wait_closed();
    EXPECT_EQ(why.blame(), Blame::Protocol);
    EXPECT_THAT(why.text(), HasSubstr(one.text));
    EXPECT_EQ(failure_of(end->send({}, {}, nullptr, {})).blame(), Blame::Protocol);
  }
}

class StagedConnectionOfTwoGpus : public cuda::FakeCuda {
 protected:
  StagedConnectionOfTwoGpus() : FakeCuda({.devices = 2, .threads = true}) {}
  void TearDown() override {
    for (const auto& gpu : {device, other}) EXPECT_TRUE(gpu->retirement().reclaim_all(patience()));
    FakeCuda::TearDown();
  }

  static std::vector<std::byte> read(const cuda::DeviceMemory& memory) {
    const auto* const bytes = static_cast<const std::byte*>(memory.slice().data);
    return {bytes, bytes + memory.slice().bytes};
  }

  std::shared_ptr<cuda::Device> other = cuda::Device::open(fake.driver(), 1);
};

// Neither GPU is the default one of the thread that sends or accepts.
TEST_F(StagedConnectionOfTwoGpus, OneMessageUsesBothGpus) {
  const auto stage = std::make_shared<staged::Stage>(std::vector{device, other});
  const auto near_loop = std::make_shared<EventLoop>("near"),
             far_loop = std::make_shared<EventLoop>("far");
  auto streams = inproc::make_streams(64 << 10);
  const auto near =
      staged::over(connect_over(std::move(streams.a), inproc::capabilities(), "inproc", near_loop),
                   stage, near_loop);
  const auto far =
      staged::over(connect_over(std::move(streams.b), inproc::capabilities(), "inproc", far_loop),
                   stage, far_loop);
  const auto arrived = std::make_shared<std::atomic<int>>(0);
  far->receive({[arrived](const Arrival&) { ++*arrived; }, [](const Error&) {}});
  const cuda::Stream first_stream(*device), second_stream(*other);
  int messages = 0;
  for (const std::size_t bytes : {std::size_t{1000}, 3 * kChunkBytes + 5}) {
    SCOPED_TRACE(bytes);
    const cuda::DeviceMemory first(first_stream, bytes), second(second_stream, bytes);
    const cuda::DeviceMemory to_first(first_stream, bytes), to_second(second_stream, bytes);
    ASSERT_TRUE(cuda::record(first_stream).synchronize(patience()));
    ASSERT_TRUE(cuda::record(second_stream).synchronize(patience()));
    std::memcpy(first.slice().data, pattern(1, bytes).data(), bytes);
    std::memcpy(second.slice().data, pattern(2, bytes).data(), bytes);
    const Op sent = near->send({}, std::array{first.slice(), second.slice()}, nullptr,
                               cuda::record(second_stream));
    ++messages;
    ASSERT_TRUE(far_loop->drive([&] { return *arrived == messages; }, patience()));
    expect_good(far->accept(std::array{to_second.slice(), to_first.slice()}, nullptr,
                            cuda::record(first_stream)));
    expect_good(sent);
    EXPECT_EQ(read(to_second), pattern(1, bytes));
    EXPECT_EQ(read(to_first), pattern(2, bytes));
  }
}

// A connection whose network can read and write GPU memory itself, as verbs does; a fake GPU's
// memory is memory of the host.
class ReachingLane final : public Connection {
 public:
  static constexpr std::size_t kLeast = 128 << 10;

  explicit ReachingLane(std::shared_ptr<Connection> below)
      : below_(std::move(below)), capabilities_(below_->capabilities()) {
    capabilities_.direct_bytes = kLeast;
  }
  std::string_view transport() const override { return below_->transport(); }
  std::string peer() const override { return below_->peer(); }
  const Capabilities& capabilities() const override { return capabilities_; }
  void receive(Handlers handlers) override { below_->receive(std::move(handlers)); }
  Op send(std::span<const std::byte> header, std::span<const Slice> payloads, Pin pin,
          Fence ready) noexcept override {
    return below_->send(header, as_host(payloads), std::move(pin), std::move(ready));
  }
  Op accept(std::span<const Slice> destinations, Pin pin, Fence ready) noexcept override {
    const auto on_host = as_host(destinations);
    const bool is_refused = refuses && std::ranges::any_of(destinations, [](const Slice& to) {
                              return !to.device.is_host();
                            });
    if (is_refused)
      return Op::failed(Error(Blame::Caller, "the connection below reaches it no longer"));
    return below_->accept(on_host, std::move(pin), std::move(ready));
  }
  Result<Pin> reach(const Slice& memory, cuda::Device& gpu) noexcept override {
    if (memory.device != gpu.id()) return Error(Blame::Caller, "memory of another GPU");
    if (memory.device.index == unreached) return Error(why_unreached, "not this GPU's");
    return Pin(std::make_shared<int>());
  }
  void close(const Error& why) noexcept override { below_->close(why); }

  std::atomic<bool> refuses{false};
  std::atomic<int> unreached{-1};
  std::atomic<Blame> why_unreached{Blame::Unsupported};
  std::atomic<int> direct{0};  // payloads and destinations on GPUs

 private:
  std::vector<Slice> as_host(std::span<const Slice> slices) {
    std::vector<Slice> on_host(slices.begin(), slices.end());
    for (Slice& slice : on_host) {
      if (slice.device.is_host()) continue;
      EXPECT_GE(slice.bytes, kLeast)
          << "a slice below direct_bytes was handed to the connection below";
      ++direct;
      slice.device = Device::host();
    }
    return on_host;
  }

  const std::shared_ptr<Connection> below_;
  Capabilities capabilities_;
};

class StagedOverAReachingLane : public StagedConnectionOfTwoGpus {
 protected:
  StagedOverAReachingLane() {
    auto streams = inproc::make_streams(64 << 10);
    const auto open = [&](auto stream, const auto& loop) {
      return std::make_shared<ReachingLane>(
          connect_over(std::move(stream), inproc::capabilities(), "inproc", loop));
    };
    near_below = open(std::move(streams.a), near_loop);
    far_below = open(std::move(streams.b), far_loop);
    near = staged::over(near_below, stage, near_loop);
    far = staged::over(far_below, stage, far_loop);
    far->receive({[arrived = arrived](const Arrival&) { ++*arrived; },
                  [closed = closed](const Error&) { *closed = true; }});
  }
  void TearDown() override {
    near.reset();
    far.reset();
    near_below.reset();
    far_below.reset();
    stage.reset();
    StagedConnectionOfTwoGpus::TearDown();
  }
  bool drive_until_arrived(int messages) {
    return far_loop->drive([&] { return *arrived == messages; }, patience());
  }
  static std::shared_ptr<cuda::DeviceMemory> on(const cuda::Stream& stream, std::size_t bytes,
                                                unsigned seed) {
    auto memory = std::make_shared<cuda::DeviceMemory>(stream, bytes);
    EXPECT_TRUE(cuda::record(stream).synchronize(patience()));
    std::memcpy(memory->slice().data, pattern(seed, bytes).data(), bytes);
    return memory;
  }
  int copies() const { return fake.calls(&cuda::Driver::memcpy_async); }

  cuda::Stream first{*device}, second{*other};
  std::shared_ptr<EventLoop> near_loop = std::make_shared<EventLoop>("near"),
                             far_loop = std::make_shared<EventLoop>("far");
  std::shared_ptr<staged::Stage> stage =
      std::make_shared<staged::Stage>(std::vector{device, other});
  std::shared_ptr<ReachingLane> near_below, far_below;
  std::shared_ptr<Connection> near, far;
  std::shared_ptr<std::atomic<int>> arrived = std::make_shared<std::atomic<int>>(0);
  std::shared_ptr<std::atomic<bool>> closed = std::make_shared<std::atomic<bool>>(false);
};

TEST_F(StagedOverAReachingLane, CopiesOnlyUnreachedMemory) {
  constexpr std::size_t kLeast = ReachingLane::kLeast;
  struct Case {
    std::vector<std::size_t> sizes;  // alternately on the first and the second GPU
    int unreached;                   // the GPU that the near end cannot reach
    int copies;                      // in all
    int direct;                      // pieces sent directly by the near end
  };
  const std::vector<Case> cases{
      {{kLeast}, -1, 0, 1},
      {{kLeast - 1}, -1, 2, 0},                // copied to a chunk and from one
      {{kLeast, 100, kLeast + 7}, -1, 2, 2},   // one message; only its small payload takes a chunk
      {{2 * kChunkBytes + kLeast}, -1, 0, 3},  // three chunks
      {{2 * kChunkBytes + kLeast - 1}, -1, 2, 2},  // the last chunk is too small
      {{kLeast, kLeast}, 1, 1, 1},  // the far end reaches a GPU that the near end does not
      {{kChunkBytes + kLeast, kChunkBytes + kLeast}, 0, 2, 2},
  };
  int messages = 0;
  for (const Case& one : cases) {
    SCOPED_TRACE(messages);
    std::vector<std::shared_ptr<cuda::DeviceMemory>> from, to;
    std::vector<Slice> sent_from, sent_to;
    for (std::size_t i = 0; i < one.sizes.size(); ++i) {
      const cuda::Stream& stream = i % 2 == 0 ? first : second;
      from.push_back(on(stream, one.sizes[i], static_cast<unsigned>(i) + 1));
      to.push_back(on(stream, one.sizes[i], 99));
      sent_from.push_back(from.back()->slice());
      sent_to.push_back(to.back()->slice());
    }
    near_below->unreached = one.unreached;
    const int copies_before = copies(), direct_before = near_below->direct;
    const Op sent = near->send(bytes_of("m"), sent_from, nullptr, {});
    ASSERT_TRUE(drive_until_arrived(++messages));
    expect_good(far->accept(sent_to, nullptr, {}));
    expect_good(sent);
    for (std::size_t i = 0; i < to.size(); ++i)
      EXPECT_EQ(read(*to[i]), pattern(static_cast<unsigned>(i) + 1, one.sizes[i]));
    EXPECT_EQ(copies() - copies_before, one.copies);
    EXPECT_EQ(near_below->direct - direct_before, one.direct);
  }
}

// The connection below has logged the reason already, or fails later messages.
TEST_F(StagedOverAReachingLane, CopiesUnreachedMemorySilently) {
  const auto from = on(first, ReachingLane::kLeast, 1), to = on(first, ReachingLane::kLeast, 2);
  near_below->unreached = 0;
  int messages = 0;
  for (const Blame blame :
       {Blame::Unsupported, Blame::Busy, Blame::Caller, Blame::Device, Blame::PeerLost}) {
    near_below->why_unreached = blame;
    const Op sent = near->send({}, std::array{from->slice()}, from, {});
    ASSERT_TRUE(drive_until_arrived(++messages));
    expect_good(far->accept(std::array{to->slice()}, to, {}));
    expect_good(sent);
  }
  EXPECT_EQ(read(*to), pattern(1, ReachingLane::kLeast));
  EXPECT_THAT(take_logged(), testing::IsEmpty());
}

// The refused message blocks those behind it; without the end the connection would stay silent.
TEST_F(StagedOverAReachingLane, RefusedReachedMemoryEndsConnection) {
  const auto to = on(first, ReachingLane::kLeast, 1);
  const auto content =
      std::make_shared<const std::vector<std::byte>>(pattern(2, ReachingLane::kLeast));
  near->send({}, std::array{slice_of(*content)}, content,
             {});  // still being written when the other side has ended
  near->send({}, {}, nullptr, {});
  ASSERT_TRUE(drive_until_arrived(1));
  far_below->refuses = true;
  EXPECT_THAT(failure_of(far->accept(std::array{to->slice()}, to, {})).text(),
              HasSubstr("reaches it no longer"));
  EXPECT_TRUE(far_loop->drive([&] { return closed->load(); }, patience()));
  EXPECT_EQ(failure_of(far->send({}, {}, nullptr, {})).blame(), Blame::Caller);
}

TEST_F(StagedOverAReachingLane, LostGpuSendsNothingUnready) {
  const auto a = on(first, ReachingLane::kLeast, 1);
  const auto b = on(second, 1000, 2);
  const auto gate = stage->flags().make();
  gate->wait(first);
  const Op direct = near->send({}, std::array{a->slice()}, a, cuda::record(first));
  fake.lose_context(0);
  EXPECT_EQ(failure_of(direct).blame(), Blame::Device);  // from now on the loss is known
  const Op mixed =
      near->send({}, std::array{b->slice(), a->slice()}, a, {});  // only the other GPU would copy
  EXPECT_EQ(failure_of(mixed).blame(), Blame::Device);
  near->send({}, {}, nullptr, {});
  EXPECT_TRUE(drive_until_arrived(1)) << "only the message without payloads may arrive";
  far->accept({}, nullptr, {});
  take_logged();
  gate->raise();
}

TEST_F(StagedOverAReachingLane, LostGpuReceivesNothing) {
  const auto to = on(first, ReachingLane::kLeast, 1);
  const auto content =
      std::make_shared<const std::vector<std::byte>>(pattern(2, ReachingLane::kLeast));
  near->send({}, std::array{slice_of(*content)}, content, {});
  ASSERT_TRUE(drive_until_arrived(1));
  fake.lose_context(0);
  device->probe();
  EXPECT_EQ(failure_of(far->accept(std::array{to->slice()}, to, {})).blame(), Blame::Device);
  take_logged();
}

TEST(StagedFrame, LimitsLeaveRoomForItsOwnBytes) {
  const Capabilities below = inproc::capabilities();
  const Capabilities own = staged::capabilities_over(below);
  EXPECT_TRUE(own.device_memory);
  const std::vector<Slice> most(own.max_payloads, Slice{nullptr, kChunkBytes, Device::host()});
  const std::vector<std::byte> header(own.max_header);
  const auto lead = staged::encode_lead(header, most);
  EXPECT_LE(lead.size(), below.max_header);
  std::vector<std::uint64_t> sizes;
  const auto decoded = staged::decode({.header = lead}, own, sizes);
  EXPECT_FALSE(decoded.wrong) << *decoded.wrong;
  EXPECT_EQ(decoded.kind, staged::Kind::Lead);
  EXPECT_EQ(decoded.header.size(), header.size());
  EXPECT_EQ(decoded.total, most.size() * kChunkBytes);
  EXPECT_EQ(sizes.size(), most.size());
}

}  // namespace
}  // namespace weft::transport
