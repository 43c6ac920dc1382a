// SPDX-License-Identifier: Apache-2.0
// Several sockets that form one stream: how such connections are made, and what happens when one of
// the sockets is lost.
#include <algorithm>
#include <array>
#include <atomic>
#include <csignal>
#include <cstdlib>
#include <future>
#include <set>
#include <thread>

#include <malloc.h>

#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <weft/base/config.h>
#include <weft/tests/harness/sanitized.h>
#include <weft/tests/transport/tcp/cable.h>
#include <weft/transport/tcp/greeting.h>
#include <weft/transport/tcp/tcp.h>

namespace weft::transport::tcp {

Result<std::shared_ptr<Transport>> open();  // as the table of backends declares it

namespace {

using std::chrono::milliseconds;
using testing::HasSubstr;

constexpr std::size_t kChunk = StripedStream::kChunk;

Settings sockets(std::size_t count) {
  Settings settings;
  settings.sockets = count;
  return settings;
}

std::unique_ptr<ByteStream> striped(const std::shared_ptr<EventLoop>& loop,
                                    std::vector<Descriptor> sockets,
                                    const Settings& settings = {}) {
  std::vector<std::unique_ptr<TcpStream>> streams;
  for (std::size_t i = 0; i < sockets.size(); ++i) {
    const Stripe part{7, static_cast<std::uint16_t>(i), static_cast<std::uint16_t>(sockets.size())};
    streams.push_back(
        std::make_unique<TcpStream>(loop, std::move(sockets[i]), "the other", settings, part));
  }
  return as_one(std::move(streams));
}

// Both ends of `count` connections.
std::array<std::vector<Descriptor>, 2> pairs(std::size_t count) {
  std::array<std::vector<Descriptor>, 2> ends;
  for (std::size_t i = 0; i < count; ++i) {
    auto [one, other] = tcp_pair();
    ends[0].push_back(std::move(one));
    ends[1].push_back(std::move(other));
  }
  return ends;
}

// One end is a stream; the test reads and writes each socket of the other end.
struct HalfLane {
  explicit HalfLane(std::size_t count) : HalfLane(pairs(count)) {}
  explicit HalfLane(std::array<std::vector<Descriptor>, 2> ends)
      : loop(make_loop()), near(loop, striped(loop, std::move(ends[0]))), far(std::move(ends[1])) {
    for (const Descriptor& socket : far) ::fcntl(socket.get(), F_SETFL, 0);  // blocking
  }
  void say(std::size_t socket, const std::string& bytes) const {
    ASSERT_EQ(::send(far[socket].get(), bytes.data(), bytes.size(), 0),
              static_cast<ssize_t>(bytes.size()));
  }
  std::string hear(std::size_t socket, std::size_t bytes) const {
    std::string heard(bytes, '\0');
    heard.resize(static_cast<std::size_t>(
        std::max<ssize_t>(0, ::recv(far[socket].get(), heard.data(), heard.size(), MSG_WAITALL))));
    return heard;
  }
  void reset(std::size_t socket) {
    const linger at_once{1, 0};
    ::setsockopt(far[socket].get(), SOL_SOCKET, SO_LINGER, &at_once, sizeof at_once);
    far[socket] = Descriptor();
  }

  std::shared_ptr<EventLoop> loop;
  End near;
  std::vector<Descriptor> far;
};

TEST(StripedStream, BytesArriveInOrderBothWaysAtOnce) {
  for (const std::size_t count : {2u, 3u, 16u}) {
    auto ends = pairs(count);
    const auto first = make_loop("first");
    const auto second = make_loop("second");
    End a(first, striped(first, std::move(ends[0])));
    End b(second, striped(second, std::move(ends[1])));
    const std::string there = pattern(20 << 20, 1);
    const std::string back = pattern(20 << 20, 2);
    a.send(there);
    b.send(back, 333'333);
    EXPECT_TRUE(b.take(there.size()) == there) << count;
    EXPECT_TRUE(a.take(back.size()) == back) << count;
  }
}

TEST(StripedStream, LengthsAroundChunkEndsArriveWhole) {
  constexpr std::size_t kCount = 3;
  auto ends = pairs(kCount);
  const auto loop = make_loop();
  End a(loop, striped(loop, std::move(ends[0])));
  End b(loop, striped(loop, std::move(ends[1])));
  const std::string bytes = pattern(kCount * kChunk + 1);
  // Each time the stream is at another position within a chunk.
  for (const std::size_t length :
       {std::size_t{1}, kChunk - 1, kChunk, kChunk + 1, 2 * kChunk, kCount * kChunk - 1,
        kCount * kChunk, kCount * kChunk + 1, std::size_t{8}, kChunk / 2}) {
    for (const std::size_t piece : {std::size_t{0}, std::size_t{50'000}}) {
      a.send(bytes.substr(0, length), piece);
      EXPECT_TRUE(b.take(length) == bytes.substr(0, length)) << length;
    }
  }
}

TEST(StripedStream, ChunksTakeTheSocketsInTurn) {
  HalfLane lane(3);
  const std::string bytes = pattern(4 * kChunk + 10);
  lane.near.send(bytes);
  EXPECT_TRUE(lane.hear(0, kChunk) == bytes.substr(0, kChunk));
  EXPECT_TRUE(lane.hear(1, kChunk) == bytes.substr(kChunk, kChunk));
  EXPECT_TRUE(lane.hear(2, kChunk) == bytes.substr(2 * kChunk, kChunk));
  EXPECT_TRUE(lane.hear(0, kChunk) == bytes.substr(3 * kChunk, kChunk));
  EXPECT_TRUE(lane.hear(1, 10) == bytes.substr(4 * kChunk));
}

TEST(StripedStream, SmallMessagesStayOnOneSocket) {
  HalfLane lane(2);
  for (int i = 0; i < 100; ++i) lane.near.send(pattern(100));
  EXPECT_EQ(lane.hear(0, 10'000).size(), 10'000u);
  char none;
  EXPECT_EQ(::recv(lane.far[1].get(), &none, 1, MSG_DONTWAIT), -1);
}

TEST(StripedStream, EmptyPiecesAreNoBytes) {
  auto ends = pairs(2);
  const auto loop = make_loop();
  const auto stream = striped(loop, std::move(ends[0]));
  const std::string most = pattern(kChunk - 1);
  const ByteStream::Bytes pieces[] = {
      {}, std::as_bytes(std::span(most)), {}, std::as_bytes(std::span("ab", 2)), {}};
  EXPECT_EQ(stream->write(pieces), kChunk + 1);
  EXPECT_EQ(stream->write({}), 0u);
  char got[2];
  ::fcntl(ends[1][1].get(), F_SETFL, 0);
  EXPECT_EQ(::recv(ends[1][1].get(), got, sizeof got, 0), 1);
  EXPECT_EQ(got[0], 'b');
}

TEST(StripedStream, PeekStopsAtAChunkAndReadContinues) {
  auto ends = pairs(2);
  const auto loop = make_loop();
  const auto stream = striped(loop, std::move(ends[0]));
  const std::string bytes = pattern(kChunk + 8);
  ASSERT_EQ(::send(ends[1][0].get(), bytes.data(), kChunk, 0), static_cast<ssize_t>(kChunk));
  ASSERT_EQ(::send(ends[1][1].get(), bytes.data() + kChunk, 8, 0), 8);
  std::string heard;
  while (heard.size() < kChunk - 4) {
    const std::size_t some = std::min(stream->peek(1).size(), kChunk - 4 - heard.size());
    heard.append(reinterpret_cast<const char*>(stream->peek(1).data()), some);
    stream->consume(some);
  }
  EXPECT_EQ(stream->peek(12).size(), 4u);
  std::array<std::byte, 12> rest;
  EXPECT_EQ(stream->read(rest), rest.size());
  heard.append(reinterpret_cast<const char*>(rest.data()), rest.size());
  EXPECT_TRUE(heard == bytes);
  EXPECT_TRUE(stream->peek(1).empty());
  EXPECT_FALSE(stream->end());
}

// Their events have passed before their bytes are due.
TEST(StripedStream, BytesBeforeTheirTurnAreFound) {
  HalfLane lane(3);
  const std::string bytes = pattern(4 * kChunk);
  lane.say(2, bytes.substr(2 * kChunk, kChunk));
  lane.say(1, bytes.substr(kChunk, kChunk));
  wait_until(
      *lane.loop, [turns = std::make_shared<std::atomic<int>>(0)] { return ++*turns > 10; },
      "the loop has turned");
  EXPECT_EQ(lane.near.received(), 0u);
  lane.say(0, bytes.substr(0, 1000));
  EXPECT_TRUE(lane.near.take(1000) == bytes.substr(0, 1000));
  lane.say(0, bytes.substr(1000, kChunk - 1000) + bytes.substr(3 * kChunk));
  EXPECT_TRUE(lane.near.take(bytes.size() - 1000) == bytes.substr(1000));
}

TEST(StripedStream, SlowReaderGetsEveryByte) {
  auto ends = pairs(4);
  const auto first = make_loop("first");
  const auto second = make_loop("second");
  End a(first, striped(first, std::move(ends[0])));
  End b(second, striped(second, std::move(ends[1])));
  const std::string bytes = pattern(64 << 20);
  b.hold(true);
  a.send(bytes);
  for (std::size_t taken = 0; taken < bytes.size();) {
    b.hold(false);
    const std::string part = b.take(std::min<std::size_t>(7'777'777, bytes.size() - taken));
    ASSERT_TRUE(part == bytes.substr(taken, part.size())) << taken;
    taken += part.size();
    b.hold(true);
  }
}

// The memory of each socket, including those whose turn it is not.
TEST(StripedStream, IdleStreamReleasesItsMemory) {
  Settings settings;
  settings.silence = milliseconds(2000);  // checked four times in that period
  auto ends = pairs(kMaxSockets);
  const auto loop = make_loop();
  End a(loop, striped(loop, std::move(ends[0]), settings));
  End b(loop, striped(loop, std::move(ends[1]), settings));
  const std::string bytes = pattern(kMaxSockets * kChunk + kChunk / 2);
  a.send(bytes, 1000);
  EXPECT_TRUE(b.take(bytes.size()) == bytes);
  if (!harness::kSanitized) {
    const std::size_t held = ::mallinfo2().uordblks;
    wait_until(
        *loop,
        [&] { return ::mallinfo2().uordblks + (kMaxSockets - 2) * b.stream().window() < held; },
        "memory is given back");
  }
  a.send(bytes, 1000);
  EXPECT_TRUE(b.take(bytes.size()) == bytes);
  EXPECT_FALSE(a.ended());
}

TEST(StripedStream, OneWriteTakesABoundedNumberOfBytes) {
  auto ends = pairs(kMaxSockets);
  const auto loop = make_loop();
  const auto stream = striped(loop, std::move(ends[0]));
  // Waits until the initial events, which report that there is room, have passed.
  std::atomic<int> calls{0};
  stream->start(
      *loop, [] {}, [&] { ++calls; });
  wait_until(
      *loop, [turns = std::make_shared<std::atomic<int>>(0)] { return ++*turns > 10; },
      "the loop has turned");
  const std::string bytes = pattern(64 << 20);
  const ByteStream::Bytes piece = std::as_bytes(std::span(bytes));
  // All sockets together have room for more.
  const std::size_t written = stream->write({&piece, 1});
  EXPECT_LE(written, (4 << 20) + kChunk);
  wait_until(
      *loop, [&] { return calls > 0; }, "writable");
  stream->stop();
}

TEST(StripedStream, CleanEndFollowsAllBytes) {
  auto ends = pairs(3);
  const auto loop = make_loop();
  End a(loop, striped(loop, std::move(ends[0])));
  End b(loop, striped(loop, std::move(ends[1])));
  const std::string bytes = pattern(5 * kChunk);  // the end is on the socket of the last chunk
  b.hold(true);
  a.send(bytes);
  a.finish_writing();
  b.hold(false);
  EXPECT_TRUE(b.take(bytes.size()) == bytes);
  EXPECT_THAT(b.wait_end().text(), HasSubstr("was closed by the peer"));
  EXPECT_FALSE(b.stream().write_end());
  b.send("still");
  EXPECT_EQ(a.take(5), "still");
}

TEST(StripedStream, LostSocketEndsTheStreamInAnyTurn) {
  HalfLane lane(3);
  lane.say(0, "before");
  EXPECT_EQ(lane.near.take(6), "before");
  lane.reset(1);
  const Error error = lane.near.wait_end();
  EXPECT_EQ(error.blame(), Blame::PeerLost);
  EXPECT_EQ(error.native_code(), ECONNRESET);
  EXPECT_THAT(error.text(),
              HasSubstr("the connection to the other (tcp, socket 2 of 3) was reset by the peer"));
  ASSERT_TRUE(lane.near.stream().write_end());
  EXPECT_THAT(lane.near.stream().write_end()->text(), HasSubstr("socket 2 of 3"));
}

// The loop learns of the loss first; by then the bytes are in the kernel.
TEST(StripedStream, BytesAreReadBeforeALostSocketsEnd) {
  for (int i = 0; i < 20; ++i) {
    HalfLane lane(3);
    lane.say(0, "before");
    EXPECT_EQ(lane.near.take(6), "before");
    std::promise<void> go;
    std::promise<void> busy;
    lane.loop->post([&] {
      busy.set_value();
      go.get_future().wait();
    });
    busy.get_future().wait();
    const std::string bytes = pattern(kChunk + 10);
    lane.reset(2);
    lane.say(0, bytes.substr(0, kChunk - 6));
    lane.say(1, bytes.substr(kChunk - 6));
    go.set_value();
    EXPECT_THAT(lane.near.wait_end().text(), HasSubstr("socket 3 of 3"));
    ASSERT_TRUE(lane.near.take(bytes.size()) == bytes) << i;
  }
}

TEST(StripedStream, EndedSocketEndsTheStreamInItsTurn) {
  HalfLane lane(2);
  ::shutdown(lane.far[1].get(), SHUT_WR);
  const std::string bytes = pattern(kChunk);
  lane.say(0, bytes.substr(0, kChunk - 1));
  EXPECT_TRUE(lane.near.take(kChunk - 1) == bytes.substr(0, kChunk - 1));
  EXPECT_FALSE(lane.near.ended());
  lane.say(0, bytes.substr(kChunk - 1));
  EXPECT_THAT(lane.near.wait_end().text(), HasSubstr("socket 2 of 2"));
  EXPECT_EQ(lane.near.received(), 1u);
}

TEST(StripedStream, WriterNoticesALostSocketMidMessage) {
  HalfLane lane(2);
  lane.near.hold(true);  // as a reader that waits for a message to be accepted
  lane.near.send(pattern(64 << 20));
  lane.hear(0, kChunk);
  lane.reset(1);
  wait_until(
      *lane.loop, [&] { return lane.near.stream().write_end().has_value(); }, "the writer notices");
  EXPECT_THAT(lane.near.stream().write_end()->text(), HasSubstr("socket 2 of 2"));
  lane.near.hold(false);
  EXPECT_THAT(lane.near.wait_end().text(), HasSubstr("socket 2 of 2"));
}

TEST(StripedStream, StopClosesSocketsAndEndsCallbacks) {
  auto ends = pairs(3);
  const auto loop = make_loop();
  std::atomic<int> calls{0};
  auto stream = striped(loop, std::move(ends[0]));
  stream->start(
      *loop, [&] { ++calls; }, [&] { ++calls; });
  std::promise<void> stopped;
  loop->post([&] {
    stream->stop();
    calls = 0;
    stopped.set_value();
  });
  stopped.get_future().wait();
  stream.reset();
  for (const Descriptor& socket : ends[1]) {
    ::fcntl(socket.get(), F_SETFL, 0);
    char none;
    EXPECT_EQ(::recv(socket.get(), &none, 1, 0), 0);
  }
  EXPECT_EQ(calls, 0);
}

// --- Making connections

TEST(StripedLane, ConnectingEndSetsTheSocketCount) {
  const auto here = make_loop("here");
  const auto there = make_loop("there");
  Lobby lobby(there, "", sockets(2));
  const std::string bytes = pattern(3 << 20);
  for (const std::size_t count : {std::size_t{1}, std::size_t{3}, kMaxSockets}) {
    End a(here, dial(here, lobby.address(), patience(), sockets(count)));
    End b(there, lobby.take());
    EXPECT_EQ(dynamic_cast<StripedStream*>(&b.stream()) == nullptr, count == 1);
    a.send(bytes);
    b.send(bytes);
    EXPECT_TRUE(b.take(bytes.size()) == bytes) << count;
    EXPECT_TRUE(a.take(bytes.size()) == bytes) << count;
    EXPECT_EQ(a.stream().peer(), "127.0.0.1:" + std::to_string(lobby.port()));
  }
  EXPECT_EQ(lobby.waiting(), 0u);
}

TEST(StripedLane, RefusalIsTheReasonOfAll) {
  const auto loop = make_loop();
  const Descriptor nobody = reserved_port();
  const std::string address = "127.0.0.1:" + std::to_string(local_end(nobody).port());
  End a(loop, dial(loop, address, Deadline::in(milliseconds(500)), sockets(4)));
  a.send("never sent");
  const Error error = a.wait_end();
  EXPECT_EQ(error.native_code(), ECONNREFUSED);
  EXPECT_THAT(error.text(), HasSubstr("cannot connect (tcp) to " + address));
  EXPECT_TRUE(a.stream().write_end());
}

TEST(StripedLane, MayFailBeforeItIsStarted) {
  const Descriptor nobody = reserved_port();
  const auto address = Address::parse("127.0.0.1:" + std::to_string(local_end(nobody).port()));
  const auto loop = make_loop();
  for (int i = 0; i < 200; ++i) {
    auto parts = TcpStream::dial(loop, address, Deadline::never(), sockets(kMaxSockets),
                                 /*refusal_ends=*/true);
    wait_until(
        *loop, [&] { return parts.back()->end().has_value(); }, "it is refused");
    std::atomic<bool> closed{false};
    const auto connection = connect_over(as_one(std::move(parts)), Capabilities(), "tcp", loop);
    connection->receive({[](const Arrival&) {}, [&](const Error&) { closed = true; }});
    wait_until(
        *loop, [&] { return closed.load(); }, "the connection ends");
  }
}

TEST(StripedLane, AbandonedDialsLeaveNothing) {
  const auto loop = make_loop();
  auto lobby = std::make_unique<Lobby>(loop);
  for (int i = 0; i < 20; ++i) {
    auto stream = dial(loop, lobby->address(), Deadline::never(), sockets(4));
    if (i % 2 == 0) End(loop, std::move(stream));
  }
  End a(loop, dial(loop, lobby->address(), patience(), sockets(2)));
  a.send("x");
  // Some of the others may have connected before they were dropped.
  bool found = false;
  for (int i = 0; i <= 20 && !found; ++i) {
    End b(loop, lobby->take());
    wait_until(
        *loop, [&] { return b.received() > 0 || b.ended(); },
        "the accepted end has received or ended");
    found = b.received() > 0;
  }
  EXPECT_TRUE(found);
}

struct Said {
  tls::Socket socket;
  Stripe part;
};

// Accepts a socket and reads its greeting.
Said accept_at(const Descriptor& door) {
  Said said{Descriptor(::accept4(door.get(), nullptr, nullptr, SOCK_CLOEXEC)), {}};
  Greeting greeting;
  while (greeting.receive(said.socket) == Greeting::Progress::Wants) {
  }
  said.part = greeting.stripe();
  return said;
}

TEST(StripedLane, RetriesIfOneSocketIsNotTaken) {
  const auto loop = make_loop();
  const Descriptor door = reserved_port();
  ASSERT_EQ(::listen(door.get(), 16), 0);
  const auto answer = Greeting::encode({1, 2});
  End a(loop,
        dial(loop, "127.0.0.1:" + std::to_string(local_end(door).port()), patience(), sockets(2)));
  std::set<std::uint64_t> lanes;
  std::vector<Said> taken;
  for (const bool takes_both : {false, true}) {
    taken.clear();
    for (int i = 0; i < 2; ++i) taken.push_back(accept_at(door));
    std::sort(taken.begin(), taken.end(),
              [](const Said& x, const Said& y) { return x.part.index < y.part.index; });
    for (std::uint16_t i = 0; i < 2; ++i) {
      EXPECT_EQ(taken[i].part, (Stripe{taken[0].part.connection_key, i, 2}));
    }
    lanes.insert(taken[0].part.connection_key);
    ASSERT_EQ(::send(taken[0].socket.get(), answer.data(), answer.size(), 0),
              static_cast<ssize_t>(answer.size()));
    if (takes_both) {
      ASSERT_EQ(::send(taken[1].socket.get(), answer.data(), answer.size(), 0),
                static_cast<ssize_t>(answer.size()));
    }
    taken[1].socket = takes_both ? std::move(taken[1].socket) : Descriptor();
  }
  EXPECT_EQ(lanes.size(), 2u) << "each attempt must have a new connection number";
  ASSERT_EQ(::send(taken[0].socket.get(), "there", 5, 0), 5);
  EXPECT_EQ(a.take(5), "there");
}

// Returns this process's descriptor of the socket at the other end.
int other_end(const Descriptor& socket) {
  const std::string there = remote_end(socket).text();
  for (int number = 0; number < 4096; ++number) {
    sockaddr_storage about{};
    socklen_t bytes = sizeof about;
    if (::getsockname(number, reinterpret_cast<sockaddr*>(&about), &bytes) != 0 ||
        about.ss_family != AF_INET)
      continue;
    const Descriptor looked_at(::dup(number));
    if (looked_at && local_end(looked_at).text() == there) return number;
  }
  return -1;
}

// The kernel refuses this when the user may watch no more descriptors; here because the test
// watches that socket itself.
TEST(StripedLane, UnwatchableSocketEndsTheConnection) {
  const auto loop = make_loop();
  const Descriptor door = reserved_port();
  ASSERT_EQ(::listen(door.get(), 16), 0);
  const auto answer = Greeting::encode({1, 2});
  End a(loop,
        dial(loop, "127.0.0.1:" + std::to_string(local_end(door).port()), patience(), sockets(2)));
  a.send(pattern(8 << 20));
  std::vector<Said> taken;
  for (int i = 0; i < 2; ++i) taken.push_back(accept_at(door));
  if (taken[0].part.index != 0) std::swap(taken[0], taken[1]);
  const int watched = other_end(taken[1].socket.descriptor());
  ASSERT_GE(watched, 0);
  // Once its answer has been read, the socket is not watched until the last answer arrives.
  ASSERT_EQ(::send(taken[1].socket.get(), answer.data(), answer.size(), 0),
            static_cast<ssize_t>(answer.size()));
  EventLoop::Registration in_the_way;
  while (!in_the_way) {
    try {
      in_the_way = loop->watch(watched, 0, [](std::uint32_t) {});
    } catch (const Error&) {
      std::this_thread::yield();
    }
  }
  ASSERT_EQ(::send(taken[0].socket.get(), answer.data(), answer.size(), 0),
            static_cast<ssize_t>(answer.size()));
  const Error error = a.wait_end();
  EXPECT_EQ(error.native_code(), EEXIST);
  EXPECT_THAT(error.text(), HasSubstr("cannot watch descriptor"));
  EXPECT_TRUE(a.stream().write_end());
}

// Connects to a listener and sends a greeting, as a stranger or a peer.
Descriptor greet(const Lobby& lobby, const Stripe& part, const Identity& identity = {}) {
  Descriptor socket = raw_connect(lobby.port());
  const auto greeting = Greeting::encode(identity, part);
  EXPECT_EQ(::send(socket.get(), greeting.data(), greeting.size(), 0),
            static_cast<ssize_t>(greeting.size()));
  return socket;
}

// Blocks until the listener closes the socket; true if it sent nothing.
bool put_out(const Descriptor& stranger) {
  char answer;
  return ::recv(stranger.get(), &answer, 1, 0) <= 0;
}

bool answered(const Descriptor& peer) {
  Greeting::Bytes answer;
  return ::recv(peer.get(), answer.data(), answer.size(), MSG_WAITALL) ==
         static_cast<ssize_t>(answer.size());
}

TEST(StripedLane, IncompleteOneIsDroppedAfterAWhile) {
  const auto loop = make_loop();
  Settings settings;
  settings.greeting = milliseconds(20);
  Lobby lobby(loop, "", settings);
  const Descriptor first = greet(lobby, {1, 0, 3});
  const Descriptor third = greet(lobby, {1, 2, 3});
  EXPECT_TRUE(put_out(first));
  EXPECT_TRUE(put_out(third));
  EXPECT_EQ(lobby.waiting(), 0u);
}

TEST(StripedLane, SocketsMayComeInAnyOrder) {
  const auto loop = make_loop();
  Lobby lobby(loop);
  const Descriptor third = greet(lobby, {1, 2, 3});
  const Descriptor first = greet(lobby, {1, 0, 3});
  const Descriptor other = greet(lobby, {2, 1, 3});  // of another connection
  const Descriptor alone =
      greet(lobby, {1, 0, 1});  // a connection of one socket, whatever its number
  EXPECT_TRUE(answered(alone));
  char none;
  EXPECT_EQ(::recv(first.get(), &none, 1, MSG_DONTWAIT), -1);
  const Descriptor second = greet(lobby, {1, 1, 3});
  EXPECT_TRUE(answered(first));
  EXPECT_TRUE(answered(second));
  EXPECT_TRUE(answered(third));
  lobby.take();
  End lane(loop, lobby.take());
  const std::string bytes = pattern(kChunk + 1);
  ASSERT_EQ(::send(second.get(), bytes.data() + kChunk, 1, 0), 1);
  ASSERT_EQ(::send(first.get(), bytes.data(), kChunk, 0), static_cast<ssize_t>(kChunk));
  EXPECT_TRUE(lane.take(bytes.size()) == bytes);
}

TEST(StripedLane, WrongSocketIsDroppedAlone) {
  const auto loop = make_loop();
  Lobby lobby(loop);
  const Descriptor first = greet(lobby, {1, 0, 2});
  const Descriptor alone = greet(lobby, {1, 0, 1});
  EXPECT_TRUE(answered(alone));  // by now the first is known
  EXPECT_TRUE(put_out(greet(lobby, {1, 0, 2}))) << "twice";
  EXPECT_TRUE(put_out(greet(lobby, {1, 1, 3}))) << "another count";
  EXPECT_TRUE(put_out(greet(lobby, {1, 2, 2}))) << "no such index";
  EXPECT_TRUE(put_out(greet(lobby, {1, 0, 0}))) << "no sockets";
  EXPECT_TRUE(put_out(greet(lobby, {1, 0, 1000}))) << "too many";
  EXPECT_TRUE(put_out(greet(lobby, {1, 65'535, 17}))) << "too many";
  const Descriptor second = greet(lobby, {1, 1, 2});
  EXPECT_TRUE(answered(first));
  EXPECT_TRUE(answered(second));
  lobby.take();
  End lane(loop, lobby.take());
  ASSERT_EQ(::send(first.get(), "hello", 5, 0), 5);
  EXPECT_EQ(lane.take(5), "hello");
}

TEST(StripedLane, LostOrEarlySocketFreesItsIndex) {
  const auto loop = make_loop();
  Lobby lobby(loop);
  const Descriptor early = greet(lobby, {1, 0, 2});
  ASSERT_EQ(::send(early.get(), "hello", 5, 0), 5);
  EXPECT_TRUE(put_out(early));
  {
    const Descriptor gone = greet(lobby, {1, 0, 2});
    ::shutdown(gone.get(), SHUT_WR);
    EXPECT_TRUE(put_out(gone));
  }
  const Descriptor first = greet(lobby, {1, 0, 2});
  const Descriptor second = greet(lobby, {1, 1, 2});
  EXPECT_TRUE(answered(first));
  EXPECT_TRUE(answered(second));
}

TEST(StripedLane, DialToAnotherListenerFailsAtOnce) {
  const auto loop = make_loop();
  Lobby lobby(loop);
  Address address = Address::parse(lobby.address());
  ++address.identity.listener;
  End a(loop, dial(loop, address.text(), Deadline::never(), sockets(3)));
  EXPECT_THAT(a.wait_end().text(), HasSubstr("another listener has this port now"));
  EXPECT_EQ(lobby.waiting(), 0u);
}

TEST(StripedLane, IncompleteOnesAreBounded) {
  if (!may_have_descriptors(2600)) GTEST_SKIP() << "this process may not have 2600 descriptors";
  const auto loop = make_loop();
  Settings settings;
  settings.greeting = std::chrono::minutes(10);  // the timer must not be the reason
  Lobby lobby(loop, "", settings);
  std::vector<Descriptor> flood;
  for (std::uint64_t lane = 1; lane <= 1100; ++lane) flood.push_back(greet(lobby, {lane, 0, 2}));
  EXPECT_TRUE(put_out(flood.front())) << "the oldest incomplete connection must make room";
  End a(loop, dial(loop, lobby.address(), patience(), sockets(4)));
  End b(loop, lobby.take());
  a.send("ping");
  EXPECT_EQ(b.take(4), "ping");
  EXPECT_EQ(lobby.waiting(), 0u);
}

// More sockets than a listener keeps of incomplete connections: those that had to make room connect
// again.
TEST(StripedLane, ManyConnectAtOnce) {
  constexpr std::size_t kLanes = 300;
  if (!may_have_descriptors(2 * 4 * kLanes + 200))
    GTEST_SKIP() << "this process may not have as many descriptors";
  const auto here = make_loop("here");
  const auto there = make_loop("there");
  Lobby lobby(there);
  std::vector<std::unique_ptr<End>> dialled;
  std::vector<std::unique_ptr<End>> accepted;
  for (std::size_t i = 0; i < kLanes; ++i) {
    dialled.push_back(
        std::make_unique<End>(here, dial(here, lobby.address(), patience(), sockets(4))));
    dialled.back()->send(pattern(200'000, static_cast<unsigned>(i)));
  }
  for (std::size_t i = 0; i < kLanes; ++i) {
    accepted.push_back(std::make_unique<End>(there, lobby.take()));
    accepted.back()->send(accepted.back()->take(200'000));
  }
  for (std::size_t i = 0; i < kLanes; ++i) {
    ASSERT_TRUE(dialled[i]->take(200'000) == pattern(200'000, static_cast<unsigned>(i))) << i;
  }
}

// --- Lost peers

TEST(StripedCut, PeerKilledMidTransferIsLost) {
  Child child([](int parent) {
    const auto loop = make_loop("child");
    Lobby lobby(loop);
    tell_line(parent, lobby.address());
    End end(loop, lobby.take());
    end.send(pattern(1 << 20));
    end.take(1 << 20);
    end.hold(true);
    tell_line(parent, "full");
    wait_for_byte(parent);
  });
  const auto loop = make_loop();
  End a(loop, dial(loop, hear_line(child), patience(), sockets(3)));
  a.send(pattern(64 << 20), 1 << 20);
  EXPECT_TRUE(a.take(1 << 20) == pattern(1 << 20));
  EXPECT_EQ(hear_line(child), "full");
  child.signal(SIGKILL);
  EXPECT_EQ(a.wait_end().blame(), Blame::PeerLost);
}

TEST(StripedCut, CableCutMidTransferIsNoticed) {
  std::string why_not;
  const auto cable = lay_cable(
      [](int parent) {
        const auto loop = make_loop("child");
        Lobby lobby(loop, "10.77.7.2");
        tell_line(parent, lobby.address());
        End end(loop, lobby.take());
        end.take(1 << 20);
        tell_line(parent, "underway");
        wait_for_byte(parent);
      },
      why_not);
  if (!cable) GTEST_SKIP() << why_not;
  const auto loop = make_loop();
  Settings settings = sockets(3);
  settings.silence = milliseconds(400);
  End a(loop, dial(loop, cable->heard(), patience(), settings));
  a.send(pattern(1 << 20));
  EXPECT_EQ(hear_line(cable->peer()), "underway");
  cable->cut();
  a.send(pattern(64 << 20), 1 << 20);
  const Error error = a.wait_end();
  EXPECT_THAT(error.text(), HasSubstr("no answer from its machine"));
  EXPECT_THAT(error.text(), HasSubstr(" of 3"));
}

// --- The setting

TEST(StripedSetting, OutOfRangeIsACallerError) {
  for (const std::size_t count : {std::size_t{0}, kMaxSockets + 1}) {
    try {
      const Tcp tcp(sockets(count));
      ADD_FAILURE() << count;
    } catch (const Error& error) {
      EXPECT_EQ(error.blame(), Blame::Caller);
      EXPECT_THAT(error.text(), HasSubstr("1 to 16 sockets"));
    }
  }
}

// The environment is read once per process, so this test starts a process of its own.
TEST(StripedSetting, IsReadFromTheEnvironment) {
  if (std::getenv("WEFT_TCP_SOCKETS") == nullptr) {
    Child child([](int) {
      ::setenv("WEFT_TCP_SOCKETS", "3", 1);
      ::execl("/proc/self/exe", "tcp_test",
              "--gtest_filter=StripedSetting.IsReadFromTheEnvironment", nullptr);
    });
    EXPECT_EQ(child.wait(), 0);
    return;
  }
  const auto tcp = open().value();
  const auto loop = make_loop();
  const Descriptor door = reserved_port();
  ASSERT_EQ(::listen(door.get(), 16), 0);
  const auto connection = tcp->connector()->connect(
      "127.0.0.1:" + std::to_string(local_end(door).port()), {loop, patience()});
  EXPECT_EQ(accept_at(door).part.count, config().tcp_sockets);
}

}  // namespace
}  // namespace weft::transport::tcp
