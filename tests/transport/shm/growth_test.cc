// SPDX-License-Identifier: Apache-2.0
// Rings that begin small, and the moment in which they grow.
#include <cerrno>
#include <cstring>
#include <random>
#include <span>
#include <vector>

#include <gtest/gtest.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <weft/base/error.h>
#include <weft/base/make_error.h>
#include <weft/transport/shm/segment.h>
#include <weft/transport/shm/shm_stream.h>

namespace {

int populate_error = 0;  // the errno with which pages are not allocated; 0: they are

}  // namespace

// Replaces the C library's function.
extern "C" int madvise(void* memory, std::size_t bytes, int advice) noexcept {
  constexpr int kPopulateWrite = 23;
  if (populate_error != 0 && advice == kPopulateWrite) {
    errno = populate_error;
    return -1;
  }
  return static_cast<int>(::syscall(SYS_madvise, memory, bytes, advice));
}

namespace weft::transport::shm {
namespace {

using Bytes = std::span<const std::byte>;

struct Pair {
  Segment made = Segment::make();
  Segment taken = Segment::take(Descriptor(dup(made.memory().get())));
  RingWriter writer = made.writer();
  RingReader reader = taken.reader();

  std::size_t write(Bytes piece) { return writer.write({&piece, 1}); }
  std::size_t allocated() const {
    struct stat about {};
    EXPECT_EQ(fstat(made.memory().get(), &about), 0);
    return static_cast<std::size_t>(about.st_blocks) * 512;
  }
};

// Bytes that depend on their position in the stream.
Bytes numbered(std::size_t from, std::size_t count) {
  constexpr std::size_t kPeriod = 65521;  // a prime
  static const std::vector<std::byte> all = [] {
    std::vector<std::byte> bytes(kPeriod + 2 * kRingBytes);
    for (std::size_t i = 0; i < bytes.size(); ++i)
      bytes[i] = static_cast<std::byte>(i % kPeriod * 7 + i % kPeriod / 251);
    return bytes;
  }();
  return Bytes(all).subspan(from % kPeriod, count);
}

bool is_numbered(Bytes bytes, std::size_t from) {
  return std::memcmp(bytes.data(), numbered(from, bytes.size()).data(), bytes.size()) == 0;
}

TEST(ShmGrowth, PairsThatExchangeLittleTakeLittleMemory) {
  Pair pair;
  const std::size_t at_first = pair.allocated();
  EXPECT_LE(at_first, 512u << 10);
  std::size_t place = 0;
  for (int turn = 0; turn < 1000; ++turn) {
    ASSERT_EQ(pair.write(numbered(place, 4000)), 4000u);
    ASSERT_TRUE(is_numbered(pair.reader.peek(4000), place));
    pair.reader.consume(4000);
    place += 4000;
  }
  EXPECT_EQ(pair.allocated(), at_first);
  ASSERT_EQ(pair.write(numbered(place, kRingBytes)), kRingBytes);
  EXPECT_TRUE(is_numbered(pair.reader.peek(kRingBytes), place));
  EXPECT_GE(pair.allocated(), at_first + kRingBytes);
  EXPECT_LT(pair.allocated(), at_first + 2 * kRingBytes) << "the other direction stays small";
}

TEST(ShmGrowth, UnreadBytesStayInOnePieceWithLaterOnes) {
  Pair pair;
  constexpr std::size_t kBefore = kSmallRingBytes - 1000;
  // So that the unread bytes go around the end of the small ring.
  ASSERT_EQ(pair.write(numbered(0, kBefore)), kBefore);
  ASSERT_EQ(pair.reader.peek(kBefore).size(), kBefore);
  pair.reader.consume(kBefore);
  ASSERT_EQ(pair.write(numbered(kBefore, 5000)), 5000u);
  ASSERT_EQ(pair.reader.peek(5000).size(), 5000u);
  pair.reader.consume(10);
  ASSERT_EQ(pair.write(numbered(kBefore + 5000, 2 * kSmallRingBytes)), 2 * kSmallRingBytes);
  const Bytes all = pair.reader.peek(4990 + 2 * kSmallRingBytes);
  ASSERT_EQ(all.size(), 4990 + 2 * kSmallRingBytes);
  EXPECT_TRUE(is_numbered(all, kBefore + 10));
}

TEST(ShmGrowth, StreamsOfRandomPiecesArriveWhole) {
  for (unsigned seed = 0; seed < 50; ++seed) {
    SCOPED_TRACE(seed);
    std::mt19937 random(seed);
    const auto below = [&](std::size_t limit) { return random() % limit; };
    Pair pair;
    std::size_t written = 0, read = 0;
    for (int turn = 0; turn < 200; ++turn) {
      // Mostly short pieces at first, so that the growth meets each state of the ring.
      const std::size_t longest = below(100) < 3 ? kRingBytes : kSmallRingBytes / 2;
      written += pair.write(numbered(written, 1 + below(longest)));
      const Bytes come = pair.reader.peek(below(2) == 0 ? 1 : written - read);
      ASSERT_TRUE(is_numbered(come, read));
      const std::size_t count = below(come.size() + 1);
      pair.reader.consume(count);
      read += count;
    }
    while (read < written) {
      const Bytes come = pair.reader.peek(written - read);
      ASSERT_FALSE(come.empty());
      ASSERT_TRUE(is_numbered(come, read));
      pair.reader.consume(come.size());
      read += come.size();
    }
    EXPECT_FALSE(pair.reader.broken() || pair.writer.broken());
  }
}

TEST(ShmGrowth, ImpossiblePositionBreaksTheReader) {
  for (const std::uint64_t grown_at : {std::uint64_t{1}, std::uint64_t{50}}) {
    Pair pair;
    void* const memory = mmap(nullptr, 4096, PROT_READ | PROT_WRITE, MAP_SHARED,
                              pair.made.memory().get(), 2 * kSmallRingBytes);
    ASSERT_NE(memory, MAP_FAILED);
    pair.write(numbered(0, 100));
    ASSERT_EQ(pair.reader.peek(100).size(), 100u);
    pair.reader.consume(100);
    pair.write(numbered(100, 100));
    static_cast<RingControl*>(memory)->grown_at = grown_at;  // bytes that have been read
    EXPECT_TRUE(pair.reader.peek(1).empty());
    EXPECT_TRUE(pair.reader.broken());
    munmap(memory, 4096);
  }
}

TEST(ShmGrowth, KernelsThatCannotAllocateLaterStillGrow) {
  Pair pair;
  populate_error = EINVAL;
  EXPECT_EQ(pair.write(numbered(0, kRingBytes)), kRingBytes);
  populate_error = 0;
  EXPECT_EQ(pair.writer.growth_error(), 0);
  EXPECT_TRUE(is_numbered(pair.reader.peek(kRingBytes), 0));
}

// A long message would wait in the small ring for ever.
TEST(ShmGrowth, WithoutMemoryEndsTheConnection) {
  int ends[2];
  ASSERT_EQ(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0, ends), 0);
  Segment made = Segment::make();
  Segment taken = Segment::take(Descriptor(dup(made.memory().get())));
  EventLoop loop("test");
  ShmStream sender(std::move(made), Descriptor(ends[0]), "the reader");
  ShmStream receiver(std::move(taken), Descriptor(ends[1]), "the writer");
  sender.start(
      loop, [] {}, [] {});
  receiver.start(
      loop, [] {}, [] {});
  const Bytes piece = numbered(0, kSmallRingBytes + 1);
  populate_error = ENOMEM;
  EXPECT_LT(sender.write({&piece, 1}), piece.size());
  populate_error = 0;
  ASSERT_TRUE(sender.write_end());
  EXPECT_EQ(sender.write_end()->blame(), Blame::Busy);
  EXPECT_EQ(sender.write_end()->text().find("shm: not enough memory for 1024 KiB more of memory "
                                            "shared with the reader"),
            0u)
      << sender.write_end()->text();
  EXPECT_EQ(sender.write({&piece, 1}), 0u);
  const bool ends_there = loop.drive([&] { return receiver.end().has_value(); },
                                     Deadline::in(std::chrono::seconds(60)));
  ASSERT_TRUE(ends_there);
  EXPECT_EQ(receiver.end()->blame(), Blame::PeerLost);
  sender.stop();
  receiver.stop();
}

}  // namespace
}  // namespace weft::transport::shm
