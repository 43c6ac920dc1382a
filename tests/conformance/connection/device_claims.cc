// SPDX-License-Identifier: Apache-2.0
// Payloads and destinations on a GPU: connections of every backend through pinned memory, on a fake
// GPU or, in the program for machines that have one, on a real one; and by CUDA IPC, on a fake one.
// The claims about host memory are in the other files; they are checked over such connections too.
#include <array>

#include <weft/base/config.h>
#include <weft/cuda/fence.h>
#include <weft/cuda/memory.h>
#include <weft/tests/conformance/communicator/cuda_ranks.h>
#include <weft/tests/conformance/connection/staged_pairs.h>

namespace weft::conformance {
namespace {

enum class Gpu { Fake, Real };

struct Setting {
  std::string backend;
  Gpu gpu = Gpu::Fake;
  Way way = Way::Pinned;
};
std::ostream& operator<<(std::ostream& out, const Setting& setting) {
  return out << setting.backend;
}
std::string name_of(const testing::TestParamInfo<Setting>& info) {
  return info.param.backend + (info.param.gpu == Gpu::Fake ? "" : "OnGpu") +
         (info.param.way == Way::Pinned   ? ""
          : info.param.way == Way::Direct ? "Direct"
                                          : "ByName");
}

class DeviceClaims : public testing::TestWithParam<Setting> {
 protected:
  void SetUp() override {
    if (GetParam().gpu == Gpu::Fake) {
      transport = open_on_fake(GetParam().backend, GetParam().way);
    } else {
      if (!real_driver().ok()) GTEST_SKIP() << "no GPU: " << real_driver().error().text();
      transport = std::make_shared<StagedTransport>(GetParam().backend, Way::Pinned, nullptr,
                                                    cuda::Device::open(real_driver().value(), 0));
    }
    equip(bench, transport->device(),
          GetParam().way == Way::ByName ? OnDevice::Shareable : OnDevice::Pooled);
    pair = open_pair(*transport->connector());
    pair.far->receive({[kept = arrived](const Arrival& arrival) {
                         std::lock_guard lock(kept->mutex);
                         kept->headers.emplace_back(
                             reinterpret_cast<const char*>(arrival.header.data()),
                             arrival.header.size());
                         kept->sizes.assign(arrival.sizes.begin(), arrival.sizes.end());
                       },
                       [kept = arrived](const Error&) {
                         std::lock_guard lock(kept->mutex);
                         kept->has_ended = true;
                       }});
  }
  void TearDown() override {
    pair = {};
    bench = {};
    transport.reset();
  }

  // Waits for the next message and returns its header; the test accepts it.
  std::string next() {
    const auto count = [this] {
      std::lock_guard lock(arrived->mutex);
      return arrived->headers.size();
    };
    EXPECT_TRUE(pair.far_loop->drive([&] { return count() > seen; }, patience()))
        << "nothing arrives";
    std::lock_guard lock(arrived->mutex);
    return seen < arrived->headers.size() ? arrived->headers[seen++] : "";
  }
  std::shared_ptr<Memory> on_device(const std::vector<std::byte>& bytes) const {
    auto memory = bench.allocate(bytes.size());
    memory->write(bytes.data());
    return memory;
  }
  static std::vector<std::byte> read(Memory& memory) {
    std::vector<std::byte> bytes(memory.slice().bytes);
    memory.read(bytes.data());
    return bytes;
  }
  int host_blocks() const { return transport->fake() ? transport->fake()->host_blocks() : 0; }

  struct Kept {
    std::mutex mutex;
    std::vector<std::string> headers;
    std::vector<std::uint64_t> sizes;
    bool has_ended = false;
  };
  std::shared_ptr<StagedTransport> transport;
  Rank bench;
  ConnectionPair pair;
  std::shared_ptr<Kept> arrived = std::make_shared<Kept>();
  std::size_t seen = 0;
};

TEST_P(DeviceClaims, CarriesDeviceMemoryOfAllSizes) {
  EXPECT_TRUE(pair.near->capabilities().device_memory);
  EXPECT_TRUE(transport->connector()->capabilities().device_memory);
  for (const std::size_t bytes :
       {0u, 1u, 256u, 65'537u, 512u << 10, (512u << 10) + 1, (5u << 20) + 13}) {
    SCOPED_TRACE(bytes);
    const auto payload = pattern(1, bytes);
    const auto from = on_device(payload);
    const auto to = bench.allocate(bytes);
    const Op sent = pair.near->send(bytes_of("x"), std::array{from->slice()}, from, {});
    EXPECT_EQ(next(), "x");
    expect_good(pair.far->accept(std::array{to->slice()}, to, {}));
    expect_good(sent);
    EXPECT_TRUE(same(read(*to), payload));
  }
}

// Through pinned memory the GPU copies each chunk twice; direct, never; by CUDA IPC, once.
TEST_P(DeviceClaims, CopiesShowWhichWayAPayloadTook) {
  if (GetParam().gpu == Gpu::Real) GTEST_SKIP() << "copies are counted by the fake driver";
  const auto payload = pattern(1, 5 << 20);
  const auto from = on_device(payload), to = bench.allocate(payload.size());
  const auto copies = [this] { return transport->fake()->calls(&cuda::Driver::memcpy_async); };
  const int before = copies();
  const Op sent = pair.near->send(bytes_of("x"), std::array{from->slice()}, from, {});
  next();
  expect_good(pair.far->accept(std::array{to->slice()}, to, {}));
  expect_good(sent);
  const int made = copies() - before;
  switch (GetParam().way) {
    case Way::Pinned: EXPECT_EQ(made, 20); break;  // chunks of half a MiB, copied out and in
    case Way::Direct: EXPECT_EQ(made, 0); break;
    case Way::ByName: EXPECT_EQ(made, 1); break;
  }
  EXPECT_TRUE(same(read(*to), payload));
}

TEST_P(DeviceClaims, EitherSideMayUseHostMemory) {
  for (const std::size_t bytes : {1000u, (1u << 20) + 7}) {
    SCOPED_TRACE(bytes);
    const auto first = pattern(1, bytes), second = pattern(2, bytes + 1), third = pattern(3, 5),
               fourth = pattern(4, bytes);
    const auto first_from = on_device(first), third_from = on_device(third);
    const auto second_to = bench.allocate(second.size()), third_to = bench.allocate(third.size());
    std::vector<std::byte> first_to(first.size()), fourth_to(fourth.size());
    const std::array payloads{first_from->slice(), slice_of(second), third_from->slice(), Slice{},
                              slice_of(fourth)};
    const Op sent = pair.near->send(bytes_of("mixed"), payloads, nullptr, {});
    EXPECT_EQ(next(), "mixed");
    EXPECT_EQ(arrived->sizes,
              (std::vector<std::uint64_t>{first.size(), second.size(), 5, 0, fourth.size()}));
    const std::array places{slice_of(first_to), second_to->slice(), third_to->slice(), Slice{},
                            slice_of(fourth_to)};
    expect_good(pair.far->accept(places, nullptr, {}));
    expect_good(sent);
    EXPECT_TRUE(same(first_to, first) && same(fourth_to, fourth));
    EXPECT_TRUE(same(read(*second_to), second) && same(read(*third_to), third));
  }
}

TEST_P(DeviceClaims, SlicesMayLieAnywhere) {
  const auto payload = pattern(2, 3 << 20);
  const auto from = on_device(payload);
  const auto to = on_device(std::vector<std::byte>(4 << 20));
  pair.near->send({}, std::array{from->slice().part(100'001, 1'500'000)}, from, {});
  next();
  expect_good(pair.far->accept(std::array{to->slice().part(77, 1'500'000)}, to, {}));
  auto expected = std::vector<std::byte>(4 << 20);
  std::copy_n(payload.begin() + 100'001, 1'500'000, expected.begin() + 77);
  EXPECT_TRUE(same(read(*to), expected));
}

TEST_P(DeviceClaims, HostAndDeviceMessagesKeepOrder) {
  const auto small = pattern(1, 64), large = pattern(2, 2 << 20);
  const auto small_from = on_device(small), large_from = on_device(large);
  std::vector<Op> ops;
  constexpr int kRounds = 20;
  for (int i = 0; i < kRounds; ++i) {
    ops.push_back(
        pair.near->send(bytes_of("small device"), std::array{small_from->slice()}, nullptr, {}));
    ops.push_back(pair.near->send(bytes_of("nothing"), {}, nullptr, {}));
    ops.push_back(
        pair.near->send(bytes_of("large device"), std::array{large_from->slice()}, nullptr, {}));
    ops.push_back(
        pair.near->send(bytes_of("small host"), std::array{slice_of(small)}, nullptr, {}));
    ops.push_back(
        pair.near->send(bytes_of("large host"), std::array{slice_of(large)}, nullptr, {}));
  }
  const auto small_to = bench.allocate(small.size()), large_to = bench.allocate(large.size());
  const auto take = [&](const std::string& header, const std::shared_ptr<Memory>& to,
                        const std::vector<std::byte>& what) {
    ASSERT_EQ(next(), header);
    expect_good(
        pair.far->accept(to ? std::vector{to->slice()} : std::vector<Slice>(), nullptr, {}));
    EXPECT_TRUE(!to || same(read(*to), what));
  };
  for (int i = 0; i < kRounds; ++i) {
    take("small device", small_to, small);
    take("nothing", nullptr, {});
    take("large device", large_to, large);
    take("small host", small_to, small);
    take("large host", large_to, large);
  }
  for (const Op& op : ops) expect_good(op);
}

TEST_P(DeviceClaims, PayloadsAreReadInOrderAfterTheStream) {
  for (const std::size_t bytes : {2000u, 2u << 20}) {
    const auto early = pattern(1, bytes), final = pattern(2, bytes);
    const auto from = on_device(early), to = bench.allocate(bytes);
    const Gate gate = bench.gate();
    const Op late = pair.near->send(bytes_of("late"), std::array{from->slice()}, from, gate.fence);
    const Op after = pair.near->send(bytes_of("after"), {}, nullptr, {});
    for (int i = 0; i < 10; ++i) flush(*pair.near_loop);
    EXPECT_FALSE(late.ended());
    // A message by CUDA IPC is sent at once, and so is the one behind it.
    if (GetParam().way != Way::ByName) {
      EXPECT_FALSE(after.ended());
    }
    from->write(final.data());
    gate.open();
    EXPECT_EQ(next(), "late");
    expect_good(pair.far->accept(std::array{to->slice()}, to, {}));
    EXPECT_TRUE(same(read(*to), final));
    EXPECT_EQ(next(), "after");
    expect_good(pair.far->accept({}, nullptr, {}));
    expect_good(late);
    expect_good(after);
  }
}

TEST_P(DeviceClaims, HostFlagsAreAwaitedToo) {
  const auto payload = pattern(1, 1 << 20);
  const auto from = on_device(payload), to = bench.allocate(payload.size());
  const auto sends = std::make_shared<HostFlag>(), accepts = std::make_shared<HostFlag>();
  const Op sent = pair.near->send(bytes_of("x"), std::array{from->slice()}, from, Fence(sends));
  for (int i = 0; i < 10; ++i) flush(*pair.near_loop);
  EXPECT_FALSE(sent.ended());
  sends->raise();
  next();
  const Op accepted = pair.far->accept(std::array{to->slice()}, to, Fence(accepts));
  for (int i = 0; i < 10; ++i) flush(*pair.far_loop);
  EXPECT_FALSE(accepted.ended());
  accepts->raise();
  expect_good(accepted);
  expect_good(sent);
  EXPECT_TRUE(same(read(*to), payload));
}

TEST_P(DeviceClaims, DestinationsAreWrittenAfterTheirFence) {
  for (const std::size_t bytes : {2000u, 6u << 20}) {  // more bytes than there are chunks for
    const auto payload = pattern(1, bytes), before = pattern(2, bytes);
    const auto from = on_device(payload), to = on_device(before);
    const Gate gate = bench.gate();
    const Op sent = pair.near->send(bytes_of("x"), std::array{from->slice()}, from, {});
    next();
    const Op accepted = pair.far->accept(std::array{to->slice()}, to, gate.fence);
    for (int i = 0; i < 10; ++i) flush(*pair.far_loop);
    EXPECT_FALSE(accepted.ended());
    EXPECT_TRUE(same(read(*to), before));
    gate.open();
    expect_good(accepted);
    EXPECT_TRUE(same(read(*to), payload));
    expect_good(sent);
  }
}

TEST_P(DeviceClaims, StreamsAwaitReceivesWithoutTheHost) {
  const auto payload = pattern(1, 3 << 20);
  const auto from = on_device(payload), to = bench.allocate(payload.size()),
             copy = bench.allocate(payload.size());
  cuda::Stream stream(*transport->device());
  const Gate gate = bench.gate();
  const int blocks = host_blocks();
  const Op sent = pair.near->send(bytes_of("x"), std::array{from->slice()}, from, gate.fence);
  // The whole chain is enqueued before the destination may be written.
  gate.open();
  next();
  const Gate overwrite = bench.gate();
  const Op accepted = pair.far->accept(std::array{to->slice()}, to, overwrite.fence);
  accepted.done().wait(stream);
  cuda::copy(stream, copy->slice(), to->slice());
  const Fence behind = cuda::record(stream);
  EXPECT_FALSE(behind.query());
  overwrite.open();
  EXPECT_TRUE(behind.synchronize(patience()));
  EXPECT_EQ(host_blocks(), blocks) << "the host was made to wait";
  EXPECT_TRUE(same(read(*copy), payload));
  expect_good(sent);
}

TEST_P(DeviceClaims, PinsAreHeldExactlyUntilDone) {
  const auto payload = pattern(1, 64 << 20);  // more than any buffer on the way holds
  auto from = on_device(payload), to = bench.allocate(payload.size());
  const std::weak_ptr<Memory> from_watch = from, to_watch = to;
  const Slice from_slice = from->slice(), to_slice = to->slice();
  const Op sent = pair.near->send({}, std::array{from_slice}, std::move(from), {});
  next();
  for (int i = 0; i < 10; ++i) flush(*pair.near_loop);
  EXPECT_FALSE(sent.ended());
  EXPECT_FALSE(from_watch.expired());
  const Op accepted = pair.far->accept(std::array{to_slice}, std::move(to), {});
  expect_good(accepted);
  expect_good(sent);
  EXPECT_TRUE(pair.near_loop->drive([&] { return from_watch.expired(); }, patience()));
  EXPECT_TRUE(pair.far_loop->drive([&] { return to_watch.expired(); }, patience()));
}

TEST_P(DeviceClaims, AcceptWithoutDestinationsDiscards) {
  const auto payload = pattern(1, 3 << 20);
  const auto from = on_device(payload);
  for (const std::size_t bytes : {100u, 3u << 20}) {
    const Op sent =
        pair.near->send(bytes_of("unwanted"), std::array{from->slice().part(0, bytes)}, from, {});
    EXPECT_EQ(next(), "unwanted");
    expect_good(pair.far->accept({}, nullptr, {}));
    expect_good(sent);
  }
}

TEST_P(DeviceClaims, ClosingKeepsMemoryPinnedForTheStream) {
  const Op first = pair.near->send(bytes_of("first"), {}, nullptr, {});
  next();
  expect_good(pair.far->accept({}, nullptr, {}));
  expect_good(first);  // so that later messages are sent at once
  auto from = on_device(pattern(1, 2 << 20));
  const std::weak_ptr<Memory> watch = from;
  const Slice slice = from->slice();
  const Gate gate = bench.gate();
  const Op waiting =
      pair.near->send(bytes_of("never"), std::array{slice}, std::move(from), gate.fence);
  const Op behind = pair.near->send(bytes_of("behind"), {}, nullptr, {});
  cuda::Stream stream(*transport->device());
  waiting.done().wait(stream);
  const Fence passed = cuda::record(stream);
  pair.near->close(Error(Blame::Cancelled, "enough"));
  EXPECT_EQ(failure_of(waiting).blame(), Blame::Cancelled);
  const bool is_by_name = GetParam().way == Way::ByName;
  if (!is_by_name) {  // by CUDA IPC, the message behind was sent at once
    EXPECT_EQ(failure_of(behind).blame(), Blame::Cancelled);
  }
  EXPECT_TRUE(passed.synchronize(patience())) << "a stream hangs on a failed operation";
  if (GetParam().way != Way::Direct) {  // by the direct way, no stream knows of the payload
    EXPECT_FALSE(watch.expired()) << "the stream has still to copy it";
  }
  gate.open();
  if (is_by_name) {
    EXPECT_FALSE(watch.expired()) << "the peer may still accept and read it";
    pair.far.reset();
  }
  EXPECT_TRUE(pair.near_loop->drive([&] { return watch.expired(); }, patience()));
  EXPECT_EQ(failure_of(pair.near->send({}, {}, nullptr, {})).blame(), Blame::Cancelled);
}

TEST_P(DeviceClaims, LostPeerFailsBothEndsAndPassesFences) {
  const auto payload = pattern(1, 64 << 20);
  const auto from = on_device(payload), to = bench.allocate(payload.size());
  const Op sent = pair.near->send(bytes_of("cut"), std::array{from->slice()}, from, {});
  next();
  const Gate gate = bench.gate();  // so that the accept does not end before the peer closes
  const Op accepted = pair.far->accept(std::array{to->slice()}, to, gate.fence);
  cuda::Stream stream(*transport->device());
  accepted.done().wait(stream);
  sent.done().wait(stream);
  const Fence behind = cuda::record(stream);
  pair.near->close(Error(Blame::Cancelled, "that was all"));
  EXPECT_EQ(failure_of(sent).blame(), Blame::Cancelled);
  if (GetParam().way == Way::ByName) {  // readable until this end learns of the close
    const auto has_heard = [this] {
      std::lock_guard lock(arrived->mutex);
      return arrived->has_ended;
    };
    EXPECT_TRUE(pair.far_loop->drive(has_heard, patience()));
  }
  gate.open();
  EXPECT_EQ(failure_of(accepted).blame(), Blame::PeerLost);
  EXPECT_TRUE(behind.synchronize(patience())) << "a stream hangs on a failed operation";
}

TEST_P(DeviceClaims, ForeignDeviceMemoryIsTheCallersError) {
  const auto payload = pattern(1, 100);
  Slice elsewhere = slice_of(payload);
  elsewhere.device = Device::cuda(7);
  const Error refused = failure_of(pair.near->send({}, std::array{elsewhere}, nullptr, {}));
  EXPECT_EQ(refused.blame(), Blame::Caller);
  EXPECT_NE(refused.text().find("cuda:7"), std::string::npos) << refused.what();
  const Op sent = pair.near->send(bytes_of("good"), std::array{slice_of(payload)}, nullptr, {});
  EXPECT_EQ(next(), "good");
  EXPECT_EQ(failure_of(pair.far->accept(std::array{elsewhere}, nullptr, {})).blame(),
            Blame::Caller);
  const auto to = bench.allocate(payload.size());
  expect_good(pair.far->accept(std::array{to->slice()}, to, {}));
  expect_good(sent);
  EXPECT_TRUE(same(read(*to), payload));
}

std::vector<Setting> settings() {
  std::vector<Setting> all;
  for (const std::string& backend : connecting_backends()) {
#ifdef WEFT_TEST_ON_GPU
    all.push_back({backend, Gpu::Real});
#else
    const bool may_reach = transport::open(backend)->connector()->capabilities().direct_bytes > 0;
    const bool is_direct =
        may_reach && config().gpu_direct == GpuDirect::PeerMemory;  // a fake GPU's is host memory
    all.push_back({backend, Gpu::Fake, is_direct ? Way::Direct : Way::Pinned});
    all.push_back({backend, Gpu::Fake, Way::ByName});
#endif
  }
  return all;
}
INSTANTIATE_TEST_SUITE_P(Transport, DeviceClaims, testing::ValuesIn(settings()), name_of);

}  // namespace
}  // namespace weft::conformance
