// SPDX-License-Identifier: Apache-2.0
// Streams over connected sockets.
#include <algorithm>
#include <atomic>
#include <cstring>
#include <fstream>
#include <future>

#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <linux/tcp.h>
#include <netinet/in.h>
#include <unistd.h>

#include <weft/tests/transport/tcp/streams.h>

namespace weft::transport::tcp {
namespace {

using std::chrono::milliseconds;
using testing::HasSubstr;

std::unique_ptr<TcpStream> over(const std::shared_ptr<EventLoop>& loop, Descriptor socket,
                                const Settings& settings = {}) {
  return std::make_unique<TcpStream>(loop, std::move(socket), "the other", settings);
}

std::string read_all(int socket) {
  std::string all;
  char part[4096];
  for (;;) {
    const auto got = ::recv(socket, part, sizeof part, 0);
    if (got <= 0) return all;
    all.append(part, static_cast<std::size_t>(got));
  }
}

TEST(TcpStream, BytesArriveInOrderBothWaysAtOnce) {
  for (const bool tcp : {false, true}) {
    auto [one, other] = tcp ? tcp_pair() : socket_pair();
    const auto first = make_loop("first");
    const auto second = make_loop("second");
    End a(first, over(first, std::move(one)));
    End b(second, over(second, std::move(other)));
    const std::string there = pattern(20 << 20, 1);
    const std::string back = pattern(20 << 20, 2);
    a.send(there);
    b.send(back);
    EXPECT_TRUE(b.take(there.size()) == there);
    EXPECT_TRUE(a.take(back.size()) == back);
  }
}

TEST(TcpStream, PartialWritesAreContinued) {
  auto [one, other] = tcp_pair();
  const int descriptor = one.get();
  const int little = 4096;
  const auto loop = make_loop();
  End a(loop, over(loop, std::move(one)));
  ASSERT_EQ(::setsockopt(descriptor, SOL_SOCKET, SO_SNDBUF, &little, sizeof little), 0);
  End b(loop, over(loop, std::move(other)));
  // Pieces of various lengths around what one call takes.
  const std::string bytes = pattern(1 << 20);
  for (const std::size_t piece : {std::size_t{1000}, std::size_t{16'384}, std::size_t{333'333}}) {
    a.send(bytes, piece);
    EXPECT_TRUE(b.take(bytes.size()) == bytes) << piece;
  }
  a.send(bytes.substr(0, 5000), 1);
  EXPECT_TRUE(b.take(5000) == bytes.substr(0, 5000));
}

TEST(TcpStream, EmptyPiecesAreNoBytes) {
  auto [one, other] = socket_pair();
  const auto loop = make_loop();
  const auto stream = over(loop, std::move(one));
  const ByteStream::Bytes pieces[] = {
      {}, std::as_bytes(std::span("ab", 2)), {}, std::as_bytes(std::span("c", 1)), {}};
  EXPECT_EQ(stream->write(pieces), 3u);
  EXPECT_EQ(stream->write({}), 0u);
  char got[8];
  EXPECT_EQ(::recv(other.get(), got, sizeof got, 0), 3);
  EXPECT_EQ(std::string(got, 3), "abc");
}

// A reader without a loop sees received bytes at once.
TEST(TcpStream, PeekShowsWantedBytesInOnePiece) {
  auto [one, other] = socket_pair();
  const auto loop = make_loop();
  const auto stream = over(loop, std::move(one));
  EXPECT_TRUE(stream->peek(1).empty());
  EXPECT_FALSE(stream->end());
  const std::string bytes = pattern(stream->window());
  std::promise<void> came;
  std::atomic<std::size_t> shown{0};
  stream->start(
      *loop,
      [&] {
        const auto seen = stream->peek(stream->window());
        shown = seen.size();
        if (seen.size() == bytes.size() &&
            std::memcmp(seen.data(), bytes.data(), bytes.size()) == 0)
          came.set_value();
      },
      [] {});
  for (std::size_t begin = 0; begin < bytes.size(); begin += 10'000) {
    const std::size_t part = std::min<std::size_t>(10'000, bytes.size() - begin);
    while (::send(other.get(), bytes.data() + begin, part, 0) != static_cast<ssize_t>(part)) {
    }
  }
  ASSERT_EQ(came.get_future().wait_for(std::chrono::seconds(60)), std::future_status::ready)
      << shown;
  stream->stop();
}

TEST(TcpStream, ConsumingAPartKeepsTheRest) {
  auto [one, other] = socket_pair();
  const auto loop = make_loop();
  const auto stream = over(loop, std::move(one));
  ASSERT_EQ(::send(other.get(), "abcdef", 6, 0), 6);
  ASSERT_EQ(stream->peek(6).size(), 6u);
  stream->consume(2);
  EXPECT_EQ(stream->peek(1).size(), 4u);
  std::byte two[2];
  EXPECT_EQ(stream->read(two), 2u);
  EXPECT_EQ(static_cast<char>(two[0]), 'c');
  stream->consume(2);
  EXPECT_TRUE(stream->peek(1).empty());
}

TEST(TcpStream, EndFollowsReceivedBytes) {
  auto [one, other] = tcp_pair();
  const auto loop = make_loop();
  const std::string bytes = pattern(3 << 20);
  End a(loop, over(loop, std::move(one)));
  auto b = std::make_unique<End>(loop, over(loop, std::move(other)));
  a.hold(true);
  b->send(bytes);
  b->hold(true);
  a.hold(false);
  b->finish_writing();
  const Error error = a.wait_end();
  EXPECT_TRUE(a.take(bytes.size()) == bytes);
  EXPECT_EQ(error.blame(), Blame::PeerLost);
  EXPECT_THAT(error.text(), HasSubstr("the other (tcp) was closed by the peer"));
}

TEST(TcpStream, WritesContinueAfterThePeerFinished) {
  auto [one, other] = tcp_pair();
  const auto loop = make_loop();
  End a(loop, over(loop, std::move(one)));
  End b(loop, over(loop, std::move(other)));
  a.finish_writing();
  b.wait_end();
  EXPECT_FALSE(b.stream().write_end());
  const std::string bytes = pattern(1 << 20);
  b.send(bytes);
  EXPECT_TRUE(a.take(bytes.size()) == bytes);
  EXPECT_FALSE(a.ended());
}

TEST(TcpStream, ResetEndsReaderAndWriter) {
  auto [one, other] = tcp_pair();
  const auto loop = make_loop();
  End a(loop, over(loop, std::move(one)));
  const linger at_once{1, 0};
  ::setsockopt(other.get(), SOL_SOCKET, SO_LINGER, &at_once, sizeof at_once);
  other = Descriptor();
  const Error error = a.wait_end();
  EXPECT_EQ(error.blame(), Blame::PeerLost);
  EXPECT_THAT(error.text(), HasSubstr("reset by the peer"));
  EXPECT_EQ(error.native_code(), ECONNRESET);
  const ByteStream::Bytes piece = std::as_bytes(std::span("x", 1));
  EXPECT_EQ(a.stream().write({&piece, 1}), 0u);
}

TEST(TcpStream, WriterLeavesTheReaderItsReason) {
  auto [one, other] = tcp_pair();
  const auto loop = make_loop();
  const auto stream = over(loop, std::move(one));
  ASSERT_EQ(::send(other.get(), "left behind", 11, 0), 11);
  const linger at_once{1, 0};
  ::setsockopt(other.get(), SOL_SOCKET, SO_LINGER, &at_once, sizeof at_once);
  other = Descriptor();
  const ByteStream::Bytes piece = std::as_bytes(std::span("x", 1));
  while (!stream->write_end()) stream->write({&piece, 1});
  EXPECT_THAT(stream->write_end()->text(), HasSubstr("reset by the peer"));
  EXPECT_FALSE(stream->end()) << "bytes are left to read";
  EXPECT_EQ(stream->peek(1).size(), 11u);
  stream->consume(11);
  EXPECT_TRUE(stream->peek(1).empty());
  ASSERT_TRUE(stream->end());
  EXPECT_THAT(stream->end()->text(), HasSubstr("reset by the peer"));
}

TEST(TcpStream, CutMessageEndsTheStream) {
  auto [one, other] = tcp_pair();
  const auto loop = make_loop();
  const auto stream = over(loop, std::move(one));
  ASSERT_EQ(::send(other.get(), "half", 4, 0), 4);
  other = Descriptor();
  std::promise<void> ended;
  bool told = false;
  stream->start(
      *loop,
      [&] {
        EXPECT_EQ(stream->peek(8).size(), 4u);
        if (stream->end() && !std::exchange(told, true)) ended.set_value();
      },
      [] {});
  EXPECT_EQ(ended.get_future().wait_for(std::chrono::seconds(60)), std::future_status::ready);
  stream->stop();
}

TEST(TcpStream, UnreadBytesCauseNoRepeatedCalls) {
  auto [one, other] = tcp_pair();
  const auto loop = make_loop();
  const auto stream = over(loop, std::move(one));
  std::atomic<int> calls{0};
  stream->start(
      *loop, [&] { ++calls; }, [] {});
  ASSERT_EQ(::send(other.get(), "x", 1, 0), 1);
  wait_until(
      *loop, [&] { return calls > 0; }, "readable");
  std::atomic<int> turns{0};
  std::function<void()> turn = [&] {
    if (++turns < 1000) loop->post(turn);
  };
  loop->post(turn);
  wait_until(
      *loop, [&] { return turns == 1000; }, "turns");
  EXPECT_LE(calls, 2);  // the watch's first event may be a separate one
  EXPECT_EQ(stream->peek(1).size(), 1u);
  stream->stop();
}

TEST(TcpStream, StopClosesSocketAndEndsCallbacks) {
  auto [one, other] = tcp_pair();
  const auto loop = make_loop();
  std::atomic<int> calls{0};
  auto stream = over(loop, std::move(one));
  stream->start(
      *loop, [&] { ++calls; }, [&] { ++calls; });
  std::promise<void> stopped;
  loop->post([&] {
    stream->stop();
    calls = 0;
    stopped.set_value();
  });
  stopped.get_future().wait();
  ASSERT_EQ(::send(other.get(), "x", 1, 0), 1);
  std::promise<void> later;
  loop->post([&] { loop->post([&] { later.set_value(); }); });
  later.get_future().wait();
  EXPECT_EQ(calls, 0);
  stream.reset();
  ::fcntl(other.get(), F_SETFL, 0);
  EXPECT_EQ(read_all(other.get()), "");  // returns because the socket was closed
}

TEST(TcpStream, UnreadBytesDoNotDropWrittenOnes) {
  auto [one, other] = tcp_pair();
  const auto loop = make_loop();
  const std::string bytes = pattern(100'000);
  {
    const auto stream = over(loop, std::move(one));
    ASSERT_EQ(::send(other.get(), "never read", 10, 0), 10);
    const ByteStream::Bytes piece = std::as_bytes(std::span(bytes));
    ASSERT_EQ(stream->write({&piece, 1}), bytes.size());
    stream->finish_writing();
  }
  ::fcntl(other.get(), F_SETFL, 0);
  EXPECT_TRUE(read_all(other.get()) == bytes);
}

TEST(TcpStream, IdleStreamStaysOpen) {
  Settings settings;
  settings.silence = milliseconds(20);
  auto [one, other] = tcp_pair();
  const auto loop = make_loop();
  End a(loop, over(loop, std::move(one), settings));
  End b(loop, over(loop, std::move(other), settings));
  for (int i = 0; i < 5; ++i) {
    a.send("before");
    EXPECT_EQ(b.take(6), "before");
    // Several checks later.
    std::atomic<bool> later{false};
    auto timer = loop->at(Deadline::in(settings.silence * 3), [&] { later = true; });
    wait_until(
        *loop, [&] { return later.load(); }, "a pause");
  }
  EXPECT_FALSE(a.ended());
  EXPECT_FALSE(b.ended());
}

TEST(TcpStream, SetsKeepaliveAndNoDelay) {
  auto [one, other] = tcp_pair();
  const int descriptor = one.get();
  const auto loop = make_loop();
  Settings settings;
  settings.idle = std::chrono::seconds(7);
  const TcpStream stream(loop, std::move(one), "the other", settings);
  int value = 0;
  socklen_t bytes = sizeof value;
  ASSERT_EQ(::getsockopt(descriptor, SOL_SOCKET, SO_KEEPALIVE, &value, &bytes), 0);
  EXPECT_EQ(value, 1);
  ASSERT_EQ(::getsockopt(descriptor, IPPROTO_TCP, TCP_KEEPIDLE, &value, &bytes), 0);
  EXPECT_EQ(value, 7);
  ASSERT_EQ(::getsockopt(descriptor, IPPROTO_TCP, TCP_NODELAY, &value, &bytes), 0);
  EXPECT_EQ(value, 1);
}

// More bytes than fit a cache would only wait in memory. The kernel sets twice the requested size,
// within its limit.
TEST(TcpStream, SendBufferIsBoundedWithinAHost) {
  auto [one, other] = tcp_pair();
  const int descriptor = one.get();
  const auto loop = make_loop();
  const TcpStream stream(loop, std::move(one), "the other", {});
  int most = 0, value = 0;
  std::ifstream("/proc/sys/net/core/wmem_max") >> most;
  socklen_t bytes = sizeof value;
  ASSERT_EQ(::getsockopt(descriptor, SOL_SOCKET, SO_SNDBUF, &value, &bytes), 0);
  EXPECT_EQ(value, 2 * (most > 0 ? std::min(most, 512 << 10) : 512 << 10));
}

}  // namespace
}  // namespace weft::transport::tcp
