// SPDX-License-Identifier: Apache-2.0
#include <array>
#include <cerrno>
#include <chrono>
#include <csignal>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <functional>
#include <future>
#include <memory>
#include <mutex>
#include <numeric>
#include <optional>
#include <thread>
#include <vector>

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <unistd.h>

#include <weft/base/log.h>
#include <weft/tests/harness/folder.h>
#include <weft/tests/harness/sanitized.h>
#include <weft/transport/shm/shm_stream.h>
#include <weft/transport/transport.h>
#include <weft/transport/unix_socket.h>

namespace weft::transport::shm {

Result<std::shared_ptr<Transport>> open();  // as the table of backends declares it

namespace {

constexpr uid_t kNobody = 65534;

using std::chrono::seconds;
using Bytes = ByteStream::Bytes;

Deadline patience() { return Deadline::in(seconds(60)); }

Descriptor duplicate(const Descriptor& descriptor) { return Descriptor(dup(descriptor.get())); }

struct Sockets {
  Descriptor ends[2];
  Sockets() {
    int numbers[2];
    EXPECT_EQ(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0, numbers), 0);
    for (int i = 0; i < 2; ++i) ends[i] = Descriptor(numbers[i]);
  }
};

// After this the stream calls no handler any more.
void stop_on(EventLoop& loop, ByteStream& stream) {
  std::promise<void> stopped;
  loop.post([&] {
    stream.stop();
    stopped.set_value();
  });
  stopped.get_future().wait();
}

// A stream whose bytes are collected on the loop as they arrive.
struct Receiver {
  EventLoop& loop;
  ShmStream& stream;
  std::vector<std::byte> come;  // accessed on the loop
  std::atomic<std::size_t> count{0};
  std::atomic<bool> ended{false};

  Receiver(EventLoop& on, ShmStream& from) : loop(on), stream(from) {
    stream.start(
        loop, [this] { take(); }, [] {});
  }
  ~Receiver() { stop_on(loop, stream); }
  void take() {
    std::byte buffer[40000];
    while (const std::size_t got = stream.read(buffer))
      come.insert(come.end(), buffer, buffer + got);
    count = come.size();
    if (stream.end()) ended = true;
  }
  bool wait_for(std::size_t bytes) {
    return loop.drive([&] { return count >= bytes; }, patience());
  }
  bool wait_for_end() {
    return loop.drive([&] { return ended.load(); }, patience());
  }
};

TEST(ShmStream, WakeUpsCarryMoreThanTheRingHolds) {
  constexpr std::size_t kBytes = 5 * kRingBytes + 12345;
  Sockets sockets;
  EventLoop near("near");
  EventLoop far("far");
  Segment made = Segment::make();
  Segment taken = Segment::take(duplicate(made.memory()));
  ShmStream sender(std::move(made), std::move(sockets.ends[0]), "far");
  ShmStream receiving(std::move(taken), std::move(sockets.ends[1]), "near");
  Receiver receiver(far, receiving);
  std::vector<std::byte> bytes(kBytes);
  for (std::size_t i = 0; i < kBytes; ++i) bytes[i] = static_cast<std::byte>(i * 7 + i / 256);
  std::atomic<std::size_t> written{0};
  const auto go_on = [&] {
    const Bytes rest = Bytes(bytes).subspan(written);
    written += sender.write({&rest, 1});
  };
  sender.start(
      near, [] {}, [&] { go_on(); });
  near.post(go_on);
  // The test drives neither loop: only wake-ups can move the bytes.
  while (receiver.count < kBytes || written < kBytes) std::this_thread::yield();
  stop_on(near, sender);
  ASSERT_EQ(written, kBytes);
  EXPECT_EQ(receiver.come, bytes);
}

// Keeps a loop from sleeping, so that only a connection that rests is parked.
struct BusyLoop {
  EventLoop loop{"busy"};
  EventLoop::Registration poller = loop.poll([] { return true; });
};

bool becomes(const std::function<bool()>& true_now) {
  const Deadline deadline = patience();
  while (!true_now() && !deadline.passed()) std::this_thread::yield();
  return true_now();
}

TEST(ShmStream, AQuietConnectionRestsUntilItsPeerWritesOrEnds) {
  Sockets sockets;
  BusyLoop busy;
  Segment made = Segment::make();
  const Segment seen = Segment::take(duplicate(made.memory()));  // with the receiver's flags
  ShmStream receiving(Segment::take(duplicate(made.memory())), std::move(sockets.ends[1]), "near");
  auto sender = std::make_unique<ShmStream>(std::move(made), std::move(sockets.ends[0]), "far");
  Receiver receiver(busy.loop, receiving);
  const std::vector<std::byte> bytes(1000, std::byte{5});
  const Bytes piece(bytes);
  for (std::size_t message = 1; message <= 3; ++message) {
    ASSERT_TRUE(becomes([&] { return seen.mine().parked == 1; })) << "it is looked at for ever";
    ASSERT_EQ(sender->write({&piece, 1}), bytes.size());
    ASSERT_TRUE(becomes([&] { return receiver.count == message * bytes.size(); }));
  }
  ASSERT_TRUE(becomes([&] { return seen.mine().parked == 1; }));
  EXPECT_FALSE(receiver.ended);
  sender.reset();
  EXPECT_TRUE(becomes([&] { return receiver.ended.load(); }));
}

TEST(ShmStream, AConnectionThatRestsIsToldOfRoom) {
  constexpr std::size_t kBytes = 3 * kRingBytes;
  Sockets sockets;
  EventLoop loop("test");
  BusyLoop busy;
  Segment made = Segment::make();
  ShmStream receiving(Segment::take(duplicate(made.memory())), std::move(sockets.ends[1]), "near");
  const Segment seen = Segment::take(duplicate(made.memory()));
  ShmStream sender(std::move(made), std::move(sockets.ends[0]), "far");
  const std::vector<std::byte> bytes(kBytes, std::byte{6});
  std::atomic<std::size_t> written{0};
  const auto go_on = [&] {
    const Bytes rest = Bytes(bytes).subspan(written);
    written += sender.write({&rest, 1});
  };
  sender.start(
      busy.loop, [] {}, [&] { go_on(); });
  busy.loop.post(go_on);
  ASSERT_TRUE(becomes([&] { return written > 0 && seen.theirs().parked == 1; }));
  ASSERT_LT(written, kBytes) << "otherwise it does not wait for room";
  Receiver receiver(loop, receiving);  // reads from now on
  EXPECT_TRUE(becomes([&] { return receiver.count == kBytes; }));
  stop_on(busy.loop, sender);
}

TEST(ShmStream, DeliversBytesOfAnEndedSender) {
  Sockets sockets;
  EventLoop loop("test");
  Segment made = Segment::make();
  ShmStream receiving(Segment::take(duplicate(made.memory())), std::move(sockets.ends[1]), "near");
  {
    ShmStream sender(std::move(made), std::move(sockets.ends[0]), "far");
    const std::vector<std::byte> bytes(1000, std::byte{5});
    const Bytes piece(bytes);
    EXPECT_EQ(sender.write({&piece, 1}), 1000u);
  }
  Receiver receiver(loop, receiving);
  EXPECT_TRUE(receiver.wait_for(1000));
  EXPECT_TRUE(receiver.wait_for_end());
  EXPECT_EQ(receiving.end()->blame(), Blame::PeerLost);
}

TEST(ShmStream, NoticesAKilledPeer) {
  Sockets sockets;
  Segment made = Segment::make();
  const pid_t child = fork();
  ASSERT_GE(child, 0);
  if (child == 0) {
    sockets.ends[1] = Descriptor();
    ShmStream sender(std::move(made), std::move(sockets.ends[0]), "the parent");
    const std::vector<std::byte> bytes(100, std::byte{1});
    const Bytes piece(bytes);
    sender.write({&piece, 1});
    for (;;) pause();
  }
  sockets.ends[0] = Descriptor();
  EventLoop loop("test");
  ShmStream receiving(Segment::take(duplicate(made.memory())), std::move(sockets.ends[1]),
                      "the child");
  Receiver receiver(loop, receiving);
  ASSERT_TRUE(receiver.wait_for(100));
  EXPECT_FALSE(receiving.end());
  kill(child, SIGKILL);
  EXPECT_TRUE(receiver.wait_for_end());
  EXPECT_NE(receiving.end()->text().find("the child is gone"), std::string::npos)
      << receiving.end()->text();
  int status = 0;
  waitpid(child, &status, 0);
}

TEST(ShmStream, ConnectsAndPassesItsSegment) {
  const ListeningSocket listening = listen_for_this_user("shm");
  Address address = Address::here();
  address.descriptor = listening.name.get();
  EventLoop loop("test");
  ShmStream connecting(Address::parse(address.text()), patience());
  Receiver answers(loop, connecting);
  Descriptor accepted;
  while (!accepted) accepted = accept_from(listening.socket, "shm");
  EXPECT_EQ(check_peer(accepted, "shm"), getpid());
  std::optional<Segment> segment;
  while (!segment) {
    if (auto taken = Segment::take_from(accepted)) segment.emplace(std::move(*taken));
  }
  ShmStream answering(std::move(*segment), std::move(accepted), "caller");
  const std::vector<std::byte> bytes(10, std::byte{9});
  const Bytes piece(bytes);
  EXPECT_EQ(answering.write({&piece, 1}), 10u);
  EXPECT_TRUE(answers.wait_for(10));
}

// All processes of a user together may have as many descriptors in flight as RLIMIT_NOFILE allows
// one of them to open. Runs in a process of its own, which is not root: root is exempt.
[[noreturn]] void connect_while_too_many_are_under_way() {
  if (::geteuid() == 0 && (::setgid(kNobody) != 0 || ::setuid(kNobody) != 0)) ::_exit(1);
  const ListeningSocket listening = listen_for_this_user("shm");
  Address address = Address::here();
  address.descriptor = listening.name.get();
  auto under_way = std::make_unique<Sockets>();
  const rlimit few{64, 64};
  ::setrlimit(RLIMIT_NOFILE, &few);
  for (int passed = 0; pass(under_way->ends[0], std::array{std::byte{1}}, listening.name, "test");
       ++passed) {
    if (passed == 1000) ::_exit(2);  // this system has no such limit
  }
  EventLoop loop("child");
  ShmStream connecting(address, patience());
  Receiver receiver(loop, connecting);
  const Descriptor accepted = accept_from(listening.socket, "shm");
  if (!accepted || connecting.end() || Segment::take_from(accepted)) ::_exit(3);
  under_way.reset();
  std::optional<Segment> segment;
  const bool is_passed = loop.drive(
      [&] {
        if (!segment) {
          if (auto taken = Segment::take_from(accepted)) segment.emplace(std::move(*taken));
        }
        return segment.has_value();
      },
      patience());
  ::_exit(is_passed && !connecting.end() ? 0 : 4);
}

TEST(ShmStream, RetriesPassingItsSegment) {
  const pid_t child = fork();
  ASSERT_GE(child, 0);
  if (child == 0) connect_while_too_many_are_under_way();
  int status = -1;
  waitpid(child, &status, 0);
  ASSERT_TRUE(WIFEXITED(status));
  if (WEXITSTATUS(status) == 2)
    GTEST_SKIP() << "this system counts no descriptors that are under way";
  EXPECT_EQ(WEXITSTATUS(status), 0);
}

TEST(ShmStream, GoneListenerIsPeerLost) {
  Address address = Address::here();
  {
    const ListeningSocket listening = listen_for_this_user("shm");
    address.descriptor = listening.name.get();
  }
  EventLoop loop("test");
  ShmStream connecting(address, patience());
  Receiver receiver(loop, connecting);
  EXPECT_TRUE(receiver.wait_for_end());
  EXPECT_EQ(connecting.end()->blame(), Blame::PeerLost);
}

// Limits the file size or the address space of this process: the two resources that shared memory
// can exhaust.
class Limit {
 public:
  Limit(__rlimit_resource which, rlim_t most) : which_(which) {
    ::signal(SIGXFSZ, SIG_IGN);
    ::getrlimit(which, &before_);
    rlimit now = before_;
    now.rlim_cur = most;
    ::setrlimit(which, &now);
  }
  ~Limit() { ::setrlimit(which_, &before_); }
  Limit(const Limit&) = delete;
  Limit& operator=(const Limit&) = delete;

 private:
  const __rlimit_resource which_;
  rlimit before_{};
};

std::size_t address_space() {
  std::ifstream numbers("/proc/self/statm");
  std::size_t pages = 0;
  numbers >> pages;
  return pages * static_cast<std::size_t>(::sysconf(_SC_PAGESIZE));
}

TEST(ShmStream, ConnectingWithoutMemoryIsBusy) {
  const ListeningSocket listening = listen_for_this_user("shm");
  Address address = Address::here();
  address.descriptor = listening.name.get();
  const auto expect_busy = [&](__rlimit_resource which, rlim_t most, const std::string& text) {
    const Limit limit(which, most);
    try {
      const ShmStream refused(address, patience());
      ADD_FAILURE() << "a segment was made without memory";
    } catch (const Error& error) {
      EXPECT_EQ(error.blame(), Blame::Busy) << error.what();
      EXPECT_NE(error.text().find(text), std::string::npos) << error.text();
    }
  };
  expect_busy(RLIMIT_FSIZE, 4096, "not enough memory for 2368 KiB of shared memory");
  // A sanitizer has reserved more address space than any limit leaves.
  if (!harness::kSanitized)
    expect_busy(RLIMIT_AS, address_space() + (64 << 10), "no address space for a segment");
  EventLoop loop("test");
  ShmStream connecting(address, patience());
  Receiver receiver(loop, connecting);
  Descriptor accepted;
  while (!accepted) accepted = accept_from(listening.socket, "shm");
  EXPECT_FALSE(connecting.end());
}

TEST(ShmListener, OutOfDescriptorsWarnsOnce) {
  std::atomic<int> warnings{0};
  const log::Capture capture([&](LogLevel level, std::string_view text) {
    if (level == LogLevel::Warn &&
        text.find("cannot accept a connection") != std::string_view::npos)
      ++warnings;
  });
  const auto transport = open().value();
  const auto loop = std::make_shared<EventLoop>("test");
  std::atomic<int> accepted{0};
  const auto listener = transport->connector()->listen(
      {.loop = loop, .interface_address = {}, .accepted = [&](std::shared_ptr<Connection>) {
         ++accepted;
       }});
  const Address address = Address::parse(listener->address());
  const auto near_loop = std::make_shared<EventLoop>("near");
  std::shared_ptr<Connection> connection;
  std::optional<EventLoop::Registration> later;
  std::atomic<bool> has_tried{false};
  {
    // Uses up all descriptors but one, which the connecting socket needs.
    std::vector<Descriptor> filler;
    filler.emplace_back(dup(STDERR_FILENO));
    const Limit limit(RLIMIT_NOFILE, static_cast<rlim_t>(filler.back().get()) + 8);
    while (filler.back()) filler.emplace_back(dup(STDERR_FILENO));
    filler.erase(filler.begin());
    const auto socket = connect_to(address.process, address.descriptor, "shm");
    ASSERT_TRUE(socket);
    ASSERT_TRUE(loop->drive([&] { return warnings > 0 || accepted > 0; }, patience()));
    later = loop->at(Deadline::in(std::chrono::milliseconds(220)),
                     [&] { has_tried = true; });  // long enough for several attempts
    ASSERT_TRUE(loop->drive([&] { return has_tried.load(); }, patience()));
  }
  connection = transport->connector()->connect(listener->address(),
                                               {.loop = near_loop, .deadline = patience()});
  ASSERT_TRUE(loop->drive([&] { return accepted > 0; }, patience()));
  EXPECT_EQ(warnings, 1);
}

// A message that it sent before its deadline, but that was not accepted by then, is not delivered
// either.
TEST(ShmStream, TimedOutConnectIsNotAccepted) {
  const auto transport = open().value();
  const auto near_loop = std::make_shared<EventLoop>("near");
  const auto busy = std::make_shared<EventLoop>("busy", EventLoop::Thread::Given);
  std::vector<std::shared_ptr<Connection>> accepted;
  const auto listener = transport->connector()->listen(
      {.loop = busy, .interface_address = {}, .accepted = [&](std::shared_ptr<Connection> one) {
         accepted.push_back(one);
       }});
  const auto connect = [&](Deadline deadline) {
    return transport->connector()->connect(listener->address(),
                                           {.loop = near_loop, .deadline = deadline});
  };
  std::atomic<bool> closed{false};
  const auto first = connect(Deadline::in(std::chrono::milliseconds(20)));
  first->receive({[](const Arrival&) {},
                  [&](const Error& why) {
                    EXPECT_EQ(why.blame(), Blame::Timeout) << why.what();
                    closed = true;
                  }});
  ASSERT_TRUE(near_loop->drive([&] { return closed.load(); }, patience()));
  // The listener accepts the second connection and the third one after the other.
  const auto second = connect(patience());
  const auto third = connect(patience());
  ASSERT_TRUE(busy->drive([&] { return accepted.size() >= 2; }, patience()));
  EXPECT_EQ(accepted.size(), 2u);
  // Turns for a while to see that no further connection follows.
  std::atomic<bool> later{false};
  const auto timer = busy->at(Deadline::in(std::chrono::milliseconds(20)), [&] { later = true; });
  ASSERT_TRUE(busy->drive([&] { return later.load(); }, patience()));
  EXPECT_EQ(accepted.size(), 2u);
}

TEST(ShmAddress, MalformedTextIsACallerError) {
  for (const char* text :
       {"", "a/b/c", "a/b/1/x", "a/b/-1/3", "/b/1/2", "127.0.0.1:80", "a/b/1/2/3"}) {
    EXPECT_THROW(Address::parse(text), Error) << text;
  }
}

// The other process: becomes another user and connects to the listener whose name it is passed,
// once while the name's mode forbids it and once while it does not. After each attempt it reports
// the result: an errno, or 0 if the connection was closed without a byte.
[[noreturn]] void knock_as_another_user(const Descriptor& wire) {
  std::array<std::byte, 1> word{};
  const auto name = take_passed(wire, word, "test");
  if (!name || !*name || ::setgid(kNobody) != 0 || ::setuid(kNobody) != 0) ::_exit(1);
  const std::string path = "/proc/self/fd/" + std::to_string(name->get());
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  path.copy(address.sun_path, path.size());
  for (const bool is_open : {false, true}) {
    const Descriptor socket(::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0));
    int came = 0;
    if (::connect(socket.get(), reinterpret_cast<const sockaddr*>(&address), sizeof address) != 0)
      came = errno;
    char nothing = 0;
    if (came == 0 && ::read(socket.get(), &nothing, 1) != 0) came = -1;
    if (::write(wire.get(), &came, sizeof came) != sizeof came) ::_exit(1);
    if (!is_open && ::read(wire.get(), &nothing, 1) != 1) ::_exit(1);
  }
  ::_exit(0);
}

// Two checks keep other users out: the mode of the socket's name, and the peer's credentials, which
// the kernel reports.
TEST(ShmSocket, OtherUsersAreTurnedAway) {
  if (::geteuid() != 0) GTEST_SKIP() << "only root can start a process of another user";
  int numbers[2];
  ASSERT_EQ(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, numbers), 0);
  const Descriptor wire(numbers[0]);
  Descriptor theirs(numbers[1]);
  const pid_t child = fork();
  ASSERT_GE(child, 0);
  if (child == 0) knock_as_another_user(theirs);
  theirs = Descriptor();
  std::mutex mutex;
  std::string logged;
  const log::Capture capture([&](LogLevel, std::string_view line) {
    std::lock_guard lock(mutex);
    logged += line;
  });
  const auto transport = open().value();
  const auto loop = std::make_shared<EventLoop>("test");
  std::atomic<int> accepted{0};
  const auto listener = transport->connector()->listen(
      {.loop = loop, .interface_address = {}, .accepted = [&](std::shared_ptr<Connection>) {
         ++accepted;
       }});
  const int name = Address::parse(listener->address()).descriptor;
  ASSERT_TRUE(pass(wire, std::array{std::byte{1}}, Descriptor(::dup(name)), "test"));
  const auto hear = [&] {
    int came = -1;
    EXPECT_EQ(::read(wire.get(), &came, sizeof came), static_cast<ssize_t>(sizeof came))
        << "the child has ended";
    return came;
  };
  EXPECT_EQ(hear(), EACCES);
  ASSERT_EQ(::chmod(("/proc/self/fd/" + std::to_string(name)).c_str(), 0666), 0);
  ASSERT_EQ(::write(wire.get(), "x", 1), 1);
  EXPECT_EQ(hear(), 0) << "the connection was not closed";
  int status = -1;
  waitpid(child, &status, 0);
  EXPECT_EQ(status, 0);
  EXPECT_EQ(accepted, 0);
  const auto is_said = [&] {  // the log line may follow the close that the child has seen
    std::lock_guard lock(mutex);
    return logged.find("belongs to user " + std::to_string(kNobody)) != std::string::npos;
  };
  const auto until = std::chrono::steady_clock::now() + std::chrono::seconds(10);
  while (!is_said() && std::chrono::steady_clock::now() < until)
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
  EXPECT_TRUE(is_said());
}

// A process cannot access another's /proc if their users or capabilities differ, or if the other is
// not dumpable.
TEST(ShmSocket, UnreachableProcessIsNotCalledGone) {
  const ListeningSocket listening = listen_for_this_user("shm");
  int numbers[2];
  ASSERT_EQ(pipe2(numbers, O_CLOEXEC), 0);
  const Descriptor from(numbers[0]);
  Descriptor to(numbers[1]);
  const pid_t owner = getpid();
  ASSERT_EQ(::prctl(PR_SET_DUMPABLE, 0), 0);
  const pid_t child = fork();
  if (child == 0) {
    // A child of the same user is kept out because the owner is not dumpable.
    if (::geteuid() == 0 && (::setgid(kNobody) != 0 || ::setuid(kNobody) != 0)) ::_exit(1);
    std::string said = "it connected";
    try {
      while (!connect_to(owner, listening.name.get(), "shm")) {
      }
    } catch (const Error& error) {
      said = error.text();
    }
    ::_exit(::write(to.get(), said.data(), said.size()) > 0 ? 0 : 1);
  }
  to = Descriptor();
  std::string said(1000, ' ');
  const ssize_t count = ::read(from.get(), said.data(), said.size());
  ::prctl(PR_SET_DUMPABLE, 1);
  ASSERT_GE(child, 0);
  waitpid(child, nullptr, 0);
  ASSERT_GT(count, 0);
  said.resize(static_cast<std::size_t>(count));
  EXPECT_NE(said.find("not dumpable"), std::string::npos) << said;
}

// A listener's socket has a name for a moment only; if its process is killed in that moment, the
// name remains.
TEST(ShmSocket, StaleSocketNamesAreRemoved) {
  const harness::Folder folder;
  ASSERT_EQ(::setenv("TMPDIR", folder.path().c_str(), 1), 0);
  const auto left = [&] {
    return std::distance(std::filesystem::directory_iterator(folder.path()),
                         std::filesystem::directory_iterator());
  };
  constexpr int kLeft = 20;
  struct stat processes {};
  ASSERT_EQ(::stat("/proc/self/ns/pid", &processes), 0);
  const std::string beginning = folder.path() + "/weft-" + std::to_string(processes.st_ino) + "-";
  for (int i = 0; i < kLeft; ++i)
    std::ofstream(beginning + std::to_string(::getpid()) + "-" + std::to_string(i));
  ASSERT_EQ(left(), kLeft);
  for (int i = 0; i < kLeft; ++i) listen_for_this_user("shm");
  ::unsetenv("TMPDIR");
  EXPECT_LT(left(), kLeft);
}

TEST(ShmSocket, RefusesBytesWithoutASegment) {
  Sockets sockets;
  EXPECT_FALSE(Segment::take_from(sockets.ends[0]));  // nothing has arrived yet
  ASSERT_EQ(send(sockets.ends[1].get(), "GET / HTTP/1.1\r\n", 16, 0), 16);
  EXPECT_THROW(Segment::take_from(sockets.ends[0]), Error);
}

}  // namespace
}  // namespace weft::transport::shm
