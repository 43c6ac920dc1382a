// SPDX-License-Identifier: Apache-2.0
#include <array>
#include <cstring>
#include <numeric>
#include <string>
#include <thread>
#include <vector>

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <weft/base/error.h>
#include <weft/base/make_error.h>
#include <weft/transport/shm/segment.h>

namespace weft::transport::shm {
namespace {

using Bytes = std::span<const std::byte>;

Bytes bytes_of(const std::string& text) { return std::as_bytes(std::span(text)); }
std::string text_of(Bytes bytes) {
  return {reinterpret_cast<const char*>(bytes.data()), bytes.size()};
}

struct Pair {
  Segment made = Segment::make();
  Segment taken = Segment::take(Descriptor(dup(made.memory().get())));
  RingWriter writer = made.writer();
  RingReader reader = taken.reader();

  std::size_t write(const std::string& text) {
    const Bytes piece = bytes_of(text);
    return writer.write({&piece, 1});
  }
};

TEST(ShmRing, CarriesPiecesInOrder) {
  Pair pair;
  const std::string first = "one ";
  const std::string second = "two";
  const std::array<Bytes, 3> pieces{bytes_of(first), Bytes(), bytes_of(second)};
  EXPECT_EQ(pair.writer.write(pieces), 7u);
  EXPECT_EQ(text_of(pair.reader.peek(1)), "one two");
  pair.reader.consume(4);
  EXPECT_EQ(text_of(pair.reader.peek(1)), "two");
  pair.reader.consume(3);
  EXPECT_TRUE(pair.reader.peek(1).empty());
  EXPECT_EQ(pair.writer.room(), kSmallRingBytes);
}

TEST(ShmRing, TakesNoMoreThanItHolds) {
  Pair pair;
  const std::string large(kRingBytes + 1000, 'x');
  EXPECT_EQ(pair.write(large), kRingBytes);
  EXPECT_EQ(pair.write("more"), 0u);
  EXPECT_EQ(pair.reader.peek(1).size(), kRingBytes);
  EXPECT_FALSE(pair.writer.has_more_room());
  pair.reader.consume(kRingBytes / 2);
  EXPECT_TRUE(pair.writer.has_more_room());
  EXPECT_EQ(pair.writer.room(), kRingBytes / 2);
}

TEST(ShmRing, ShowsWrappedBytesInOnePiece) {
  Pair pair;
  pair.write(std::string(kRingBytes - 3, 'x'));
  pair.reader.peek(1);
  pair.reader.consume(kRingBytes - 3);
  EXPECT_EQ(pair.write("around the end"), 14u);
  EXPECT_EQ(text_of(pair.reader.peek(1)), "around the end");
}

TEST(ShmRing, GoesBothWaysAtOnce) {
  Pair pair;
  pair.write("there");
  RingWriter back = pair.taken.writer();
  const std::string answer = "back again";
  const Bytes piece = bytes_of(answer);
  back.write({&piece, 1});
  RingReader answers = pair.made.reader();
  EXPECT_EQ(text_of(answers.peek(0)), "back again");
  EXPECT_EQ(text_of(pair.reader.peek(1)), "there");
}

TEST(ShmRing, LyingPeerBreaksIt) {
  Pair pair;
  void* memory = mmap(nullptr, 4096, PROT_READ | PROT_WRITE, MAP_SHARED, pair.made.memory().get(),
                      2 * kSmallRingBytes);
  ASSERT_NE(memory, MAP_FAILED);
  auto* control = static_cast<RingControl*>(memory);
  control->head.store(kRingBytes * 5);
  EXPECT_TRUE(pair.reader.peek(1).empty());
  EXPECT_TRUE(pair.reader.broken());
  control->tail.store(kRingBytes * 9);
  EXPECT_EQ(pair.writer.room(), 0u);
  EXPECT_TRUE(pair.writer.broken());
  munmap(memory, 4096);
}

// Pages have 4, 16 or 64 KiB, and only page-aligned memory can be mapped.
TEST(ShmSegment, AlignsRingsToTheLargestPage) {
  Pair pair;
  pair.write("there");
  RingWriter back = pair.taken.writer();
  const std::string answer = "and back";
  const Bytes piece = bytes_of(answer);
  back.write({&piece, 1});
  std::array<std::byte, 8> first{}, second{};
  ASSERT_EQ(pread(pair.made.memory().get(), first.data(), first.size(), 0), 8);
  ASSERT_EQ(pread(pair.made.memory().get(), second.data(), second.size(), kSmallRingBytes), 8);
  EXPECT_EQ(text_of(Bytes(first).first(5)), "there");
  EXPECT_EQ(text_of(second), "and back");
  EXPECT_EQ(kSmallRingBytes % (64 << 10), 0u);
}

TEST(ShmSegment, IsEitherAcceptedOrGivenUp) {
  for (const bool is_accepted_first : {true, false}) {
    const Segment made = Segment::make();
    const Segment taken = Segment::take(Descriptor(dup(made.memory().get())));
    if (is_accepted_first) {
      EXPECT_TRUE(taken.accept());
      EXPECT_FALSE(made.give_up());
    } else {
      EXPECT_TRUE(made.give_up());
      EXPECT_FALSE(taken.accept());
    }
  }
}

TEST(ShmSegment, RefusesUnsealedDescriptors) {
  const auto refused = [](Descriptor memory) {
    try {
      Segment::take(std::move(memory));
    } catch (const Error& error) {
      return error.blame() == Blame::Protocol;
    }
    return false;
  };
  EXPECT_TRUE(refused(Descriptor(memfd_create("small", MFD_CLOEXEC | MFD_ALLOW_SEALING))));
  Descriptor unsealed(memfd_create("unsealed", MFD_CLOEXEC | MFD_ALLOW_SEALING));
  const Segment made = Segment::make();
  ASSERT_EQ(ftruncate(unsealed.get(), lseek(made.memory().get(), 0, SEEK_END)), 0);
  EXPECT_TRUE(refused(std::move(unsealed)));
  EXPECT_TRUE(refused(Descriptor(open("/dev/null", O_RDWR | O_CLOEXEC))));
}

// A child writes numbers in pieces of changing length; this process reads them in pieces of other
// lengths.
TEST(ShmRing, CarriesAStreamBetweenTwoProcesses) {
  constexpr std::size_t kNumbers = 3'000'000;
  Segment made = Segment::make();
  const pid_t child = fork();
  ASSERT_GE(child, 0);
  if (child == 0) {
    const Segment mine = Segment::take(Descriptor(dup(made.memory().get())));
    RingWriter writer = mine.writer();
    std::vector<std::uint32_t> numbers(5000);
    std::uint32_t next = 0;
    for (std::size_t left = kNumbers; left > 0;) {
      const std::size_t count = std::min(left, 1 + next % numbers.size());
      std::iota(numbers.begin(), numbers.end(), next);
      Bytes piece = std::as_bytes(std::span(numbers.data(), count));
      while (!piece.empty()) piece = piece.subspan(writer.write({&piece, 1}));
      next += static_cast<std::uint32_t>(count);
      left -= count;
    }
    writer.close();
    _exit(0);
  }
  RingReader reader = made.reader();
  std::uint32_t next = 0;
  bool right = true;
  for (;;) {
    const bool was_closed =
        reader.closed();  // read first: then everything written before the close is in the ring
    const Bytes come = reader.peek(1);
    const std::size_t whole = come.size() / sizeof next * sizeof next;
    for (std::size_t at = 0; at < whole; at += sizeof next, ++next) {
      std::uint32_t number = 0;
      std::memcpy(&number, come.data() + at, sizeof number);
      right = right && number == next;
    }
    if (whole > 0) reader.consume(whole);
    if (whole == 0 && was_closed) break;
  }
  EXPECT_TRUE(right);
  EXPECT_EQ(next, kNumbers);
  int status = 0;
  waitpid(child, &status, 0);
  EXPECT_EQ(status, 0);
}

}  // namespace
}  // namespace weft::transport::shm
