// SPDX-License-Identifier: Apache-2.0
// Streams that lend their long pieces, also where two copies are faster. The program sets
// WEFT_SHM_COPIES before main(), because the environment is read once.
#include <array>
#include <atomic>
#include <cstdlib>
#include <cstring>
#include <future>
#include <thread>
#include <vector>

#include <gtest/gtest.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <weft/transport/shm/shm_stream.h>
#include <weft/transport/unix_socket.h>

namespace weft::transport::shm {
namespace {

[[maybe_unused]] const int kSet = ::setenv("WEFT_SHM_COPIES", "1", /*overwrite=*/1);

using Bytes = ByteStream::Bytes;

Deadline patience() { return Deadline::in(std::chrono::seconds(60)); }

std::vector<std::byte> pattern(std::size_t bytes, unsigned seed = 0) {
  std::vector<std::byte> made(bytes);
  for (std::size_t i = 0; i < bytes; ++i)
    made[i] = static_cast<std::byte>(i * 7 + i / 251 + seed * 13);
  return made;
}

// A stream with its loop. Collects what arrives, and sends pieces one after the other.
class End {
 public:
  explicit End(std::unique_ptr<ShmStream> stream)
      : loop_("end"), owned_(std::move(stream)), stream_(*owned_) {
    stream_.start(
        loop_, [this] { take(); }, [this] { go_on(); });
  }
  ~End() { stop(); }

  void send(Bytes piece) {
    given_ += piece.size();
    loop_.post([this, piece] {
      pieces_.push_back(piece);
      go_on();
    });
  }
  bool wait_for(std::size_t bytes) {
    return loop_.drive([&] { return count_ >= bytes; }, patience());
  }
  bool wait_for_end() {
    return loop_.drive([&] { return ended_.load(); }, patience());
  }
  // Everything that was sent.
  bool wait_until_sent() {
    return loop_.drive([&] { return is_sent(); }, patience());
  }
  bool is_sent() const { return sent_ == given_; }
  // Reads nothing until it is called with true.
  void read(bool reads) {
    on_loop([this, reads] {
      reads_ = reads;
      if (reads) take();
    });
  }
  void withdraw() {
    on_loop([this] { stream_.withdraw(Error(Blame::Cancelled, "test")); });
  }
  void stop() {
    on_loop([this] { stream_.stop(); });
  }
  const std::vector<std::byte>& come() const { return come_; }
  ShmStream& stream() { return stream_; }

 private:
  template <class Run>
  void on_loop(const Run& run) {
    std::promise<void> done;
    loop_.post([&] {
      run();
      done.set_value();
    });
    done.get_future().wait();
  }
  void take() {
    if (stream_.end()) ended_ = true;
    static thread_local std::array<std::byte, 700'000> buffer;
    while (const std::size_t got = reads_ ? stream_.read(buffer) : 0)
      come_.insert(come_.end(), buffer.begin(), buffer.begin() + static_cast<long>(got));
    count_ = come_.size();
  }
  void go_on() {
    while (!pieces_.empty()) {
      const std::size_t taken = stream_.write(pieces_);
      settle(taken);
      if (taken == 0) return;
    }
  }
  void settle(std::size_t taken) {
    sent_ += taken;
    while (taken > 0) {
      const std::size_t part = std::min(taken, pieces_.front().size());
      pieces_.front() = pieces_.front().subspan(part);
      taken -= part;
      if (pieces_.front().empty()) pieces_.erase(pieces_.begin());
    }
  }

  EventLoop loop_;
  const std::unique_ptr<ShmStream> owned_;
  ShmStream& stream_;
  std::vector<Bytes> pieces_;
  std::vector<std::byte> come_;
  std::atomic<std::size_t> count_{0};
  std::atomic<bool> ended_{false};
  std::atomic<std::size_t> given_{0}, sent_{0};
  bool reads_ = true;
};

class ShmLending : public testing::Test {
 protected:
  ShmLending() {
    int numbers[2];
    EXPECT_EQ(::socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0, numbers), 0);
    Segment made = Segment::make();
    Segment taken = Segment::take(Descriptor(::dup(made.memory().get())));
    spy_.emplace(Segment::take(Descriptor(::dup(made.memory().get()))));
    here_.emplace(std::make_unique<ShmStream>(std::move(made), Descriptor(numbers[0]), "there"));
    there_.emplace(std::make_unique<ShmStream>(std::move(taken), Descriptor(numbers[1]), "here"));
    // An end that has read something has tried whether it can read the other one's memory.
    here_->send(hello_);
    there_->send(hello_);
    EXPECT_TRUE(here_->wait_for(hello_.size()) && there_->wait_for(hello_.size()));
  }
  // Bytes that `here` has written to its ring.
  std::uint64_t in_ring() const { return spy_->reader().head(); }
  bool has_come(std::span<const std::vector<std::byte>> pieces, const End& at) const {
    std::vector<std::byte> all(hello_);
    for (const auto& piece : pieces) all.insert(all.end(), piece.begin(), piece.end());
    return at.come() == all;
  }

  const std::vector<std::byte> hello_ = pattern(5);
  std::optional<Segment> spy_;
  std::optional<End> here_, there_;
};

TEST_F(ShmLending, LongPiecesDoNotPassTheRing) {
  const std::array pieces{pattern(6 << 20, 1)};
  here_->send(pieces[0]);
  ASSERT_TRUE(there_->wait_for(hello_.size() + pieces[0].size()));
  EXPECT_TRUE(has_come(pieces, *there_));
  EXPECT_TRUE(here_->wait_until_sent());
  EXPECT_EQ(in_ring(), hello_.size());
}

TEST_F(ShmLending, PiecesOfAllSizesArriveInOrder) {
  std::vector<std::vector<std::byte>> pieces;
  std::size_t total = hello_.size();
  for (unsigned i = 0; i < 36; ++i) {
    const std::array<std::size_t, 6> sizes{1, 1'300'000, 40, 1 << 20, 64 << 10, (1 << 20) + 1};
    pieces.push_back(pattern(sizes[i * 7 % 6] + i, i));
    total += pieces.back().size();
  }
  for (const auto& piece : pieces) here_->send(piece);
  for (const auto& piece : pieces) there_->send(piece);
  ASSERT_TRUE(there_->wait_for(total) && here_->wait_for(total));
  EXPECT_TRUE(has_come(pieces, *there_));
  EXPECT_TRUE(has_come(pieces, *here_));
}

TEST_F(ShmLending, SendIsOverOnlyWhenThePieceIsRead) {
  const std::array pieces{pattern(1'400'000)};
  there_->read(false);
  here_->send(pieces[0]);
  here_->read(true);  // returns after send() has run
  EXPECT_FALSE(here_->is_sent());
  there_->read(true);
  EXPECT_TRUE(here_->wait_until_sent());
  EXPECT_TRUE(has_come(pieces, *there_));
}

TEST_F(ShmLending, WithdrawnPieceCutsTheStream) {
  auto piece = std::make_unique<std::vector<std::byte>>(pattern(8 << 20));
  there_->read(false);
  here_->send(*piece);
  here_->withdraw();
  piece.reset();
  there_->read(true);
  here_->stop();
  EXPECT_TRUE(there_->wait_for_end());
  EXPECT_EQ(there_->come().size(), hello_.size());
  EXPECT_EQ(there_->stream().end()->blame(), Blame::PeerLost);
}

// The kernel reads such memory for nobody.
TEST_F(ShmLending, MemoryThatCannotBeReadIsCopiedTwice) {
  constexpr std::size_t kBytes = 2 << 20;
  const Descriptor secret(static_cast<int>(::syscall(SYS_memfd_secret, 0)));
  if (!secret || ::ftruncate(secret.get(), kBytes) != 0) GTEST_SKIP() << "no memfd_secret here";
  void* const memory = ::mmap(nullptr, kBytes, PROT_READ | PROT_WRITE, MAP_SHARED, secret.get(), 0);
  if (memory == MAP_FAILED) GTEST_SKIP() << "no memory may be locked";
  const std::array pieces{pattern(kBytes, 3), pattern(300'000, 4)};
  std::memcpy(memory, pieces[0].data(), kBytes);
  here_->send({static_cast<const std::byte*>(memory), kBytes});
  here_->send(pieces[1]);
  ASSERT_TRUE(there_->wait_for(hello_.size() + kBytes + pieces[1].size()));
  EXPECT_TRUE(has_come(pieces, *there_));
  EXPECT_EQ(in_ring(), hello_.size() + kBytes + pieces[1].size());
  here_->stop();
  ::munmap(memory, kBytes);
}

// Two processes of a user that is not root, which may read any process. The second one connects to
// the first and forbids other processes to read its memory: before it connects, or between two
// pieces. Each ends with 0 if all is well.
void become_nobody() {
  constexpr unsigned kNobody = 65534;
  if (::geteuid() == 0 && (::setgid(kNobody) != 0 || ::setuid(kNobody) != 0)) ::_exit(1);
  ::prctl(PR_SET_DUMPABLE, 1);  // a change of the user forbids it too
}

struct Pieces {
  const std::vector<std::byte> hello = pattern(5), before = pattern(3 << 20, 1),
                               after = pattern(2 << 20, 2);
};

[[noreturn]] void send_and_forbid(const Address& listener, bool is_forbidden) {
  const Pieces pieces;
  if (is_forbidden) ::prctl(PR_SET_DUMPABLE, 0);
  End end(std::make_unique<ShmStream>(listener, patience()));
  end.send(pieces.hello);
  if (!end.wait_for(pieces.hello.size())) ::_exit(20);
  end.send(pieces.before);
  if (!end.wait_until_sent()) ::_exit(21);
  ::prctl(PR_SET_DUMPABLE, 0);
  end.send(pieces.after);
  const bool has_ended = end.wait_until_sent() && end.wait_for_end();
  ::_exit(has_ended ? 0 : 22);
}

[[noreturn]] void receive_from_one_that_forbids(bool is_forbidden) {
  become_nobody();
  const Pieces pieces;
  const ListeningSocket listening = listen_for_this_user("shm");
  Address address = Address::here();
  address.descriptor = listening.name.get();
  const pid_t child = ::fork();
  if (child == 0) send_and_forbid(address, is_forbidden);
  Descriptor socket;
  while (!socket) socket = accept_from(listening.socket, "shm");
  std::optional<Segment> segment;
  while (!segment) {
    if (auto taken = Segment::take_from(socket)) segment.emplace(std::move(*taken));
  }
  const Segment spy = Segment::take(Descriptor(::dup(segment->memory().get())));
  const auto in_ring = [&] { return spy.reader().head(); };
  {
    End end(std::make_unique<ShmStream>(std::move(*segment), std::move(socket), "the sender"));
    // An end that has read something has tried whether it can read the other one's memory.
    if (!end.wait_for(pieces.hello.size())) ::_exit(9);
    end.send(pieces.hello);
    std::vector<std::byte> all(pieces.hello);
    all.insert(all.end(), pieces.before.begin(), pieces.before.end());
    all.insert(all.end(), pieces.after.begin(), pieces.after.end());
    if (!end.wait_for(all.size()) || end.come() != all) ::_exit(10);
    if (in_ring() != all.size() - (is_forbidden ? 0 : pieces.before.size())) ::_exit(11);
  }
  int status = -1;
  ::waitpid(child, &status, 0);
  ::_exit(WEXITSTATUS(status));
}

void expect_all_to_arrive(bool is_forbidden) {
  const pid_t child = ::fork();
  ASSERT_GE(child, 0);
  if (child == 0) receive_from_one_that_forbids(is_forbidden);
  int status = -1;
  ::waitpid(child, &status, 0);
  ASSERT_TRUE(WIFEXITED(status));
  EXPECT_EQ(WEXITSTATUS(status), 0);
}

TEST(ShmLendingProcesses, WithoutPermissionAllIsCopiedTwice) { expect_all_to_arrive(true); }

TEST(ShmLendingProcesses, PermissionMayBeLostLater) { expect_all_to_arrive(false); }

}  // namespace
}  // namespace weft::transport::shm
