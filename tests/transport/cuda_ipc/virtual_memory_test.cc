// SPDX-License-Identifier: Apache-2.0
// Memory of virtual addresses over cuda_ipc connections: it is shared by file descriptors.
#include <cstdlib>
#include <thread>

#include <sys/socket.h>

#include <weft/tests/cuda/virtual_memory.h>
#include <weft/tests/harness/leftovers.h>
#include <weft/tests/transport/cuda_ipc/lanes.h>
#include <weft/transport/cuda_ipc/page.h>
#include <weft/transport/cuda_ipc/passing.h>

namespace weft::transport::cuda_ipc {
namespace {

constexpr std::size_t kSegment = cuda::VirtualMemory::kSegmentBytes;

class CudaIpcOfVirtualMemory : public Lanes {
 protected:
  using Lanes::Lanes;

  static std::shared_ptr<cuda::VirtualMemory> mapped(
      cuda::Device& device, std::size_t segments,
      cuda::VirtualMemory::Kind kind = cuda::VirtualMemory::Kind::Shareable) {
    return std::make_shared<cuda::VirtualMemory>(device, segments, kind);
  }
  // Sends one message and accepts it into `to`; returns the bytes there.
  std::vector<std::byte> pass(const Slice& from, const Slice& to) {
    const Op sent = near->send({}, std::array{from}, nullptr, {});
    next();
    expect_good(far->accept(std::array{to}, nullptr, {}));
    expect_good(sent);
    return read(to);
  }
  int imports() const { return fake.calls(&cuda::Driver::mem_import_from_shareable_handle); }
  int exports() const { return fake.calls(&cuda::Driver::mem_export_to_shareable_handle); }

  void TearDown() override {
    Lanes::TearDown();
    const auto alive = fake.alive();
    EXPECT_EQ(alive.physical_memories, 0u);
    EXPECT_EQ(alive.mappings, 0u);
    EXPECT_EQ(alive.reservations, 0u);
  }
};

TEST_F(CudaIpcOfVirtualMemory, EachSegmentIsPassedOnce) {
  open();
  receive();
  const auto memory = mapped(*device, 3);
  const Slice from = memory->slice().part(kSegment - 1000, kSegment + 3000);
  const auto to = shareable(from.bytes);
  write(from, pattern(1, from.bytes));
  const int copies = fake.calls(&cuda::Driver::memcpy_async);
  EXPECT_EQ(pass(from, to->slice()), pattern(1, from.bytes));
  EXPECT_EQ(fake.calls(&cuda::Driver::memcpy_async), copies + 3);
  EXPECT_EQ(imports(), 3);
  EXPECT_EQ(exports(), 3);
  write(from, pattern(2, from.bytes));
  EXPECT_EQ(pass(from, to->slice()), pattern(2, from.bytes));
  EXPECT_EQ(pass(from.part(500, 10), to->slice().part(0, 10)), read(from.part(500, 10)));
  EXPECT_EQ(imports(), 3);
  EXPECT_EQ(exports(), 3);
}

TEST_F(CudaIpcOfVirtualMemory, SegmentOfManyPayloadsIsPassedOnce) {
  open();
  receive();
  const auto memory = mapped(*device, 2);
  write(memory->slice().part(0, 300), pattern(1, 300));
  const auto to = shareable(300);
  const std::array payloads{memory->slice().part(0, 100), memory->slice().part(100, 100),
                            memory->slice().part(200, 100)};
  const std::array places{to->slice().part(0, 100), to->slice().part(100, 100),
                          to->slice().part(200, 100)};
  const Op sent = near->send({}, payloads, memory, {});
  next();
  expect_good(far->accept(places, to, {}));
  expect_good(sent);
  EXPECT_EQ(read(to->slice()), pattern(1, 300));
  EXPECT_EQ(imports(), 1);
}

TEST_F(CudaIpcOfVirtualMemory, RemappedSegmentReplacesTheFormer) {
  open();
  receive();
  const auto memory = mapped(*device, 1);
  const auto to = shareable(1000);
  for (std::uint32_t round = 1; round <= 3; ++round) {
    write(memory->segment(0).part(0, 1000), pattern(round, 1000));
    EXPECT_EQ(pass(memory->segment(0).part(0, 1000), to->slice()), pattern(round, 1000));
    EXPECT_EQ(imports(), static_cast<int>(round));
    EXPECT_TRUE(device->retirement().reclaim_all(patience()));
    EXPECT_EQ(fake.alive().physical_memories, 1u);
    EXPECT_EQ(fake.alive().mappings, 2u) << "one of the sender, one of the receiver";
    memory->unmap(0);
    memory->map(0);
  }
}

TEST_F(CudaIpcOfVirtualMemory, MixesWithOtherMemoryInAMessage) {
  open();
  receive();
  const auto memory = mapped(*device, 2);
  const Slice across = memory->slice().part(kSegment - 50, 100);
  write(across, pattern(1, 100));
  const auto plain = shareable(200, 2), plain_to = shareable(200), across_to = shareable(100);
  const auto on_host = pattern(3, 300);
  std::vector<std::byte> on_host_to(300), again_to(30);
  const std::array payloads{across, plain->slice(), slice_of(on_host), across.part(40, 30)};
  const std::array places{across_to->slice(), plain_to->slice(), slice_of(on_host_to),
                          slice_of(again_to)};
  const Op sent = near->send(bytes_of("mixed"), payloads, memory, {});
  EXPECT_EQ(next(), "mixed");
  expect_good(far->accept(places, nullptr, {}));
  expect_good(sent);
  EXPECT_EQ(read(across_to->slice()), pattern(1, 100));
  EXPECT_EQ(read(plain_to->slice()), pattern(2, 200));
  EXPECT_EQ(on_host_to, on_host);
  EXPECT_EQ(again_to, read(across.part(40, 30)));
}

TEST_F(CudaIpcOfVirtualMemory, UnshareableSegmentIsRefusedByName) {
  open();
  receive();
  const auto memory = mapped(*device, 1, cuda::VirtualMemory::Kind::Private);
  const Error error =
      failure_of(near->send({}, std::array{memory->segment(0).part(0, 10)}, memory, {}));
  EXPECT_EQ(error.blame(), Blame::Unsupported);
  EXPECT_THAT(error.text(), HasSubstr("CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR"));
  near->send(bytes_of("the connection goes on"), {}, nullptr, {});
  EXPECT_EQ(next(), "the connection goes on");
}

// A payload that takes the connection below does not describe any memory; another payload of the
// same message describes the part that can be shared.
TEST_F(CudaIpcOfVirtualMemory, PartlyUnshareablePayloadIsSentBelow) {
  open([this](std::shared_ptr<Connection> below, const std::shared_ptr<EventLoop>& loop) {
    return staged::over(std::move(below), stage, loop);
  });
  receive();
  const auto memory = mapped(*device, 2);
  memory->unmap(1);
  memory->map(1, /*is_shareable=*/false);
  const Slice across = memory->slice().part(kSegment - 50, 100);
  write(across, pattern(1, 100));
  const auto to = shareable(100), begin_to = shareable(50);
  const Op sent = near->send({}, std::array{across, across.part(0, 50)}, memory, {});
  next();
  expect_good(far->accept(std::array{to->slice(), begin_to->slice()}, to, {}));
  expect_good(sent);
  EXPECT_EQ(read(to->slice()), pattern(1, 100));
  EXPECT_EQ(read(begin_to->slice()), read(across.part(0, 50)));
  EXPECT_EQ(imports(), 1);
}

TEST_F(CudaIpcOfVirtualMemory, PiecesBeyondTheLimitAreSentBelow) {
  open([this](std::shared_ptr<Connection> below, const std::shared_ptr<EventLoop>& loop) {
    return staged::over(std::move(below), stage, loop);
  });
  receive();
  const std::size_t most = near->capabilities().max_payloads;
  const auto memory = mapped(*device, most + 1, cuda::VirtualMemory::Kind::Same);
  std::vector<Slice> payloads;
  for (std::size_t i = 0; i + 1 < most; ++i) payloads.push_back(memory->segment(i).part(0, 1));
  payloads.push_back(memory->slice().part(most * kSegment - 1, 2));  // two pieces
  write(payloads.back(), pattern(1, 2));
  std::vector<std::byte> bytes(most + 1);
  std::vector<Slice> places;
  for (std::size_t i = 0; i + 1 < most; ++i) places.push_back(slice_of(bytes).part(i, 1));
  places.push_back(slice_of(bytes).part(most - 1, 2));
  const Op sent = near->send({}, payloads, memory, {});
  next();
  expect_good(far->accept(places, nullptr, {}));
  expect_good(sent);
  EXPECT_EQ(imports(), static_cast<int>(most) - 1);
  EXPECT_EQ(read(places.back()), pattern(1, 2));
}

TEST_F(CudaIpcOfVirtualMemory, OpeningIsRetriedWithoutLeaks) {
  open();
  receive();
  const auto to = shareable(100);
  const auto fails_in = [&](auto function, const std::string& name) {
    SCOPED_TRACE(name);
    const auto memory = mapped(*device, 1);
    const Slice from = memory->segment(0).part(7, 100);
    write(from, pattern(1, 100));
    fake.fail(function, CUDA_ERROR_OUT_OF_MEMORY);
    const Op sent = near->send({}, std::array{from}, memory, {});
    next();
    const auto before = fake.alive();
    EXPECT_THAT(failure_of(far->accept(std::array{to->slice()}, to, {})).text(), HasSubstr(name));
    expect_good(sent);  // it will not be read any more
    EXPECT_EQ(fake.alive().mappings, before.mappings);
    EXPECT_EQ(fake.alive().reservations, before.reservations);
    EXPECT_EQ(pass(from, to->slice()), pattern(1, 100));
  };
  fails_in(&cuda::Driver::mem_import_from_shareable_handle, "cuMemImportFromShareableHandle");
  fails_in(&cuda::Driver::mem_address_reserve, "cuMemAddressReserve");
  fails_in(&cuda::Driver::mem_map, "cuMemMap");
  fails_in(&cuda::Driver::mem_set_access, "cuMemSetAccess");
}

TEST_F(CudaIpcOfVirtualMemory, OpensWhileAnotherThreadCaptures) {
  open();
  receive();
  const auto memory = mapped(*device, 1);
  const Slice from = memory->segment(0).part(0, 100);
  write(from, pattern(1, 100));
  const auto to = shareable(100);
  ASSERT_EQ(fake.begin_capture(stream), CUDA_SUCCESS);
  std::thread([&] {
    near->send({}, std::array{from}, memory, {});
    next();
    expect_good(far->accept(std::array{to->slice()}, to, {}));
  }).join();
  harness::FakeDriver::Graph graph;
  EXPECT_EQ(fake.end_capture(stream, graph), CUDA_SUCCESS);
  EXPECT_EQ(read(to->slice()), pattern(1, 100));
}

// Returns how many descriptors fit into a socket that is not read.
std::size_t room_of_a_socket() {
  int ends[2];
  EXPECT_EQ(::socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0, ends), 0);
  const Descriptor near(ends[0]), far(ends[1]);
  std::size_t count = 0;
  while (pass(near, std::array<std::byte, 8>(), far, "a test")) ++count;
  return count;
}

// Only next() drives the far loop, so no descriptor is taken before.
TEST_F(CudaIpcOfVirtualMemory, MessageWaitsForRoomInTheSocket) {
  far_loop = std::make_shared<EventLoop>("far", EventLoop::Thread::Given);
  open();
  receive();
  const auto expect_ends = [&](const Op& op) {  // it may end on either loop
    for (const Deadline limit = patience(); !op.ended() && !limit.passed();) {
      far_loop->drive([] { return false; }, Deadline::in(std::chrono::milliseconds(1)));
    }
    expect_good(op);
  };
  near->send(bytes_of("hello"), {}, nullptr, {});
  EXPECT_EQ(next(), "hello");
  expect_ends(far->accept({}, nullptr, {}));
  const std::size_t most = near->capabilities().max_payloads;
  ASSERT_LT(room_of_a_socket(), most)
      << "all descriptors fit the socket, so the message would not wait";
  const auto memory = mapped(*device, most, cuda::VirtualMemory::Kind::Same);
  write(memory->segment(0).part(0, most), pattern(1, most));
  const auto to = shareable(most);
  std::vector<Slice> payloads, places;
  for (std::size_t i = 0; i < most; ++i) {
    payloads.push_back(memory->segment(i).part(i, 1));
    places.push_back(to->slice().part(i, 1));
  }
  const Op sent = near->send(bytes_of("large"), payloads, memory, {});
  const Op behind = near->send(bytes_of("behind"), std::array{payloads[0]}, memory, {});
  EXPECT_EQ(next(), "large");
  expect_ends(far->accept(places, to, {}));
  expect_ends(sent);
  EXPECT_EQ(read(to->slice()), pattern(1, most));
  EXPECT_EQ(next(), "behind");
  expect_ends(far->accept({}, nullptr, {}));
  expect_ends(behind);
  EXPECT_EQ(exports(), static_cast<int>(most));
}

TEST_F(CudaIpcOfVirtualMemory, NoDescriptorIsLeftOpen) {
  const auto memory = mapped(*device, 5);
  const auto to = shareable(100);
  const auto before = harness::open_descriptors();
  open();
  receive();
  pass(memory->segment(3).part(0, 100), to->slice());
  const auto with_one = harness::open_descriptors();
  pass(memory->segment(0).part(0, 100), to->slice());
  EXPECT_EQ(harness::open_descriptors(), with_one + 1)
      << "the fake driver's file for the memory that it has imported";
  // Three more cases: passed and never opened; replaced before it was opened; passed but not yet
  // announced by a connection that ends.
  near->send({}, std::array{memory->segment(1).part(0, 100)}, memory, {});
  next();
  expect_good(far->accept({}, nullptr, {}));
  memory->unmap(1);
  memory->map(1);
  near->send({}, std::array{memory->segment(1).part(0, 100)}, memory, {});
  next();
  expect_good(far->accept({}, nullptr, {}));
  near->send({}, std::array{memory->segment(2).part(0, 100)}, memory, {});
  next();
  near->send({}, std::array{memory->segment(4).part(0, 100)}, memory, {});
  near.reset();
  far.reset();
  for (const Deadline limit = patience();
       harness::open_descriptors() != before && !limit.passed();) {
    device->retirement().reclaim();  // frees what the loops retire
    std::this_thread::yield();
  }
  EXPECT_EQ(harness::open_descriptors(), before);
}

TEST_F(CudaIpcOfVirtualMemory, WithoutASocketFolderIsRefusedByName) {
  const char* const folder = std::getenv("TMPDIR");
  const std::string former = folder == nullptr ? "" : folder;
  ::setenv("TMPDIR", "/nowhere", 1);
  open();
  folder == nullptr ? ::unsetenv("TMPDIR") : ::setenv("TMPDIR", former.c_str(), 1);
  receive();
  const auto memory = mapped(*device, 1);
  const Error error =
      failure_of(near->send({}, std::array{memory->segment(0).part(0, 10)}, memory, {}));
  EXPECT_EQ(error.blame(), Blame::Unsupported);
  EXPECT_THAT(error.text(), HasSubstr("set TMPDIR"));
  const auto plain = shareable(100, 1), to = shareable(100);
  EXPECT_EQ(pass(plain->slice(), to->slice()), pattern(1, 100));
}

// --- Messages that the connection below refuses

// A connection that refuses its next message if told to.
class Refusing final : public Connection {
 public:
  explicit Refusing(std::shared_ptr<Connection> below) : below_(std::move(below)) {}
  std::string_view transport() const override { return below_->transport(); }
  std::string peer() const override { return below_->peer(); }
  const Capabilities& capabilities() const override { return below_->capabilities(); }
  void receive(Handlers handlers) override { below_->receive(std::move(handlers)); }
  Op send(std::span<const std::byte> header, std::span<const Slice> payloads, Pin pin,
          Fence ready) noexcept override {
    if (refuses.exchange(false)) return Op::failed(Error(Blame::Busy, "too much"));
    return below_->send(header, payloads, std::move(pin), std::move(ready));
  }
  Op accept(std::span<const Slice> destinations, Pin pin, Fence ready) noexcept override {
    return below_->accept(destinations, std::move(pin), std::move(ready));
  }
  void close(const Error& why) noexcept override { below_->close(why); }

  std::atomic<bool> refuses{false};

 private:
  std::shared_ptr<Connection> below_;
};

// The descriptor has already been passed when the message is refused.
TEST_F(CudaIpcOfVirtualMemory, IsReadableAfterARefusedMessage) {
  std::shared_ptr<Refusing> below;
  open([&](std::shared_ptr<Connection> one,
           const std::shared_ptr<EventLoop>& loop) -> std::shared_ptr<Connection> {
    if (loop != near_loop) return one;
    return below = std::make_shared<Refusing>(std::move(one));
  });
  receive();
  const auto memory = mapped(*device, 3);
  const auto to = shareable(100);
  for (std::uint32_t i = 0; i < 3; ++i) write(memory->segment(i).part(0, 100), pattern(i, 100));
  EXPECT_EQ(pass(memory->segment(0).part(0, 100), to->slice()), pattern(0, 100));
  for (std::size_t i = 1; i < 3; ++i) {
    below->refuses = true;
    const Op sent = near->send({}, std::array{memory->segment(i).part(0, 100)}, memory, {});
    EXPECT_EQ(failure_of(sent).blame(), Blame::Busy);
  }
  EXPECT_EQ(pass(memory->segment(2).part(0, 100), to->slice()), pattern(2, 100));
  memory->unmap(1);  // the next message describes the segment's new memory
  memory->map(1);
  write(memory->segment(1).part(0, 100), pattern(7, 100));
  EXPECT_EQ(pass(memory->segment(1).part(0, 100), to->slice()), pattern(7, 100));
  below.reset();
}

// --- A peer written by hand

// A peer that connects and sends arbitrary bytes.
class CudaIpcWithStranger : public CudaIpcOfVirtualMemory {
 protected:
  void SetUp() override {
    CudaIpcOfVirtualMemory::SetUp();
    auto streams = inproc::make_streams(64 << 10);
    raw = connect_over(std::move(streams.a), inproc::capabilities(), "inproc", near_loop);
    letters = std::make_unique<Mailbox>(*raw, near_loop);
    far = over(connect_over(std::move(streams.b), inproc::capabilities(), "inproc", far_loop),
               stage, far_loop, here);
    receive();
    Gpu gpu;
    gpu.uuid = cuda::uuid_of(*device);
    for (std::size_t i = 0; i < kSlots; ++i) gpu.events.push_back(event->handle());
    raw->send(encode(Hello{there, page->name(), passing.name(), {gpu}}), {}, nullptr, {});
    raw->send(encode_reach(1), {}, nullptr, {});
    letters->next();
    letters->next();  // the far end's hello, and which GPUs it reaches
  }
  void TearDown() override {
    letters.reset();
    raw.reset();
    event.reset();
    CudaIpcOfVirtualMemory::TearDown();
  }
  void tell(const Piece& piece) {
    Shared message;
    message.payloads = {{piece.bytes, {piece}}};
    raw->send(encode(message), {}, nullptr, {});
  }

  std::optional<cuda::SharedEvent> event{*device};
  std::shared_ptr<Page> page = Page::make();
  PassingEnd passing;
  std::shared_ptr<Connection> raw;
  std::unique_ptr<Mailbox> letters;
};

TEST_F(CudaIpcWithStranger, ClaimedSizesAreNotTrusted) {
  ASSERT_FALSE(passing.why_not(here.process));
  const auto memory = mapped(*device, 1);
  write(memory->segment(0).part(0, 100), pattern(1, 100));
  const auto to = shareable(100);
  const auto pass_as = [&](std::uint64_t allocation) {
    const Descriptor descriptor = cuda::PhysicalMemory::at(*device, memory->address(0))->share();
    EXPECT_EQ(passing.pass(allocation, descriptor), PassingEnd::Outcome::Passed);
  };
  pass_as(1);
  tell({.bytes = 100, .allocation = 1, .offset = kSegment, .passed = 2 * kSegment});
  next();
  EXPECT_THAT(failure_of(far->accept(std::array{to->slice()}, to, {})).text(),
              HasSubstr("cuMemMap"));
  pass_as(2);
  tell({.bytes = 100, .allocation = 2, .passed = kSegment});
  next();
  expect_good(far->accept(std::array{to->slice()}, to, {}));
  EXPECT_EQ(read(to->slice()), pattern(1, 100));
  // Nor may a piece exceed the size that the peer itself announced.
  tell({.bytes = 100, .allocation = 2, .offset = kSegment});
  next();
  EXPECT_EQ(failure_of(far->accept(std::array{to->slice()}, to, {})).blame(), Blame::Protocol);
}

TEST_F(CudaIpcWithStranger, ForeignDescriptorsAreNotOpened) {
  ASSERT_FALSE(passing.why_not(here.process));
  const auto to = shareable(100);
  EXPECT_EQ(passing.pass(1, Descriptor(::dup(STDERR_FILENO))), PassingEnd::Outcome::Passed);
  tell({.bytes = 100, .allocation = 1, .passed = kSegment});
  next();
  EXPECT_THAT(failure_of(far->accept(std::array{to->slice()}, to, {})).text(),
              HasSubstr("cuMemImportFromShareableHandle"));
}

TEST_F(CudaIpcWithStranger, UnconnectedPeerIsPassedNothing) {
  const auto memory = mapped(*device, 1);
  const Error error =
      failure_of(far->send({}, std::array{memory->segment(0).part(0, 10)}, memory, {}));
  EXPECT_EQ(error.blame(), Blame::Unsupported);
  EXPECT_THAT(error.text(), HasSubstr("has not connected"));
}

TEST_F(CudaIpcWithStranger, OtherProcessesAreNotThePeer) {
  const std::uint64_t nobody = here.process + 1;
  EXPECT_THAT(passing.why_not(nobody).value_or(""), HasSubstr("has not connected"));
  EXPECT_EQ(passing.name(), 0u) << "the passing end still listens";
  EXPECT_EQ(passing.pass(1, Descriptor(::dup(STDERR_FILENO))), PassingEnd::Outcome::Gone);
}

// --- Two GPUs

class CudaIpcOfVirtualMemoryOnTwoGpus : public OfTwoGpus<CudaIpcOfVirtualMemory> {
 protected:
  CudaIpcOfVirtualMemoryOnTwoGpus()
      : OfTwoGpus({.devices = 2, .threads = true, .is_two_processes = true}) {}
};

TEST_F(CudaIpcOfVirtualMemoryOnTwoGpus, IsMappedForTheReadingGpu) {
  open_apart();
  receive();
  const auto memory = mapped(*device, 1);
  write(memory->segment(0).part(0, 100), pattern(1, 100));
  const auto to = std::make_shared<cuda::ShareableMemory>(*other, 100);
  EXPECT_EQ(pass(memory->segment(0).part(0, 100), to->slice()), pattern(1, 100));
}

}  // namespace
}  // namespace weft::transport::cuda_ipc
