#include <csignal>
#include <future>
#include <numeric>
#include <thread>
#include <vector>

#include <gtest/gtest.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <weft/transport/shm/shm_stream.h>
#include <weft/transport/unix_socket.h>

namespace weft::transport::shm {
namespace {

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

// A stream whose bytes are gathered on the loop as they come.
struct Receiver {
  EventLoop& loop;
  ShmStream& stream;
  std::vector<std::byte> come;  // on the loop
  std::atomic<std::size_t> count{0};
  std::atomic<bool> ended{false};

  Receiver(EventLoop& on, ShmStream& from) : loop(on), stream(from) {
    stream.start(
        loop, [this] { take(); }, [] {});
  }
  void take() {
    std::byte buffer[40000];
    while (const std::size_t got = stream.read(buffer)) come.insert(come.end(), buffer, buffer + got);
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

TEST(ShmStream, CarriesMoreThanTheRingHoldsBothSidesSleepingInBetween) {
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
  // Nobody drives either loop: only wake-ups can bring the bytes.
  while (receiver.count < kBytes) std::this_thread::yield();
  ASSERT_EQ(written, kBytes);
  EXPECT_EQ(receiver.come, bytes);
}

TEST(ShmStream, DeliversWhatWasWrittenBeforeTheSenderWent) {
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

TEST(ShmStream, NoticesThatTheOtherProcessWasKilled) {
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
  ShmStream receiving(Segment::take(duplicate(made.memory())), std::move(sockets.ends[1]), "the child");
  Receiver receiver(loop, receiving);
  ASSERT_TRUE(receiver.wait_for(100));
  EXPECT_FALSE(receiving.end());
  kill(child, SIGKILL);
  EXPECT_TRUE(receiver.wait_for_end());
  EXPECT_NE(receiving.end()->text().find("the child is gone"), std::string::npos) << receiving.end()->text();
  int status = 0;
  waitpid(child, &status, 0);
}

TEST(ShmStream, ConnectsThroughTheListenersNameAndPassesItsSegment) {
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

TEST(ShmStream, ToAListenerThatIsGoneEndsWithPeerLost) {
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

TEST(ShmAddress, ThatIsNoneIsACallerError) {
  for (const char* text : {"", "a/b/c", "a/b/1/x", "a/b/-1/3", "/b/1/2", "127.0.0.1:80", "a/b/1/2/3"}) {
    EXPECT_THROW(Address::parse(text), Error) << text;
  }
}

TEST(ShmSocket, RefusesWhatPassesNoSegment) {
  Sockets sockets;
  EXPECT_FALSE(Segment::take_from(sockets.ends[0]));  // nothing has come
  ASSERT_EQ(send(sockets.ends[1].get(), "GET / HTTP/1.1\r\n", 16, 0), 16);
  EXPECT_THROW(Segment::take_from(sockets.ends[0]), Error);
}

}  // namespace
}  // namespace weft::transport::shm
