// SPDX-License-Identifier: Apache-2.0
#include <atomic>
#include <functional>
#include <thread>

#include <weft/base/make_error.h>
#include <weft/tests/transport/cuda_ipc/lanes.h>
#include <weft/transport/cuda_ipc/page.h>

namespace weft::transport::cuda_ipc {
namespace {

class CudaIpc : public Lanes {};

TEST_F(CudaIpc, OneCopyCarriesDeviceMemory) {
  open();
  receive();
  const auto from = shareable(5 << 20, 1), to = shareable(3 << 20);
  const int copies = fake.calls(&cuda::Driver::memcpy_async);
  const Op sent =
      near->send(bytes_of("x"), std::array{from->slice().part(1001, 3 << 20)}, from, {});
  EXPECT_EQ(next(), "x");
  EXPECT_EQ(arrived->sizes, std::vector<std::uint64_t>{3 << 20});
  expect_good(far->accept(std::array{to->slice()}, to, {}));
  expect_good(sent);
  EXPECT_EQ(read(to->slice()), read(from->slice().part(1001, 3 << 20)));
  EXPECT_EQ(fake.calls(&cuda::Driver::memcpy_async), copies + 1);
}

TEST_F(CudaIpc, NoHostWaitsBetweenTheStreams) {
  open();
  receive();
  const auto from = shareable(1 << 20, 1), to = shareable(1 << 20), copy = shareable(1 << 20);
  expect_good([&] {  // opens the allocation, which blocks
    near->send({}, std::array{from->slice()}, from, {});
    next();
    return far->accept(std::array{to->slice()}, to, {});
  }());
  const auto kernel = stage->flags().make();  // stands for a kernel that writes `from`
  kernel->wait(stream);
  const int blocks = fake.host_blocks();
  const Op sent = near->send(bytes_of("x"), std::array{from->slice()}, from, cuda::record(stream));
  EXPECT_EQ(next(), "x") << "the message waited for the sender's stream";
  const Op accepted = far->accept(std::array{to->slice()}, to, {});
  cuda::Stream theirs(*device);
  accepted.done().wait(theirs);
  cuda::copy(theirs, copy->slice(), to->slice());
  const Fence behind = cuda::record(theirs);
  EXPECT_FALSE(behind.query() || accepted.done().query() || sent.done().query());
  const auto final = pattern(7, 1 << 20);
  write(from->slice(), final);
  kernel->raise();
  EXPECT_TRUE(behind.synchronize(patience()));
  EXPECT_EQ(read(copy->slice()), final);
  expect_good(accepted);
  expect_good(sent);
  EXPECT_EQ(fake.host_blocks(), blocks) << "the host was made to wait";
}

TEST_F(CudaIpc, EachAllocationIsOpenedOnce) {
  open();
  receive();
  const auto to = shareable(1000);
  auto from = shareable(4000, 1);
  const auto other = shareable(100, 2);
  for (int i = 0; i < 5; ++i) {
    near->send({}, std::array{from->slice().part(static_cast<std::size_t>(i) * 100, 1000)}, from,
               {});
    next();
    expect_good(far->accept(std::array{to->slice()}, to, {}));
    EXPECT_EQ(read(to->slice()), read(from->slice().part(static_cast<std::size_t>(i) * 100, 1000)));
  }
  EXPECT_EQ(fake.calls(&cuda::Driver::ipc_open_mem_handle), 1);
  EXPECT_EQ(fake.calls(&cuda::Driver::ipc_get_mem_handle), 1);
  near->send({}, std::array{other->slice()}, other, {});
  next();
  expect_good(far->accept(std::array{to->slice().part(0, 100)}, to, {}));
  EXPECT_EQ(fake.calls(&cuda::Driver::ipc_open_mem_handle), 2);
}

// A driver returns ALREADY_MAPPED if this process still has memory open at an address that the peer
// has freed and allocated again.
TEST_F(CudaIpc, StaleMappingsAreClosedFirst) {
  open();
  receive();
  const auto to = shareable(100), first = shareable(100, 1), second = shareable(100, 2);
  const auto pass = [&](const auto& from) {
    near->send({}, std::array{from->slice()}, from, {});
    next();
    expect_good(far->accept(std::array{to->slice()}, to, {}));
    EXPECT_EQ(read(to->slice()), read(from->slice()));
  };
  pass(first);
  fake.fail(&cuda::Driver::ipc_open_mem_handle, CUDA_ERROR_ALREADY_MAPPED);
  const int closed = fake.calls(&cuda::Driver::ipc_close_mem_handle);
  pass(second);
  EXPECT_EQ(fake.calls(&cuda::Driver::ipc_close_mem_handle), closed + 1);
  pass(first);
  EXPECT_EQ(fake.calls(&cuda::Driver::ipc_open_mem_handle), 4)
      << "one attempt was refused, and the first allocation was opened again";
}

TEST_F(CudaIpc, MessagesBeyondTheSlotsKeepOrder) {
  open();
  receive();
  const auto from = shareable(100 * 64, 1), to = shareable(64);
  std::vector<Op> sent;
  for (std::size_t i = 0; i < 100; ++i) {
    sent.push_back(near->send(bytes_of(std::to_string(2 * i)),
                              std::array{from->slice().part(i * 64, 64)}, from, {}));
    sent.push_back(near->send(bytes_of(std::to_string(2 * i + 1)), {}, nullptr, {}));
  }
  for (std::size_t i = 0; i < 200; ++i) {
    ASSERT_EQ(next(), std::to_string(i));
    const std::vector<Slice> places(i % 2 == 0 ? 1 : 0, to->slice());
    expect_good(far->accept(places, to, {}));
    ASSERT_TRUE(i % 2 == 1 || read(to->slice()) == read(from->slice().part(i / 2 * 64, 64)));
  }
  for (const Op& op : sent) expect_good(op);
}

TEST_F(CudaIpc, EitherSideMayUseHostMemory) {
  open();
  receive();
  const std::size_t bytes = 2 * staged::kChunkBytes + 7;
  const auto first = shareable(bytes, 1), third = shareable(5, 3);
  const auto second = pattern(2, 1000);
  std::vector<std::byte> first_to(bytes), second_to(1000);
  const auto third_to = shareable(5);
  const std::array payloads{first->slice(), slice_of(second), Slice{nullptr, 0, device->id()},
                            third->slice()};
  const Op sent = near->send(bytes_of("mixed"), payloads, nullptr, {});
  EXPECT_EQ(next(), "mixed");
  EXPECT_EQ(arrived->sizes, (std::vector<std::uint64_t>{bytes, 1000, 0, 5}));
  const std::array places{slice_of(first_to), slice_of(second_to), Slice{nullptr, 0, device->id()},
                          third_to->slice()};
  expect_good(far->accept(places, nullptr, {}));
  expect_good(sent);
  EXPECT_EQ(first_to, pattern(1, bytes));
  EXPECT_EQ(second_to, second);
  EXPECT_EQ(read(third_to->slice()), pattern(3, 5));
}

TEST_F(CudaIpc, DestinationsAreWrittenAfterTheirFence) {
  open();
  receive();
  const auto from = shareable(100, 1), to = shareable(100, 2);
  const auto gate = stage->flags().make();
  gate->wait(stream);
  near->send({}, std::array{from->slice()}, from, {});
  next();
  const Op on_stream = far->accept(std::array{to->slice()}, to, cuda::record(stream));
  for (int i = 0; i < 10; ++i)
    far_loop->drive([] { return false; }, Deadline::in(std::chrono::milliseconds(1)));
  EXPECT_FALSE(on_stream.ended());
  EXPECT_EQ(read(to->slice()), pattern(2, 100));
  gate->raise();
  expect_good(on_stream);
  EXPECT_EQ(read(to->slice()), pattern(1, 100));
  // The same with fences that only the host can see, on both sides.
  write(from->slice(), pattern(3, 100));
  const auto sends = std::make_shared<HostFlag>(), accepts = std::make_shared<HostFlag>();
  const Op sent = near->send({}, std::array{from->slice()}, from, Fence(sends));
  sends->raise();
  next();
  const Op on_host = far->accept(std::array{to->slice()}, to, Fence(accepts));
  EXPECT_FALSE(on_host.done().query());
  accepts->raise();
  expect_good(on_host);
  expect_good(sent);
  EXPECT_EQ(read(to->slice()), pattern(3, 100));
}

TEST_F(CudaIpc, ClosingKeepsMemoryPinnedUntilRead) {
  open();
  receive();
  auto from = shareable(100, 1);
  const std::weak_ptr<cuda::ShareableMemory> watch = from;
  const Slice slice = from->slice();
  const auto to = shareable(100);
  fake.hold(&cuda::Driver::memcpy_async);
  const Op sent = near->send({}, std::array{slice}, std::move(from), {});
  next();
  const Op accepted = far->accept(std::array{to->slice()}, to, {});
  near->close(Error(Blame::Cancelled, "enough"));
  EXPECT_EQ(failure_of(sent).blame(), Blame::Cancelled);
  EXPECT_FALSE(watch.expired()) << "the peer's stream reads it";
  fake.release(&cuda::Driver::memcpy_async);
  EXPECT_TRUE(near_loop->drive([&] { return watch.expired(); }, patience()));
  EXPECT_TRUE(accepted.done().synchronize(patience()));
  if (!accepted.error()) {
    EXPECT_EQ(read(to->slice()), pattern(1, 100));
  }
}

TEST_F(CudaIpc, UnwantedPayloadsAreReleased) {
  open();
  receive();
  const auto from = shareable(100, 1);
  const Op sent = near->send({}, std::array{from->slice()}, from, {});
  next();
  expect_good(far->accept({}, nullptr, {}));
  expect_good(sent);
  // The receiver knows the allocation from the first message; the sender does not describe it
  // again.
  const auto to = shareable(100);
  const Op again = near->send({}, std::array{from->slice()}, from, {});
  next();
  expect_good(far->accept(std::array{to->slice()}, to, {}));
  expect_good(again);
  EXPECT_EQ(read(to->slice()), pattern(1, 100));
}

TEST_F(CudaIpc, OpeningIsRetriedAfterAFailure) {
  open();
  receive();
  const auto from = shareable(100, 1), to = shareable(100);
  fake.fail(&cuda::Driver::ipc_open_mem_handle, CUDA_ERROR_OUT_OF_MEMORY);
  const Op first = near->send({}, std::array{from->slice()}, from, {});
  next();
  EXPECT_THAT(failure_of(far->accept(std::array{to->slice()}, to, {})).text(),
              HasSubstr("cuIpcOpenMemHandle"));
  expect_good(first);
  const Op second = near->send({}, std::array{from->slice()}, from, {});
  next();
  expect_good(far->accept(std::array{to->slice()}, to, {}));
  expect_good(second);
  EXPECT_EQ(read(to->slice()), pattern(1, 100));
}

TEST_F(CudaIpc, FailedCopyToHostKeepsConnection) {
  open();
  receive();
  const auto from = shareable(1000, 1);
  std::vector<std::byte> to(1000);
  fake.fail(&cuda::Driver::memcpy_async, CUDA_ERROR_NOT_SUPPORTED);
  const Op first = near->send({}, std::array{from->slice()}, from, {});
  next();
  EXPECT_THAT(failure_of(far->accept(std::array{slice_of(to)}, nullptr, {})).text(),
              HasSubstr("to the host"));
  expect_good(first);  // it will not be read any more
  for (std::size_t i = 0; i < 2 * kSlots; ++i) {
    const Op sent = near->send({}, std::array{from->slice()}, from, {});
    next();
    expect_good(far->accept(std::array{slice_of(to)}, nullptr, {}));
    expect_good(sent);
  }
  EXPECT_EQ(to, pattern(1, 1000));
}

// A connection that refuses its next message in send(), or fails it later, or lets the peer read it
// before send() returns.
class Refusing final : public Connection {
 public:
  enum class Next { Goes, IsReadAtOnce, IsRefused, IsUnderWay };
  explicit Refusing(std::shared_ptr<Connection> below) : below_(std::move(below)) {}

  std::string_view transport() const override { return below_->transport(); }
  std::string peer() const override { return below_->peer(); }
  const Capabilities& capabilities() const override { return below_->capabilities(); }
  void receive(Handlers handlers) override { below_->receive(std::move(handlers)); }
  Op send(std::span<const std::byte> header, std::span<const Slice> payloads, Pin pin,
          Fence ready) noexcept override {
    switch (next.exchange(Next::Goes)) {
      case Next::Goes: return below_->send(header, payloads, std::move(pin), std::move(ready));
      case Next::IsReadAtOnce: {
        Op sent = below_->send(header, payloads, std::move(pin), std::move(ready));
        once_sent();
        return sent;
      }
      case Next::IsRefused: return Op::failed(Error(Blame::Busy, "too much"));
      case Next::IsUnderWay: return under_way.op();
    }
    return {};
  }
  Op accept(std::span<const Slice> destinations, Pin pin, Fence ready) noexcept override {
    return below_->accept(destinations, std::move(pin), std::move(ready));
  }
  void close(const Error& why) noexcept override { below_->close(why); }

  std::function<void()> once_sent;  // reads the message
  std::atomic<Next> next{Next::Goes};
  Completion under_way{Pin(), std::make_shared<HostFlag>()};

 private:
  std::shared_ptr<Connection> below_;
};

class CudaIpcOverRefusing : public CudaIpc {
 protected:
  void SetUp() override {
    CudaIpc::SetUp();
    open([&](std::shared_ptr<Connection> one,
             const std::shared_ptr<EventLoop>& loop) -> std::shared_ptr<Connection> {
      if (loop != near_loop) return one;
      return below = std::make_shared<Refusing>(std::move(one));
    });
    receive();
    near->send(bytes_of("hello"), {}, nullptr, {});
    next();
    expect_good(far->accept({}, nullptr, {}));
  }
  void TearDown() override {
    below.reset();
    CudaIpc::TearDown();
  }
  std::shared_ptr<Refusing> below;
};

TEST_F(CudaIpcOverRefusing, RefusedMessagesLeaveNoTrace) {
  const auto from = shareable(100, 1), to = shareable(100);
  for (std::size_t i = 0; i < 2 * kSlots; ++i) {
    below->next = Refusing::Next::IsRefused;
    EXPECT_EQ(failure_of(near->send({}, std::array{from->slice()}, from, {})).blame(), Blame::Busy);
  }
  const Op sent = near->send({}, std::array{from->slice()}, from, {});
  next();
  expect_good(far->accept(std::array{to->slice()}, to, {}));
  expect_good(sent);
  EXPECT_EQ(read(to->slice()), pattern(1, 100));
}

TEST_F(CudaIpcOverRefusing, LostMessageEndsTheConnection) {
  const auto from = shareable(100, 1), to = shareable(100);
  near->send({}, std::array{from->slice()}, from, {});
  next();
  expect_good(far->accept(std::array{to->slice()}, to, {}));
  below->next = Refusing::Next::IsUnderWay;
  const Op lost = near->send({}, std::array{from->slice()}, from, {});
  const Op behind = near->send({}, std::array{from->slice()}, from, {});
  below->under_way.fail(Error(Blame::Device, "it could not be copied"));
  EXPECT_THAT(failure_of(lost).text(), HasSubstr("it could not be copied"));
  EXPECT_THAT(failure_of(behind).text(), HasSubstr("it could not be copied"));
}

// The sender's loop may find the message read while send() still holds the sender's mutex.
TEST_F(CudaIpcOverRefusing, MessageMayBeReadBeforeSendReturns) {
  const auto from = shareable(100, 1), to = shareable(100);
  below->once_sent = [&] {
    next();
    expect_good(far->accept(std::array{to->slice()}, to, {}));
  };
  for (std::size_t i = 0; i < 20 * kSlots; ++i) {
    below->next = Refusing::Next::IsReadAtOnce;
    expect_good(near->send({}, std::array{from->slice()}, from, {}));
    EXPECT_EQ(read(to->slice()), pattern(1, 100));
  }
}

TEST_F(CudaIpc, OpensMemoryWhileAThreadCaptures) {
  open();
  receive();
  const auto from = shareable(100, 1), to = shareable(100);
  ASSERT_EQ(fake.begin_capture(stream), CUDA_SUCCESS);
  near->send({}, std::array{from->slice()}, from, {});
  next();
  std::thread([&] { expect_good(far->accept(std::array{to->slice()}, to, {})); }).join();
  harness::FakeDriver::Graph graph;
  EXPECT_EQ(fake.end_capture(stream, graph), CUDA_SUCCESS);
  EXPECT_EQ(read(to->slice()), pattern(1, 100));
}

TEST_F(CudaIpc, LostPeerFailsUnreadSends) {
  open();
  receive();
  auto from = shareable(100, 1);
  const std::weak_ptr<cuda::ShareableMemory> watch = from;
  const Slice slice = from->slice();
  const Op sent = near->send({}, std::array{slice}, std::move(from), {});
  next();
  sent.done().wait(stream);
  const Fence behind = cuda::record(stream);
  far.reset();
  EXPECT_EQ(failure_of(sent).blame(), Blame::PeerLost);
  EXPECT_TRUE(behind.synchronize(patience()));
  EXPECT_TRUE(near_loop->drive([&] { return watch.expired(); }, patience()));
}

TEST_F(CudaIpc, UnshareableMemoryIsRefusedByName) {
  open();
  receive();
  const cuda::DeviceMemory pooled(stream, 100);
  EXPECT_TRUE(cuda::record(stream).synchronize(patience()));
  const Error error = failure_of(near->send({}, std::array{pooled.slice()}, nullptr, {}));
  EXPECT_EQ(error.blame(), Blame::Unsupported);
  EXPECT_THAT(error.text(), HasSubstr("not of cuMemAlloc"));
  near->send(bytes_of("the connection goes on"), {}, nullptr, {});
  EXPECT_EQ(next(), "the connection goes on");
}

TEST_F(CudaIpc, UnshareableMemoryIsSentBelow) {
  open([this](std::shared_ptr<Connection> below, const std::shared_ptr<EventLoop>& loop) {
    return staged::over(std::move(below), stage, loop);
  });
  receive();
  const std::size_t bytes = 3 * staged::kChunkBytes;
  const cuda::DeviceMemory pooled(stream, bytes);
  EXPECT_TRUE(cuda::record(stream).synchronize(patience()));
  write(pooled.slice(), pattern(4, bytes));
  const auto shared = shareable(100, 5), shared_to = shareable(100), to = shareable(bytes);
  const Op sent = near->send({}, std::array{pooled.slice(), shared->slice()}, shared, {});
  next();
  expect_good(far->accept(std::array{to->slice(), shared_to->slice()}, to, {}));
  expect_good(sent);
  EXPECT_EQ(read(to->slice()), pattern(4, bytes));
  EXPECT_EQ(read(shared_to->slice()), pattern(5, 100));
}

TEST_F(CudaIpc, UnreachablePeerIsRefusedWithReason) {
  const auto refusal = [&] {
    arrived = std::make_shared<Kept>();
    seen = 0;
    open();
    receive();
    const auto from = shareable(100);
    const Error error = failure_of(near->send({}, std::array{from->slice()}, from, {}));
    EXPECT_EQ(error.blame(), Blame::Unsupported);
    near->send(bytes_of("from the host"), {}, nullptr, {});
    EXPECT_EQ(next(), "from the host");
    return error.text();
  };
  there = here;
  EXPECT_THAT(refusal(), HasSubstr("same process"));
  there.host = "elsewhere";
  EXPECT_THAT(refusal(), HasSubstr("on another host"));
  there = here;
  there.processes = "4711";
  EXPECT_THAT(refusal(), HasSubstr("in another container"));
  there.host.clear();
  EXPECT_THAT(refusal(), HasSubstr("/proc does not tell the peer"));
}

TEST_F(CudaIpc, MalformedHellosEndTheConnection) {
  const Hello hello{there, {}, 0, {}};
  auto cut = encode(hello), late = encode_plain({});
  cut.pop_back();
  Hello stranger = hello;
  stranger.identity.process = here.process;
  stranger.page.descriptor = 0;  // descriptor 0 is not a page
  const auto page = Page::make();
  Hello reused = stranger;
  reused.page = page->name();
  ++reused.page.key;  // another connection has the descriptor by now
  for (const auto& [first, text] :
       {std::pair{std::vector<std::byte>(), "no hello"}, std::pair{late, "no hello"},
        std::pair{cut, "wrong length"}, std::pair{encode(stranger), "page of process"},
        std::pair{encode(reused), "was closed"}}) {
    SCOPED_TRACE(text);
    auto streams = inproc::make_streams(64 << 10);
    const auto raw =
        connect_over(std::move(streams.a), inproc::capabilities(), "inproc", near_loop);
    const auto end =
        over(connect_over(std::move(streams.b), inproc::capabilities(), "inproc", far_loop), stage,
             far_loop, here);
    Mailbox mail(*end, far_loop);
    raw->send(first, {}, nullptr, {});
    const Error why = mail.wait_closed();
    EXPECT_TRUE(ends_connection(why.blame())) << why.what();
    EXPECT_THAT(why.text(), HasSubstr(text));
  }
  EXPECT_EQ(page->closed(), 0u) << "the other connection's page was marked closed";
}

TEST_F(CudaIpc, PeerNamingUnknownMemoryIsLost) {
  const auto page = Page::make();
  Gpu gpu;
  gpu.uuid = cuda::uuid_of(*device);
  gpu.events.resize(kSlots);
  const Piece told{.bytes = 100, .allocation = 1, .handle = cuda::IpcHandle{}};
  const Piece successor{.bytes = 100, .allocation = 2, .replaces = 1, .handle = cuda::IpcHandle{}};
  const Piece unknown{.bytes = 100, .allocation = 7},
      not_passed{.bytes = 100, .allocation = 7, .passed = 4096};
  for (const auto& [pieces, text] : {std::pair{std::vector{unknown}, "has not described"},
                                     std::pair{std::vector{told, successor}, "has not described"},
                                     std::pair{std::vector{not_passed}, "without passing"}}) {
    SCOPED_TRACE(pieces.size());
    auto streams = inproc::make_streams(64 << 10);
    const auto raw =
        connect_over(std::move(streams.a), inproc::capabilities(), "inproc", near_loop);
    const auto end =
        over(connect_over(std::move(streams.b), inproc::capabilities(), "inproc", far_loop), stage,
             far_loop, here);
    Mailbox mail(*end, far_loop);
    raw->send(encode(Hello{there, page->name(), 0, {gpu}}), {}, nullptr, {});
    raw->send(encode_reach(0), {}, nullptr, {});
    Shared message;
    for (const Piece& piece : pieces) message.payloads.push_back({100, {piece}});
    raw->send(encode(message), {}, nullptr, {});
    const Error why = mail.wait_closed();
    EXPECT_EQ(why.blame(), Blame::Protocol);
    EXPECT_THAT(why.text(), HasSubstr(text));
  }
}

TEST_F(CudaIpc, MalformedMessagesAreRefused) {
  const Capabilities limits = capabilities_over(inproc::capabilities());
  Shared message;
  const Piece by_handle{.bytes = 60, .allocation = 1, .offset = 5, .handle = cuda::IpcHandle{}};
  const Piece by_descriptor{.bytes = 40, .allocation = 2, .replaces = 3, .offset = 6, .passed = 46};
  message.payloads = {{100, {by_handle, by_descriptor}}, {7, {}}};
  const auto header = bytes_of("header");
  message.header = header;
  const std::vector<std::byte> good = encode(message);
  const std::uint64_t size = 7, other = 8;
  const auto decoded = decode_shared(good, {&size, 1}, limits);
  ASSERT_TRUE(decoded);
  const std::vector<Piece>& pieces = decoded.value().payloads[0].pieces;
  ASSERT_EQ(pieces.size(), 2u);
  EXPECT_EQ(pieces[0].offset, 5u);
  EXPECT_TRUE(pieces[0].handle && pieces[0].passed == 0);
  EXPECT_EQ(pieces[1].bytes, 40u);
  EXPECT_EQ(pieces[1].allocation, 2u);
  EXPECT_EQ(pieces[1].replaces, 3u);
  EXPECT_TRUE(!pieces[1].handle && pieces[1].passed == 46);
  EXPECT_EQ(decoded.value().header.size(), header.size());
  EXPECT_FALSE(decode_shared(good, {&other, 1}, limits));
  EXPECT_FALSE(decode_shared(good, {}, limits));
  for (std::size_t bytes = 0; bytes + header.size() < good.size(); ++bytes) {
    EXPECT_FALSE(decode_shared(Bytes(good).first(bytes), {&size, 1}, limits)) << bytes;
  }
  message.slot = kSlots;
  EXPECT_FALSE(decode_shared(encode(message), {&size, 1}, limits));
  message.slot = 0;
  message.payloads[0].bytes = limits.max_message + 1;
  EXPECT_FALSE(decode_shared(encode(message), {&size, 1}, limits));
}

TEST_F(CudaIpc, ImpossiblePiecesAreRefused) {
  const Capabilities limits = capabilities_over(inproc::capabilities());
  const auto is_refused = [&](std::uint64_t bytes, std::vector<Piece> pieces) {
    Shared message;
    message.payloads = {{bytes, std::move(pieces)}};
    return !decode_shared(encode(message), {}, limits);
  };
  const Piece good{.bytes = 40, .allocation = 2, .offset = 6, .passed = 46};
  EXPECT_FALSE(is_refused(40, {good}));
  EXPECT_TRUE(is_refused(41, {good})) << "the pieces are smaller than the payload";
  EXPECT_TRUE(is_refused(39, {good})) << "the pieces are larger than the payload";
  EXPECT_TRUE(is_refused(40, {good, {.bytes = 0, .allocation = 1}}));
  EXPECT_TRUE(is_refused(40, {{.bytes = 40, .allocation = 2, .offset = 7, .passed = 46}}));
  EXPECT_TRUE(
      is_refused(40, {{.bytes = 40, .allocation = 2, .offset = ~std::uint64_t{0}, .passed = 46}}));
  EXPECT_TRUE(is_refused(40, {{.bytes = 40, .allocation = 2, .passed = 39}}));
  const std::vector<Piece> many(limits.max_payloads, {.bytes = 1, .allocation = 1});
  EXPECT_FALSE(is_refused(many.size(), many));
  Shared message;
  message.payloads = {{many.size(), many}, {1, {{.bytes = 1, .allocation = 1}}}};
  EXPECT_FALSE(decode_shared(encode(message), {}, limits)) << "more pieces in all than the limit";
  // The last byte says how a piece is described; there is no such way.
  message.payloads = {{1, {{.bytes = 1, .allocation = 1}}}};
  auto bytes = encode(message);
  EXPECT_TRUE(decode_shared(bytes, {}, limits));
  bytes.back() = std::byte{3};
  EXPECT_FALSE(decode_shared(bytes, {}, limits));
}

TEST_F(CudaIpc, LargestMessageFitsConnectionBelow) {
  const Capabilities below = inproc::capabilities();
  const Capabilities limits = capabilities_over(below);
  Shared message;
  const Piece piece{.bytes = 1, .allocation = 1, .handle = cuda::IpcHandle{}};
  message.payloads.assign(limits.max_payloads, {1, {piece}});
  const std::vector<std::byte> header(limits.max_header);
  message.header = header;
  EXPECT_LE(encode(message).size(), below.max_header);
}

// --- Several GPUs, and both ends in one process for the driver

class CudaIpcOfTwoGpus : public OfTwoGpus<Lanes> {
 protected:
  explicit CudaIpcOfTwoGpus(bool peers = true)
      : OfTwoGpus({.devices = 2, .threads = true, .peer_access = peers, .is_two_processes = true}) {
  }
};

TEST_F(CudaIpcOfTwoGpus, ReceiversGpuReadsTheSendersMemory) {
  open_apart();
  receive();
  const auto from = shareable(1000, 1);
  auto to = std::make_shared<cuda::ShareableMemory>(*other, 1000);
  const Op sent = near->send({}, std::array{from->slice()}, from, {});
  next();
  expect_good(far->accept(std::array{to->slice()}, to, {}));
  expect_good(sent);
  EXPECT_EQ(read(to->slice()), pattern(1, 1000));
}

class CudaIpcWithoutPeers : public CudaIpcOfTwoGpus {
 protected:
  CudaIpcWithoutPeers() : CudaIpcOfTwoGpus(false) {}
};

TEST_F(CudaIpcWithoutPeers, IsRefusedByName) {
  open_apart();
  receive();
  const auto from = shareable(1000, 1);
  const Error error = failure_of(near->send({}, std::array{from->slice()}, from, {}));
  EXPECT_EQ(error.blame(), Blame::Unsupported);
  EXPECT_THAT(error.text(), HasSubstr("no peer-to-peer access"));
}

class CudaIpcInOneProcess : public Lanes {
 protected:
  CudaIpcInOneProcess() : Lanes({.threads = true, .is_two_processes = false}) {}
};

// The ends take each other for two processes; the driver knows that they are one.
TEST_F(CudaIpcInOneProcess, FailedOpeningFailsOnlyTheAccept) {
  open();
  receive();
  const auto from = shareable(100, 1), to = shareable(100);
  const Op sent = near->send({}, std::array{from->slice()}, from, {});
  next();
  const Error error = failure_of(far->accept(std::array{to->slice()}, to, {}));
  EXPECT_THAT(error.text(), HasSubstr("cuIpcOpenMemHandle"));
  expect_good(sent);  // it will not be read any more
  near->send(bytes_of("on"), {}, nullptr, {});
  EXPECT_EQ(next(), "on");
}

}  // namespace
}  // namespace weft::transport::cuda_ipc
