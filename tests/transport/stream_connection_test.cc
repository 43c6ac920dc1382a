// SPDX-License-Identifier: Apache-2.0
// Connections over streams that misbehave on purpose. The claims for every transport are in
// tests/conformance/connection.
#include <array>
#include <chrono>
#include <cstring>
#include <future>

#include <gtest/gtest.h>

#include <weft/profiling/trace/depth.h>
#include <weft/tests/harness/mail.h>
#include <weft/transport/inproc/faults.h>
#include <weft/transport/stream/frame.h>
#include <weft/transport/stream/stream_connection.h>

namespace weft::transport {
namespace {

using harness::bytes_of;
using harness::expect_good;
using harness::failure_of;
using harness::Letter;
using harness::Mailbox;
using harness::pattern;
using harness::slice_of;

constexpr std::size_t kPreamble = 8;
constexpr std::size_t kRing = 4096;

// Both ends over scripted streams, each on its own loop.
struct Ends {
  explicit Ends(const Capabilities& limits = inproc::capabilities(), std::size_t ring = kRing)
      : Ends(inproc::make_streams(ring), limits) {}
  explicit Ends(inproc::Streams streams, const Capabilities& limits = inproc::capabilities())
      : a_to_b(streams.a_to_b),
        b_to_a(streams.b_to_a),
        a(connect_over(std::move(streams.a), limits, "inproc", loop_a)),
        b(connect_over(std::move(streams.b), limits, "inproc", loop_b)) {}

  std::shared_ptr<EventLoop> loop_a = std::make_shared<EventLoop>("a");
  std::shared_ptr<EventLoop> loop_b = std::make_shared<EventLoop>("b");
  inproc::Faults a_to_b;
  inproc::Faults b_to_a;
  std::shared_ptr<Connection> a;
  std::shared_ptr<Connection> b;
};

// Returns once everything posted to the loop before this call has run.
void flush(EventLoop& loop) {
  std::promise<void> reached;
  loop.post([&] { reached.set_value(); });
  reached.get_future().wait();
}

TEST(StreamConnection, CarriesMessagesInPiecesOfAnySize) {
  for (const std::size_t at_most : {1u, 2u, 3u, 7u, 8u, 17u, 64u, 1000u}) {
    SCOPED_TRACE(at_most);
    inproc::Streams streams = inproc::make_streams(kRing);
    streams.a_to_b.move_at_most(at_most);
    Ends ends(std::move(streams));
    Mailbox mail(*ends.b, ends.loop_b);
    const auto small = pattern(1, 5);
    const auto large = pattern(2, 3 * kRing + 1);
    for (int round = 0; round < 3; ++round) {
      const std::vector<Slice> payloads{slice_of(small), {}, slice_of(large)};
      ends.a->send(bytes_of("header " + std::to_string(round)), payloads, nullptr, {});
      ends.a->send({}, {}, nullptr, {});
    }
    for (int round = 0; round < 3; ++round) {
      const Letter letter = mail.next();
      EXPECT_EQ(letter.header, "header " + std::to_string(round));
      ASSERT_EQ(letter.payloads.size(), 3u);
      EXPECT_EQ(letter.payloads[0], small);
      EXPECT_TRUE(letter.payloads[1].empty());
      EXPECT_EQ(letter.payloads[2], large);
      const Letter empty = mail.next();
      EXPECT_TRUE(empty.header.empty());
      EXPECT_TRUE(empty.payloads.empty());
    }
  }
}

TEST(StreamConnection, SlowLinkDelaysButKeepsOrder) {
  using namespace std::chrono_literals;
  Ends ends;
  Mailbox mail(*ends.b, ends.loop_b);
  const auto large = pattern(4, 3 * kRing + 1);
  const auto send_all = [&] {
    for (int i = 0; i < 3; ++i)
      ends.a->send(bytes_of(std::to_string(i)), std::array{slice_of(large)}, nullptr, {});
  };
  const auto receive_all = [&] {
    for (int i = 0; i < 3; ++i) {
      const Letter letter = mail.next();
      EXPECT_EQ(letter.header, std::to_string(i));
      EXPECT_EQ(letter.payloads.at(0), large);
    }
  };
  send_all();
  receive_all();
  constexpr double kBytesPerSecond = 2e6;
  ends.a_to_b.slow_down(5ms, kBytesPerSecond);
  const auto start = std::chrono::steady_clock::now();
  send_all();
  receive_all();
  const std::chrono::duration<double> took = std::chrono::steady_clock::now() - start;
  EXPECT_GE(took.count(), 5e-3 + 3 * static_cast<double>(large.size()) / kBytesPerSecond);
  // A message sent after the link is fast again does not overtake one that is still on its way.
  ends.a->send(bytes_of("slow"), {}, nullptr, {});
  ends.a_to_b.slow_down(0ns, 0);
  ends.a->send(bytes_of("fast"), {}, nullptr, {});
  EXPECT_EQ(mail.next().header, "slow");
  EXPECT_EQ(mail.next().header, "fast");
}

TEST(StreamConnection, CountsMessagesWaitingToBeSent) {
  Ends ends;
  const trace::Depth& waiting = trace::depth(trace::Queue::Messages, "inproc");
  const auto large = pattern(1, 2 * kRing);
  constexpr int kMessages = 5;
  for (int i = 0; i < kMessages; ++i)
    ends.a->send(bytes_of("header"), std::array{slice_of(large)}, nullptr, {});
  EXPECT_EQ(waiting.now, kMessages) << "the peer does not receive, and no message fits the ring";
  {
    Mailbox mail(*ends.b, ends.loop_b);
    for (int i = 0; i < kMessages; ++i) EXPECT_EQ(mail.next().payloads.at(0), large);
  }
  flush(*ends.loop_a);
  EXPECT_EQ(waiting.now, 0);
  for (int i = 0; i < kMessages; ++i)
    ends.a->send(bytes_of("header"), std::array{slice_of(large)}, nullptr, {});
  ends.a->close(Error(Blame::Cancelled, "enough"));
  flush(*ends.loop_a);
  EXPECT_EQ(waiting.now, 0) << "failed messages are still counted as waiting";
}

// Takes the preamble and 2 more bytes. Then its peer is gone for writing, but the stream can still
// be read.
struct DeafStream : ByteStream {
  struct State {
    std::atomic<bool> is_deaf{false};
    std::atomic<bool> withdrawn{false};
    std::atomic<bool> is_stuck{false};  // a device is using the memory and cannot be stopped
    std::function<void()> writable;
  };
  explicit DeafStream(std::shared_ptr<State> shared) : state(std::move(shared)) {}

  std::string peer() const override { return "the deaf"; }
  void start(EventLoop&, std::function<void()>, std::function<void()> writable) override {
    state->writable = std::move(writable);
  }
  void stop() noexcept override {}
  std::size_t write(std::span<const Bytes> pieces) noexcept override {
    std::size_t offered = 0;
    for (const Bytes& piece : pieces) offered += piece.size();
    return state->is_deaf ? 0 : std::min<std::size_t>(offered, kPreamble + 2);
  }
  Bytes peek(std::size_t) noexcept override { return {}; }
  void consume(std::size_t) noexcept override {}
  std::size_t read(std::span<std::byte>) noexcept override { return 0; }
  std::size_t window() const override { return kRing; }
  bool withdraw(const Error&) noexcept override {
    state->withdrawn = true;
    return !state->is_stuck;
  }
  std::optional<Error> end() const noexcept override { return std::nullopt; }
  std::optional<Error> write_end() const noexcept override {
    return state->is_deaf ? std::optional(Error(Blame::PeerLost, "it hears nothing"))
                          : std::nullopt;
  }
  void finish_writing() noexcept override {}

  const std::shared_ptr<State> state;
};

TEST(StreamConnection, FailedSendIsWithdrawnBeforeUnpinning) {
  const auto state = std::make_shared<DeafStream::State>();
  const auto loop = std::make_shared<EventLoop>("near");
  const auto near =
      connect_over(std::make_unique<DeafStream>(state), inproc::capabilities(), "deaf", loop);
  flush(*loop);
  const auto payload = pattern(1, kRing);
  std::promise<bool> withdrawn_first;
  Pin pin(&payload, [&](const void*) { withdrawn_first.set_value(state->withdrawn); });
  const Op sent = near->send({}, std::array{slice_of(payload)}, std::move(pin), {});
  flush(*loop);
  EXPECT_FALSE(sent.ended());
  EXPECT_FALSE(state->withdrawn);
  state->is_deaf = true;
  loop->post([&] { state->writable(); });
  EXPECT_EQ(failure_of(sent).blame(), Blame::PeerLost);
  EXPECT_TRUE(withdrawn_first.get_future().get());
}

TEST(StreamConnection, MemoryADeviceStillUsesIsKept) {
  for (const bool by_peer : {true, false}) {
    const auto state = std::make_shared<DeafStream::State>();
    state->is_stuck = true;
    const auto loop = std::make_shared<EventLoop>("near");
    const auto near =
        connect_over(std::make_unique<DeafStream>(state), inproc::capabilities(), "deaf", loop);
    flush(*loop);
    auto payload = std::make_shared<const std::vector<std::byte>>(pattern(1, kRing));
    const std::weak_ptr<const void> seen = payload;
    const auto slice = slice_of(*payload);
    const Op sent = near->send({}, std::array{slice}, std::move(payload), {});
    flush(*loop);
    state->is_deaf = by_peer;
    by_peer ? loop->post([&] { state->writable(); })
            : near->close(Error(Blame::Cancelled, "enough"));
    failure_of(sent);
    EXPECT_TRUE(state->withdrawn);
    EXPECT_FALSE(seen.expired());
  }
}

// Its reach() blocks until the test allows it to continue; the stream ends when the test says so.
struct ReachingStream final : DeafStream {
  struct Fate {
    std::atomic<bool> is_over{false};
    std::atomic<int> asked{0};
    std::function<void()> readable;
    std::promise<void> reaching, may_go_on, gone;
  };
  explicit ReachingStream(std::shared_ptr<Fate> of)
      : DeafStream(std::make_shared<State>()), fate(std::move(of)) {}
  ~ReachingStream() override { fate->gone.set_value(); }
  void start(EventLoop&, std::function<void()> readable, std::function<void()>) override {
    fate->readable = std::move(readable);
  }
  std::optional<Error> end() const noexcept override {
    return fate->is_over ? std::optional(Error(Blame::PeerLost, "it is over")) : std::nullopt;
  }
  Reach reach() const override {
    ++fate->asked;
    return [of = fate](const Slice&, cuda::Device&) -> Result<Pin> {
      of->reaching.set_value();
      of->may_go_on.get_future().wait();
      return Pin(of);
    };
  }

  const std::shared_ptr<Fate> fate;
};

TEST(StreamConnection, EndingDoesNotWaitForAReach) {
  const auto fate = std::make_shared<ReachingStream::Fate>();
  const auto loop = std::make_shared<EventLoop>("near");
  const auto near = connect_over(std::make_unique<ReachingStream>(fate), inproc::capabilities(),
                                 "reaching", loop);
  std::byte nobody_looks{};
  auto& gpu = reinterpret_cast<cuda::Device&>(nobody_looks);
  auto reached = std::async(std::launch::async, [&] { return near->reach({}, gpu); });
  fate->reaching.get_future().wait();
  fate->is_over = true;
  loop->post([&] { fate->readable(); });
  EXPECT_EQ(fate->gone.get_future().wait_for(std::chrono::seconds(20)), std::future_status::ready);
  fate->may_go_on.set_value();
  EXPECT_TRUE(reached.get().ok());
  EXPECT_EQ(fate->asked, 1)
      << "only the constructor may ask for reach(): later the stream may be gone";
  EXPECT_EQ(near->reach({}, gpu).error().blame(), Blame::PeerLost);
}

// One message with one payload has arrived, and then the stream ends. The first read() returns
// nothing; with `stuck`, all later ones too, although peek() shows the bytes.
struct LastMessageStream final : DeafStream {
  LastMessageStream(const std::vector<std::byte>& payload, bool is_stuck)
      : DeafStream(std::make_shared<State>()), stuck(is_stuck) {
    const auto preamble = frame::preamble();
    std::vector<std::byte> front;
    frame::encode_front(0, std::array{slice_of(payload)}, front);
    for (const Bytes part : {Bytes(preamble), Bytes(front), Bytes(payload)}) {
      come.insert(come.end(), part.begin(), part.end());
    }
  }
  void start(EventLoop&, std::function<void()>, std::function<void()>) override {}
  Bytes peek(std::size_t) noexcept override { return Bytes(come).subspan(taken); }
  void consume(std::size_t bytes) noexcept override { taken += bytes; }
  std::size_t read(std::span<std::byte> to) noexcept override {
    if (!std::exchange(was_read, true) || stuck) return 0;
    const Bytes part = peek(1).first(std::min(to.size(), come.size() - taken));
    std::ranges::copy(part, to.begin());
    consume(part.size());
    return part.size();
  }
  std::size_t window() const override { return kPreamble + 16; }  // too small for the payload
  std::optional<Error> end() const noexcept override {
    return was_read ? std::optional(Error(Blame::Device, "it broke")) : std::nullopt;
  }

  std::vector<std::byte> come;
  std::size_t taken = 0;
  bool was_read = false;
  const bool stuck;
};

TEST(StreamConnection, BreakInsideAPayloadEndsConnection) {
  const auto loop = std::make_shared<EventLoop>("near");
  const auto near = connect_over(std::make_unique<LastMessageStream>(pattern(1, 100), true),
                                 inproc::capabilities(), "broken", loop);
  Mailbox mail(*near, loop);
  const Error why = mail.wait_closed();
  EXPECT_EQ(why.blame(), Blame::Device);
  EXPECT_NE(why.text().find("in the middle of a message: it broke"), std::string::npos)
      << why.text();
  EXPECT_EQ(mail.count(), 0u);
}

TEST(StreamConnection, MessageBeforeTheEndIsRead) {
  const auto loop = std::make_shared<EventLoop>("near");
  const auto payload = pattern(1, 100);
  const auto near = connect_over(std::make_unique<LastMessageStream>(payload, false),
                                 inproc::capabilities(), "last", loop);
  Mailbox mail(*near, loop);
  EXPECT_EQ(mail.next().payloads.at(0), payload);
  EXPECT_EQ(mail.wait_closed().blame(), Blame::Device);
}

TEST(StreamConnection, CutMessageIsNeverShown) {
  const auto payload = pattern(3, 20);
  // preamble, then head, table of one size, header, payload
  const std::size_t whole = kPreamble + 8 + 8 + 6 + payload.size();
  for (std::size_t at = 0; at < whole; ++at) {
    SCOPED_TRACE(at);
    Ends ends;
    ends.a_to_b.cut_at(at);
    Mailbox mail(*ends.b, ends.loop_b);
    ends.a->send(bytes_of("header"), std::array{slice_of(payload)}, nullptr, {});
    const Error why = mail.wait_closed();
    EXPECT_EQ(why.blame(), Blame::PeerLost);
    EXPECT_NE(why.text().find("a (inproc)"), std::string::npos) << why.text();
    EXPECT_EQ(mail.count(), 0u);
    EXPECT_EQ(mail.closings(), 1);
  }
  Ends ends;
  ends.a_to_b.cut_at(whole);
  Mailbox mail(*ends.b, ends.loop_b);
  ends.a->send(bytes_of("header"), std::array{slice_of(payload)}, nullptr, {});
  EXPECT_EQ(mail.next().payloads.at(0), payload);
  EXPECT_EQ(mail.wait_closed().blame(), Blame::PeerLost);
}

// A connection whose other end is a bare stream, on which the test writes as a stranger or a broken
// peer would.
struct Stranger {
  explicit Stranger(const Capabilities& limits = inproc::capabilities()) {
    inproc::Streams streams = inproc::make_streams(kRing, "stranger", "us");
    stream = std::move(streams.a);
    us = connect_over(std::move(streams.b), limits, "inproc", loop);
  }
  ~Stranger() { stream.reset(); }
  void say(std::span<const std::byte> bytes) const {
    EXPECT_EQ(stream->write(std::array{bytes}), bytes.size());
  }
  void say_preamble() const { say(frame::preamble()); }

  std::shared_ptr<EventLoop> loop = std::make_shared<EventLoop>("us");
  std::unique_ptr<ByteStream> stream;
  std::shared_ptr<Connection> us;
};

TEST(StreamConnection, StrangersFirstBytesEndConnection) {
  for (const std::string_view text :
       {"GET / HTTP/1.1\r\nHost: x\r\n\r\n", "\x16\x03\x01", "x", "WEFT\x02"}) {
    Stranger stranger;
    Mailbox mail(*stranger.us, stranger.loop);
    stranger.say(bytes_of(text));
    if (text.size() == 5) stranger.say(bytes_of(std::string_view("\0\0\0", 3)));
    const Error why = mail.wait_closed();
    EXPECT_EQ(why.blame(), Blame::Protocol);
    EXPECT_NE(why.text().find("stranger"), std::string::npos) << why.what();
    EXPECT_EQ(mail.count(), 0u);
    EXPECT_EQ(failure_of(stranger.us->send(bytes_of("hello"), {}, nullptr, {})).blame(),
              Blame::Protocol);
  }
}

TEST(StreamConnection, OversizedHeadsEndTheConnection) {
  const auto head = [](std::uint32_t header, std::uint32_t payloads) {
    std::vector<std::byte> bytes(8);
    std::memcpy(&bytes[0], &header, 4);
    std::memcpy(&bytes[4], &payloads, 4);
    return bytes;
  };
  auto overflow = head(0, 2);
  overflow.resize(8 + 16, std::byte{0xff});
  for (const auto& bytes : {head(0xffffffff, 0), head(0, 0xfffffffe), head(65537, 1), head(0, 4097),
                            head(513, frame::kGoodbyePayloads), overflow}) {
    Stranger stranger;
    Mailbox mail(*stranger.us, stranger.loop);
    stranger.say_preamble();
    stranger.say(bytes);
    EXPECT_EQ(mail.wait_closed().blame(), Blame::Protocol);
    EXPECT_EQ(mail.count(), 0u);
  }
}

TEST(StreamConnection, PartialPreambleThenEndIsPeerLost) {
  Stranger stranger;
  Mailbox mail(*stranger.us, stranger.loop);
  stranger.say(bytes_of("WEF"));
  stranger.stream.reset();
  EXPECT_EQ(mail.wait_closed().blame(), Blame::PeerLost);
}

TEST(StreamConnection, CorruptedHeadIsNeverAMessage) {
  Ends ends;
  ends.a_to_b.corrupt(kPreamble + 7);  // the highest byte of the number of payloads
  Mailbox mail(*ends.b, ends.loop_b);
  ends.a->send(bytes_of("header"), {}, nullptr, {});
  EXPECT_EQ(mail.wait_closed().blame(), Blame::Protocol);
  EXPECT_EQ(mail.count(), 0u);
}

TEST(StreamConnection, HeldBytesArriveWhenReleased) {
  const auto payload = pattern(1, 100);
  const std::size_t whole = kPreamble + 8 + 8 + 6 + payload.size();
  for (std::size_t at = 0; at < whole; at += 5) {
    Ends ends;
    ends.a_to_b.hold_at(at);
    Mailbox mail(*ends.b, ends.loop_b);
    ends.a->send(bytes_of("header"), std::array{slice_of(payload)}, nullptr, {});
    flush(*ends.loop_a);
    flush(*ends.loop_b);
    EXPECT_EQ(mail.count(), 0u);
    ends.a_to_b.release();
    EXPECT_EQ(mail.next().payloads.at(0), payload) << at;
  }
}

TEST(StreamConnection, ShowsMessagesInPlaceIfTheyFit) {
  Ends ends;
  Mailbox mail(*ends.b, ends.loop_b);
  ends.a->send(bytes_of("first"), {}, nullptr,
               {});  // once it has arrived, the preamble has been sent
  mail.next();
  const auto fits = pattern(1, kRing / 2);
  const auto does_not = pattern(2, 2 * kRing);
  for (int round = 0; round < 5; ++round) {  // begins at different places in the ring
    ends.a->send({}, std::array{slice_of(fits)}, nullptr, {});
    const Letter in_place = mail.next();
    EXPECT_TRUE(in_place.was_in_place);
    EXPECT_EQ(in_place.payloads.at(0), fits);
    ends.a->send({}, std::array{slice_of(does_not)}, nullptr, {});
    const Letter elsewhere = mail.next();
    EXPECT_FALSE(elsewhere.was_in_place);
    EXPECT_EQ(elsewhere.payloads.at(0), does_not);
  }
}

// A stream that shows messages of up to half its ring whole.
class Keeping final : public ByteStream {
 public:
  explicit Keeping(std::unique_ptr<ByteStream> below) : below_(std::move(below)) {}
  std::string peer() const override { return below_->peer(); }
  void start(EventLoop& loop, std::function<void()> readable,
             std::function<void()> writable) override {
    below_->start(loop, std::move(readable), std::move(writable));
  }
  void stop() noexcept override { below_->stop(); }
  std::size_t write(std::span<const Bytes> pieces) noexcept override {
    return below_->write(pieces);
  }
  Bytes peek(std::size_t wanted) noexcept override { return below_->peek(wanted); }
  void consume(std::size_t bytes) noexcept override { below_->consume(bytes); }
  std::size_t read(std::span<std::byte> to) noexcept override { return below_->read(to); }
  std::size_t window() const override { return below_->window(); }
  std::size_t shown_whole() const override { return window() / 2; }
  std::optional<Error> end() const noexcept override { return below_->end(); }
  void finish_writing() noexcept override { below_->finish_writing(); }

 private:
  const std::unique_ptr<ByteStream> below_;
};

TEST(StreamConnection, InPlaceHandlersSeeMessagesWhole) {
  const auto payload = pattern(1, 64 << 10);
  for (const bool in_place : {false, true}) {
    SCOPED_TRACE(in_place);
    inproc::Streams streams = inproc::make_streams(256 << 10);
    streams.b = std::make_unique<Keeping>(std::move(streams.b));
    Ends ends(std::move(streams));
    std::atomic<bool> was_shown{false}, was_whole{false};
    std::vector<std::byte> to(payload.size());
    Op came;
    Connection::Handlers handlers{[&](const Arrival& arrival) {
                                    was_whole = arrival.in_place.size() == payload.size();
                                    const Slice destination = slice_of(to);
                                    came = ends.b->accept({&destination, 1}, nullptr, {});
                                    was_shown = true;
                                  },
                                  [](const Error&) {}};
    handlers.in_place = in_place;
    ends.a_to_b.hold_at(payload.size() / 2);
    ends.b->receive(std::move(handlers));
    ends.a->send({}, std::array{slice_of(payload)}, nullptr, {});
    flush(*ends.loop_a);
    flush(*ends.loop_b);
    EXPECT_NE(was_shown, in_place);
    ends.a_to_b.release();
    ASSERT_TRUE(ends.loop_b->drive([&] { return was_shown.load(); }, harness::patience()));
    expect_good(came);
    EXPECT_EQ(to, payload);
    EXPECT_EQ(was_whole, in_place);
    ends.b->close(Error(Blame::Cancelled, "the handlers' variables go"));
    flush(*ends.loop_b);
  }
}

TEST(StreamConnection, FrontsBeyondTheWindowAreGathered) {
  Ends ends;
  Mailbox mail(*ends.b, ends.loop_b);
  std::byte byte{42};
  const std::vector<Slice> payloads(4096, Slice{&byte, 1, Device::host()});
  const std::string header(60'000, 'h');
  for (int round = 0; round < 3; ++round) {
    ends.a->send(bytes_of(header), payloads, nullptr, {});
    ends.a->send(bytes_of("small"), {}, nullptr, {});
    const Letter large = mail.next();
    EXPECT_EQ(large.header, header);
    ASSERT_EQ(large.payloads.size(), 4096u);
    EXPECT_EQ(large.payloads.back(), std::vector<std::byte>{byte});
    EXPECT_EQ(mail.next().header, "small");
  }
}

TEST(StreamConnection, LostPeerFailsSendsBeforeAnAccept) {
  Stranger stranger;
  std::promise<void> arrived;
  stranger.us->receive({[&](const Arrival&) { arrived.set_value(); }, [](const Error&) {}});
  stranger.say_preamble();
  std::vector<std::byte> message(8);  // no header, no payloads
  stranger.say(message);
  arrived.get_future().wait();
  const auto payload = pattern(1, 4 * kRing);
  const Op stuck = stranger.us->send({}, std::array{slice_of(payload)}, nullptr, {});
  const Op behind = stranger.us->send(bytes_of("behind"), {}, nullptr, {});
  flush(*stranger.loop);
  EXPECT_FALSE(stuck.ended());
  stranger.stream.reset();
  EXPECT_EQ(failure_of(stuck).blame(), Blame::PeerLost);
  EXPECT_EQ(failure_of(behind).blame(), Blame::PeerLost);
  EXPECT_EQ(failure_of(stranger.us->send({}, {}, nullptr, {})).blame(), Blame::PeerLost);
}

TEST(StreamConnection, GoodbyeWaitsForRoomInTheRing) {
  Ends ends;
  ends.b_to_a.hold_at(kPreamble);  // no byte comes back meanwhile
  const auto payload = pattern(1, kRing - kPreamble - 8 - 8);
  Mailbox mail_a(*ends.a, ends.loop_a);
  flush(*ends.loop_a);
  expect_good(ends.a->send({}, std::array{slice_of(payload)}, nullptr,
                           {}));  // fills the ring to the last byte
  EXPECT_EQ(ends.a_to_b.written(), kRing);
  ends.a->close(Error(Blame::Cancelled, "that was all"));
  mail_a.wait_closed();
  ends.a.reset();
  Mailbox mail_b(*ends.b, ends.loop_b);
  EXPECT_EQ(mail_b.next().payloads.at(0), payload);
  EXPECT_NE(mail_b.wait_closed().text().find("that was all"), std::string::npos);
}

TEST(StreamConnection, PeersReasonIsOnePrintableLine) {
  Ends ends;
  Mailbox mail_a(*ends.a, ends.loop_a);
  Mailbox mail_b(*ends.b, ends.loop_b);
  ends.a->send(bytes_of("both have said who they are"), {}, nullptr, {});
  mail_b.next();
  ends.a->close(
      Error(Blame::Cancelled, "enough\nweft 12:00:00.000 E rank 0 | forged \x1b[2J, na\xc3\xafve"));
  EXPECT_NE(mail_b.wait_closed().text().find(
                "enough weft 12:00:00.000 E rank 0 | forged  [2J, na\xc3\xafve"),
            std::string::npos);
}

TEST(StreamConnection, EndedLoopFailsPendingOperations) {
  Op stuck;
  Op accepted;
  std::vector<std::byte> got(2 * kRing);
  const auto payload = pattern(1, 2 * kRing);
  {
    Ends ends;
    std::promise<void> arrived;
    ends.a->receive({[&](const Arrival&) { arrived.set_value(); }, [](const Error&) {}});
    const Op sent = ends.b->send({}, std::array{slice_of(payload)}, nullptr, {});
    arrived.get_future().wait();
    accepted =
        ends.a->accept(std::array{slice_of(got)}, nullptr, Fence(std::make_shared<HostFlag>()));
    stuck = ends.a->send({}, {}, nullptr, Fence(std::make_shared<HostFlag>()));
  }
  EXPECT_EQ(failure_of(stuck).blame(), Blame::Cancelled);
  EXPECT_EQ(failure_of(accepted).blame(), Blame::Cancelled);
}

TEST(StreamConnection, KeepsItsLoopAlive) {
  Ends ends;
  Mailbox mail(*ends.b, ends.loop_b);
  const std::weak_ptr<EventLoop> watch = ends.loop_a;
  ends.loop_a.reset();
  EXPECT_FALSE(watch.expired());
  ends.a->send(bytes_of("still here"), {}, nullptr, {});
  EXPECT_EQ(mail.next().header, "still here");
}

TEST(StreamConnection, DroppingBothEndsLeavesNothing) {
  const auto kept = std::make_shared<int>(0);
  std::weak_ptr<EventLoop> loop_a;
  std::weak_ptr<EventLoop> loop_b;
  {
    Ends ends;
    loop_a = ends.loop_a;
    loop_b = ends.loop_b;
    const auto handlers = [&kept] {
      return Connection::Handlers{[kept](const Arrival&) {}, [kept](const Error&) {}};
    };
    ends.a->receive(handlers());
    ends.b->receive(handlers());
    ends.a->send(bytes_of("never accepted"), {}, kept, {});
  }
  EXPECT_TRUE(loop_a.expired() && loop_b.expired());
  EXPECT_EQ(kept.use_count(), 1);
}

}  // namespace
}  // namespace weft::transport
