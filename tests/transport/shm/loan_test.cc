// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <atomic>
#include <cerrno>
#include <csignal>
#include <memory>
#include <thread>
#include <vector>

#include <gtest/gtest.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <weft/transport/shm/loan.h>

namespace weft::transport::shm {
namespace {

using Bytes = std::span<const std::byte>;

std::vector<std::byte> pattern(std::size_t bytes) {
  std::vector<std::byte> made(bytes);
  for (std::size_t i = 0; i < bytes; ++i) made[i] = static_cast<std::byte>(i * 7 + i / 251);
  return made;
}

// Both ends in this process, which reads its own memory as it would read another's.
struct Pair {
  LoanControl control{};
  Lender lender{&control};
  Borrower borrower{&control};
  const Proof proof = make_proof();

  Pair() { borrower.open(memory(proof)); }
  PeerMemory memory(const Proof& expected) const {
    return {::getpid(), reinterpret_cast<std::uintptr_t>(proof.data()), expected};
  }
  // Reads until nothing comes any more.
  std::vector<std::byte> read(std::size_t at_most) {
    std::vector<std::byte> come(at_most);
    std::size_t count = 0;
    while (const std::size_t part = borrower.read(std::span(come).subspan(count))) count += part;
    come.resize(count);
    return come;
  }
};

TEST(Loan, EveryByteIsReadAndThePieceReturned) {
  Pair pair;
  for (const std::size_t bytes : {1u, 4096u, 300'001u, 3'000'000u}) {
    const auto piece = pattern(bytes);
    pair.lender.lend(piece);
    EXPECT_TRUE(pair.lender.is_out());
    EXPECT_FALSE(pair.lender.is_back());
    EXPECT_TRUE(pair.read(bytes) == piece) << bytes;
    EXPECT_TRUE(pair.borrower.take_returned());
    EXPECT_FALSE(pair.borrower.take_returned());
    ASSERT_TRUE(pair.lender.is_back());
    EXPECT_EQ(pair.lender.take_back(), bytes);
    EXPECT_FALSE(pair.lender.is_out());
    EXPECT_FALSE(pair.lender.has_failed());
    EXPECT_EQ(pair.borrower.lent(), 0u);
  }
}

TEST(Loan, LongPiecesAreReadInParts) {
  Pair pair;
  const auto piece = pattern(3 << 20);
  pair.lender.lend(piece);
  std::vector<std::byte> come(piece.size());
  const std::size_t first = pair.borrower.read(come);
  EXPECT_GT(first, 0u);
  EXPECT_LE(first, 1u << 20);
  EXPECT_FALSE(pair.lender.is_back());
  EXPECT_FALSE(pair.borrower.take_returned());
}

TEST(Loan, PeekedBytesPrecedeThoseThatAreRead) {
  Pair pair;
  const auto piece = pattern(400'000);
  pair.lender.lend(piece);
  const Bytes shown = pair.borrower.peek();
  ASSERT_GT(shown.size(), 1000u);
  EXPECT_TRUE(std::equal(shown.begin(), shown.end(), piece.begin()));
  const std::size_t copied = shown.size();
  pair.borrower.consume(1000);
  EXPECT_EQ(pair.borrower.peek().size(), copied - 1000);
  pair.borrower.consume(copied - 1000);
  EXPECT_FALSE(pair.borrower.has_copied());
  const auto rest = pair.read(piece.size());
  EXPECT_TRUE(
      std::equal(rest.begin(), rest.end(), piece.begin() + static_cast<long>(copied), piece.end()));
  EXPECT_TRUE(pair.lender.is_back());
}

// The lender may free the memory once withdraw() has returned.
TEST(Loan, WithdrawnPieceIsNotDelivered) {
  Pair pair;
  auto piece = std::make_unique<std::vector<std::byte>>(pattern(2 << 20));
  pair.lender.lend(*piece);
  std::vector<std::byte> come(piece->size());
  ASSERT_GT(pair.borrower.read(come), 0u);
  pair.lender.withdraw();
  piece.reset();
  EXPECT_EQ(pair.borrower.lent(), 0u);
  EXPECT_EQ(pair.borrower.read(come), 0u);
  EXPECT_FALSE(pair.borrower.take_returned());
  EXPECT_TRUE(pair.borrower.peek().empty());
  EXPECT_FALSE(pair.lender.is_back());
  EXPECT_TRUE(pair.lender.has_withdrawn());
}

TEST(Loan, ReturnedPieceCannotBeWithdrawn) {
  Pair pair;
  const auto piece = pattern(1000);
  pair.lender.lend(piece);
  EXPECT_EQ(pair.read(1000).size(), 1000u);
  pair.lender.withdraw();
  ASSERT_TRUE(pair.lender.is_back());
  EXPECT_EQ(pair.lender.take_back(), 1000u);
}

// The writer changes the memory as soon as withdraw() has returned, at any moment of the read. All
// bytes that count are those from before.
TEST(Loan, BytesFromAfterAWithdrawalDoNotCount) {
  constexpr std::size_t kBytes = 64 << 10;
  for (int round = 0; round < 50; ++round) {
    Pair pair;
    std::vector<std::byte> piece(kBytes, std::byte{1});
    pair.lender.lend(piece);
    std::vector<std::byte> come(kBytes);
    std::size_t count = 0;
    std::atomic<bool> begun{false};
    std::thread reader([&] {
      begun = true;
      count = pair.borrower.read(come);
    });
    while (!begun) std::this_thread::yield();
    for (int spin = 0; spin < round * 80; ++spin) begun.load();
    pair.lender.withdraw();
    // A thread sanitizer does not see the kernel's read, which this races with on purpose.
    std::fill(piece.begin(), piece.end(), std::byte{2});
    reader.join();
    EXPECT_EQ(std::count(come.begin(), come.begin() + static_cast<long>(count), std::byte{2}), 0);
    EXPECT_TRUE(count == 0 || count == kBytes);
    EXPECT_EQ(pair.lender.is_back(), count == kBytes);
  }
}

TEST(Loan, UnreadableMemoryComesBackUnread) {
  constexpr std::size_t kHalf = 1 << 20;
  void* const memory =
      ::mmap(nullptr, 2 * kHalf, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  ASSERT_NE(memory, MAP_FAILED);
  auto* const begin = static_cast<std::byte*>(memory);
  ASSERT_EQ(::mprotect(begin + kHalf, kHalf, PROT_NONE), 0);
  {
    Pair pair;
    pair.lender.lend({begin + kHalf, kHalf});
    EXPECT_TRUE(pair.read(kHalf).empty());
    ASSERT_TRUE(pair.lender.is_back());
    EXPECT_EQ(pair.lender.take_back(), 0u);
    EXPECT_TRUE(pair.lender.has_failed());
  }
  Pair pair;
  pair.lender.lend({begin, 2 * kHalf});
  const auto come = pair.read(2 * kHalf);
  EXPECT_LE(come.size(), kHalf);
  ASSERT_TRUE(pair.lender.is_back());
  EXPECT_EQ(pair.lender.take_back(), come.size());
  EXPECT_TRUE(pair.lender.has_failed());
  ::munmap(memory, 2 * kHalf);
}

TEST(Loan, BorrowerWithoutAccessReturnsThePiece) {
  LoanControl control{};
  Lender lender(&control);
  Borrower borrower(&control);
  const auto piece = pattern(1000);
  lender.lend(piece);
  std::vector<std::byte> come(1000);
  EXPECT_EQ(borrower.read(come), 0u);
  ASSERT_TRUE(lender.is_back());
  EXPECT_EQ(lender.take_back(), 0u);
}

TEST(Loan, ImpossibleNumbersOfAPeerAreNoticed) {
  Pair pair;
  const auto piece = pattern(1000);
  pair.lender.lend(piece);
  EXPECT_EQ(pair.read(1000).size(), 1000u);
  pair.control.read = 1001;
  EXPECT_FALSE(pair.lender.take_back());
  // The lender names memory that it does not have, and an endless piece.
  pair.lender.lend(piece);
  pair.control.address = 16;
  pair.control.bytes = ~std::uint64_t{0};
  EXPECT_TRUE(pair.read(1000).empty());
  EXPECT_TRUE(pair.lender.is_back());
}

TEST(PeerMemory, WrongProofReadsNothing) {
  const Pair pair;
  Proof wrong = pair.proof;
  wrong[1] ^= 1;
  const auto piece = pattern(100);
  std::vector<std::byte> come(100);
  const auto from = reinterpret_cast<std::uintptr_t>(piece.data());
  EXPECT_EQ(pair.memory(pair.proof).read(from, come), 0);
  EXPECT_TRUE(come == piece);
  EXPECT_EQ(pair.memory(wrong).read(from, come), ESRCH);
  EXPECT_EQ(pair.memory(wrong).try_to_read(), ESRCH);
  EXPECT_EQ(pair.memory(pair.proof).try_to_read(), 0);
}

// A child that this process may read, until it is changed by `change` in the child.
template <class Change>
void expect_after(const Change& change, int expected) {
  static Proof proof{};  // at one address in both
  int numbers[2];
  ASSERT_EQ(::pipe(numbers), 0);
  const pid_t child = ::fork();
  ASSERT_GE(child, 0);
  if (child == 0) {
    proof = {1, 2};
    change();
    if (::write(numbers[1], "x", 1) != 1) ::_exit(1);
    for (;;) ::pause();
  }
  char word = 0;
  EXPECT_EQ(::read(numbers[0], &word, 1), 1);
  const PeerMemory memory(child, reinterpret_cast<std::uintptr_t>(proof.data()), {1, 2});
  EXPECT_EQ(memory.try_to_read(), expected);
  ::kill(child, SIGKILL);
  ::waitpid(child, nullptr, 0);
  EXPECT_EQ(memory.try_to_read(), ESRCH);
  ::close(numbers[0]);
  ::close(numbers[1]);
}

TEST(PeerMemory, AnotherProcessIsReadUntilItEnds) {
  expect_after([] {}, 0);
}

TEST(PeerMemory, ProcessWithoutTheProofIsNotRead) {
  // As one that has got the number of a process that has ended.
  const Proof proof = make_proof();
  const PeerMemory parent(::getppid(), reinterpret_cast<std::uintptr_t>(&proof), proof);
  EXPECT_NE(parent.try_to_read(), 0);
}

// This process loses the right to read the child's memory by becoming another user.
TEST(PeerMemory, OtherUsersProcessIsNotRead) {
  if (::geteuid() != 0) GTEST_SKIP() << "only root can become another user";
  const auto proof = std::make_unique<Proof>(make_proof());
  const pid_t parent = ::getpid();
  const pid_t child = ::fork();
  ASSERT_GE(child, 0);
  if (child == 0) {
    constexpr unsigned kNobody = 65534;
    if (::setgid(kNobody) != 0 || ::setuid(kNobody) != 0) ::_exit(100);
    ::_exit(
        PeerMemory(parent, reinterpret_cast<std::uintptr_t>(proof->data()), *proof).try_to_read());
  }
  int status = 0;
  ::waitpid(child, &status, 0);
  EXPECT_EQ(WEXITSTATUS(status), EPERM);
}

}  // namespace
}  // namespace weft::transport::shm
