// SPDX-License-Identifier: Apache-2.0
// How connections are made.
#include <atomic>
#include <cstddef>
#include <iterator>
#include <thread>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <weft/tests/harness/leftovers.h>
#include <weft/tests/transport/tcp/streams.h>
#include <weft/transport/tcp/greeting.h>

namespace weft::transport::tcp {
namespace {

using std::chrono::milliseconds;
using testing::HasSubstr;

std::string local(int port) { return "127.0.0.1:" + std::to_string(port); }

void expect_talk(End& a, End& b) {
  a.send("ping");
  EXPECT_EQ(b.take(4), "ping");
  b.send("pong");
  EXPECT_EQ(a.take(4), "pong");
}

TEST(TcpConnect, ReachesAListenerOnAnotherLoop) {
  const auto here = make_loop("here");
  const auto there = make_loop("there");
  Lobby lobby(there);
  End a(here, dial(here, lobby.address()));
  End b(there, lobby.take());
  expect_talk(a, b);
  EXPECT_EQ(a.stream().peer(), local(lobby.port()));
  EXPECT_THAT(b.stream().peer(), testing::StartsWith("127.0.0.1:"));
}

TEST(TcpConnect, ReachesEachAddressOfAListener) {
  const auto loop = make_loop();
  Lobby lobby(loop);
  const Address address = Address::parse(lobby.address());
  if (address.hosts.size() < 2) GTEST_SKIP() << "no IPv6 on this machine's loopback";
  for (const Host& host : address.hosts) {
    End a(loop, dial(loop, Address{{host}, address.identity}.text()));
    End b(loop, lobby.take());
    expect_talk(a, b);
    EXPECT_EQ(a.stream().peer(), host.text());
  }
}

TEST(TcpConnect, ResolvesNamesAndNeedsNoIdentity) {
  const auto loop = make_loop();
  Lobby lobby(loop, "127.0.0.1");
  End a(loop, dial(loop, "localhost:" + std::to_string(lobby.port())));
  End b(loop, lobby.take());
  expect_talk(a, b);
}

TEST(TcpConnect, TriesAllAddressesOfAPeer) {
  const auto loop = make_loop();
  Lobby lobby(loop, "127.0.0.1");
  const Descriptor nobody = reserved_port();
  Address address = Address::parse(lobby.address());
  address.hosts.insert(address.hosts.begin(),
                       {{"127.0.0.1", local_end(nobody).port()}, {"::1", 1}});
  End a(loop, dial(loop, address.text()));
  End b(loop, lobby.take());
  expect_talk(a, b);
}

// Also before the stream begins, as in a TLS handshake.
TEST(TcpConnect, SmallWritesAreSentAtOnce) {
  const auto is_undelayed = [](const Descriptor& socket) {
    int value = 0;
    socklen_t bytes = sizeof value;
    return ::getsockopt(socket.get(), IPPROTO_TCP, TCP_NODELAY, &value, &bytes) == 0 && value == 1;
  };
  const Descriptor door = make_socket(AF_INET);
  EXPECT_TRUE(is_undelayed(door));
  ASSERT_EQ(::listen(door.get(), 1), 0);
  const Descriptor mine = raw_connect(local_end(door).port());
  pollfd arrival{door.get(), POLLIN, 0};
  ASSERT_EQ(::poll(&arrival, 1, 60'000), 1);
  EXPECT_TRUE(is_undelayed(Descriptor(::accept(door.get(), nullptr, nullptr))));
}

TEST(TcpConnect, TakesNoBytesUntilConnected) {
  const auto loop = make_loop();
  const Descriptor door = reserved_port();
  End a(loop, dial(loop, local(local_end(door).port())));
  a.send("early");
  EXPECT_TRUE(a.stream().peek(1).empty());
  EXPECT_FALSE(a.stream().end());
  ASSERT_EQ(::listen(door.get(), 1), 0);
  const Descriptor peer(::accept(door.get(), nullptr, nullptr));
  const auto meant = Greeting::encode({});
  std::byte greeting[Greeting::kBytes];
  ASSERT_EQ(::recv(peer.get(), greeting, sizeof greeting, MSG_WAITALL),
            static_cast<ssize_t>(sizeof greeting));
  EXPECT_TRUE(std::equal(meant.begin(), meant.end(), greeting));
  char none;
  EXPECT_EQ(::recv(peer.get(), &none, 1, MSG_DONTWAIT), -1)
      << "the stream sent bytes before it was greeted";
  const auto answer = Greeting::encode({1, 2});
  // Sent in two parts, the second followed at once by the stream's first bytes.
  std::string text(reinterpret_cast<const char*>(answer.data()), answer.size());
  text += "late";
  ASSERT_EQ(::send(peer.get(), text.data(), 10, 0), 10);
  ASSERT_EQ(::send(peer.get(), text.data() + 10, text.size() - 10, 0),
            static_cast<ssize_t>(text.size() - 10));
  char early[5];
  ASSERT_EQ(::recv(peer.get(), early, sizeof early, MSG_WAITALL), 5);
  EXPECT_EQ(std::string(early, 5), "early");
  EXPECT_EQ(a.take(4), "late");
}

TEST(TcpConnect, WaitsForAPortThatOpensLater) {
  const auto loop = make_loop();
  const Descriptor door = reserved_port();
  const Identity identity{7, 8};
  End a(loop, dial(loop, Address{{{"127.0.0.1", local_end(door).port()}}, identity}.text()));
  // By then some attempts have been refused.
  auto opens =
      loop->at(Deadline::in(milliseconds(30)), [&] { EXPECT_EQ(::listen(door.get(), 1), 0); });
  std::thread peer([&] {
    Descriptor socket;
    while (!socket)
      socket = Descriptor(::accept(door.get(), nullptr, nullptr));  // EINVAL until it listens
    std::byte greeting[Greeting::kBytes];
    EXPECT_EQ(::recv(socket.get(), greeting, sizeof greeting, MSG_WAITALL),
              static_cast<ssize_t>(sizeof greeting));
    const auto answer = Greeting::encode(identity);
    EXPECT_EQ(::send(socket.get(), answer.data(), answer.size(), 0),
              static_cast<ssize_t>(answer.size()));
    EXPECT_EQ(::send(socket.get(), "there", 5, 0), 5);
  });
  EXPECT_EQ(a.take(5), "there");
  peer.join();
}

TEST(TcpConnect, RefusalIsTheReasonAtTheDeadline) {
  const auto loop = make_loop();
  const Descriptor nobody = reserved_port();
  const std::string address = local(local_end(nobody).port());
  End a(loop, dial(loop, address, Deadline::in(milliseconds(50))));
  a.send("never sent");
  const Error error = a.wait_end();
  EXPECT_EQ(error.blame(), Blame::PeerLost) << error.what();
  EXPECT_EQ(error.native_code(), ECONNREFUSED);
  EXPECT_THAT(error.text(), HasSubstr("cannot connect (tcp) to " + address));
  EXPECT_THAT(error.text(), HasSubstr("Connection refused"));
}

// The peer listened before and its port is closed now, so waiting is pointless.
TEST(TcpConnect, RefusalEndsItIfThePeerListened) {
  const auto loop = make_loop();
  const Descriptor nobody = reserved_port();
  const std::string address = local(local_end(nobody).port());
  End a(loop, dial(loop, address, Deadline::never(), Settings(), /*refusal_ends=*/true));
  const Error error = a.wait_end();
  EXPECT_EQ(error.blame(), Blame::PeerLost) << error.what();
  EXPECT_EQ(error.native_code(), ECONNREFUSED);
}

TEST(TcpConnect, RefusalEndsItDespiteAddressesWithoutARoute) {
  const std::string elsewhere = "255.255.255.255:4711";  // no network has a route for TCP to it
  const auto loop = make_loop();
  const Descriptor nobody = reserved_port();
  const std::string here = local(local_end(nobody).port());
  for (const std::string& address : {here + "," + elsewhere, elsewhere + "," + here}) {
    const Deadline deadline = Deadline::in(std::chrono::seconds(20));
    End a(loop, dial(loop, address, deadline, Settings(), /*refusal_ends=*/true));
    EXPECT_EQ(a.wait_end().native_code(), ECONNREFUSED);
    EXPECT_FALSE(deadline.passed()) << address;
  }
}

// Makes socket() fail with ENOMEM in this thread and those that it starts. Returns false if this
// process may not do that.
bool run_out_of_sockets() {
  sock_filter instructions[] = {BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(seccomp_data, nr)),
                                BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, __NR_socket, 0, 1),
                                BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | ENOMEM),
                                BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW)};
  const sock_fprog program{std::size(instructions), instructions};
  return ::prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0 &&
         ::prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program) == 0;
}

TEST(TcpConnect, OutOfSocketMemoryIsBusyFirst) {
  const auto loop = make_loop();
  Lobby lobby(loop);
  bool may_run_out = false;
  std::thread([&] {
    may_run_out = run_out_of_sockets();
    if (!may_run_out) return;
    const auto poor = make_loop("poor");
    End a(poor, dial(poor, lobby.address(), Deadline::in(milliseconds(100))));
    const Error error = a.wait_end();
    EXPECT_EQ(error.blame(), Blame::Busy) << error.what();
    EXPECT_EQ(error.native_code(), ENOMEM);
    try {
      const Lobby another(poor);
      ADD_FAILURE() << "a listener was made without a socket";
    } catch (const Error& refused) {
      EXPECT_EQ(refused.blame(), Blame::Busy) << refused.what();
    }
  }).join();
  if (!may_run_out) GTEST_SKIP() << "this process may not filter its own system calls (seccomp)";
  End a(loop, dial(loop, lobby.address()));
  End b(loop, lobby.take());
  expect_talk(a, b);
}

TEST(TcpConnect, PassedDeadlineIsATimeout) {
  const auto loop = make_loop();
  End a(loop, dial(loop, "127.0.0.1:1", Deadline::in(milliseconds(0))));
  EXPECT_EQ(a.wait_end().blame(), Blame::Timeout);
}

TEST(TcpConnect, SilenceIsATimeout) {
  const auto loop = make_loop();
  const Descriptor door = reserved_port();
  ASSERT_EQ(::listen(door.get(), 8), 0);  // the kernel connects, but no accept follows
  Settings settings;
  settings.attempt = milliseconds(20);
  End a(loop, dial(loop, local(local_end(door).port()), Deadline::in(milliseconds(100)), settings));
  const Error error = a.wait_end();
  EXPECT_EQ(error.blame(), Blame::Timeout) << error.what();
  EXPECT_THAT(error.text(), HasSubstr("no answer"));
}

TEST(TcpConnect, UnknownHostIsNamed) {
  const auto loop = make_loop();
  End a(loop, dial(loop, "no-such-host.invalid:1", Deadline::in(milliseconds(200))));
  EXPECT_THAT(a.wait_end().text(), HasSubstr("no-such-host.invalid"));
}

TEST(TcpConnect, RefusesAnotherListenerAtOnce) {
  const auto loop = make_loop();
  Lobby lobby(loop);
  Address address = Address::parse(lobby.address());
  ++address.identity.listener;
  End a(loop, dial(loop, address.text(), Deadline::never()));
  const Error error = a.wait_end();
  EXPECT_EQ(error.blame(), Blame::PeerLost) << error.what();
  EXPECT_THAT(error.text(), HasSubstr("another listener has this port now"));
  EXPECT_EQ(lobby.waiting(), 0u);
}

TEST(TcpConnect, RefusesAForeignServerAtOnce) {
  const auto loop = make_loop();
  const Descriptor door = reserved_port();
  ASSERT_EQ(::listen(door.get(), 8), 0);
  End a(loop, dial(loop, local(local_end(door).port()), Deadline::never()));
  const Descriptor peer(::accept(door.get(), nullptr, nullptr));
  ASSERT_EQ(::send(peer.get(), "SSH-2.0-", 8, 0), 8);
  const Error error = a.wait_end();
  EXPECT_EQ(error.blame(), Blame::PeerLost) << error.what();
  EXPECT_THAT(error.text(), HasSubstr("the other end is not a Weft process"));
}

TEST(TcpConnect, SaysWhichVersionThePeerSpeaks) {
  const auto loop = make_loop();
  const Descriptor door = reserved_port();
  ASSERT_EQ(::listen(door.get(), 8), 0);
  End a(loop, dial(loop, local(local_end(door).port()), Deadline::never()));
  const Descriptor peer(::accept(door.get(), nullptr, nullptr));
  auto answer = Greeting::encode({1, 2});
  answer[8] = std::byte{9};
  ASSERT_EQ(::send(peer.get(), answer.data(), answer.size(), 0),
            static_cast<ssize_t>(answer.size()));
  EXPECT_THAT(a.wait_end().text(), HasSubstr("it speaks version 9 of the greeting"));
}

TEST(TcpConnect, AbandonedDialsLeaveNothing) {
  const auto loop = make_loop();
  const Descriptor nobody = reserved_port();
  const std::string address = local(local_end(nobody).port());
  const auto before = harness::open_descriptors();
  for (int i = 0; i < 50; ++i) {
    auto refused = dial(loop, address, Deadline::never());
    auto named = dial(loop, "localhost:1", Deadline::never());
    if (i % 2 == 0) End(loop, std::move(refused));
  }
  // Each dial's last task is queued before this one.
  std::atomic<bool> later{false};
  loop->post([&] { loop->post([&] { loop->post([&] { later = true; }); }); });
  wait_until(
      *loop, [&] { return later.load(); }, "the loop gets there");
  // Threads that resolve names cannot be ended early, and have files open for moments.
  bool as_before = false;
  wait_until(
      *loop, [&] { return as_before = as_before || harness::open_descriptors() == before; },
      "there are as many descriptors as before");
}

TEST(TcpConnect, MayStartOnALoopThatEnds) {
  const Descriptor nobody = reserved_port();
  for (int i = 0; i < 20; ++i) {
    auto loop = make_loop();
    auto stream = dial(loop, local(local_end(nobody).port()), Deadline::never());
    auto named = dial(loop, "localhost:1", Deadline::never());
    loop.reset();
  }
  SUCCEED();
}

TEST(TcpConnect, AThousandConnectAtOnce) {
  if (!may_have_descriptors(2200)) GTEST_SKIP() << "this process may not have 2200 descriptors";
  constexpr std::size_t kConnections = 1000;
  const auto here = make_loop("here");
  const auto there = make_loop("there");
  Lobby lobby(there);
  std::vector<std::unique_ptr<End>> dialled;
  std::vector<std::unique_ptr<End>> accepted;
  for (std::size_t i = 0; i < kConnections; ++i) {
    dialled.push_back(std::make_unique<End>(here, dial(here, lobby.address())));
    dialled.back()->send(pattern(1000, static_cast<unsigned>(i)));
  }
  for (std::size_t i = 0; i < kConnections; ++i) {
    accepted.push_back(std::make_unique<End>(there, lobby.take()));
    accepted.back()->send(accepted.back()->take(1000));
  }
  for (std::size_t i = 0; i < kConnections; ++i) {
    ASSERT_TRUE(dialled[i]->take(1000) == pattern(1000, static_cast<unsigned>(i))) << i;
  }
}

}  // namespace
}  // namespace weft::transport::tcp
