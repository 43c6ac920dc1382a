// Peers that are killed, stopped, forgotten, or behind a cable that is cut. Each test has a process and, where it needs
// one, a network of its own.
#include <csignal>
#include <cstdlib>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <linux/tcp.h>
#include <netinet/in.h>
#include <sched.h>
#include <unistd.h>

#include <weft/tests/transport/tcp/streams.h>

namespace weft::transport::tcp {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;
using testing::HasSubstr;

Settings quick() {
  Settings settings;
  settings.idle = seconds(1);
  settings.probe_pause = seconds(1);
  settings.probes = 1;
  settings.silence = milliseconds(400);
  return settings;
}

void tell_address(int to, const std::string& address) {
  const std::string line = address + "\n";
  if (::write(to, line.data(), line.size()) != static_cast<ssize_t>(line.size()))
    throw system_error(Blame::PeerLost, "tell", errno);
}

std::string hear_line(const Child& child) {
  std::string line;
  for (char letter = child.hear(); letter != '\n' && letter != '\0'; letter = child.hear()) line += letter;
  return line;
}

void wait_for_byte(int socket) {
  char letter = 0;
  if (::read(socket, &letter, 1) != 1) throw Error(Blame::PeerLost, "the test has ended");
}

// A child that listens, takes one connection and hands it to `body`.
Child listening_child(const std::string& interface_address, const std::function<void(int, End&)>& body) {
  return Child([=](int parent) {
    const auto loop = make_loop("child");
    Lobby lobby(loop, interface_address);
    tell_address(parent, lobby.address());
    End end(loop, lobby.take());
    body(parent, end);
  });
}

TEST(TcpCut, AKilledPeerIsLostAndWhatItSentArrives) {
  Child child = listening_child("", [](int parent, End& end) {
    end.send("last words");
    end.wait_sent();
    wait_for_byte(parent);
  });
  const auto loop = make_loop();
  End a(loop, dial(loop, hear_line(child)));
  EXPECT_EQ(a.take(10), "last words");
  child.signal(SIGKILL);
  const Error error = a.wait_end();
  EXPECT_EQ(error.blame(), Blame::PeerLost);
}

TEST(TcpCut, APeerKilledInMidTransferIsLostForItsWriter) {
  Child child = listening_child("", [](int parent, End& end) {
    end.take(1 << 20);
    end.hold(true);
    tell_address(parent, "full");
    wait_for_byte(parent);
  });
  const auto loop = make_loop();
  End a(loop, dial(loop, hear_line(child)));
  a.send(pattern(64 << 20), 1 << 20);
  EXPECT_EQ(hear_line(child), "full");
  child.signal(SIGKILL);
  EXPECT_EQ(a.wait_end().blame(), Blame::PeerLost);
}

TEST(TcpCut, AStoppedPeerIsWaitedFor) {
  const std::string bytes = pattern(32 << 20);
  Child child = listening_child("", [&](int parent, End& end) {
    wait_for_byte(parent);  // stopped here
    EXPECT_TRUE(end.take(bytes.size()) == bytes);
    tell_address(parent, "whole");
    wait_for_byte(parent);
  });
  const auto loop = make_loop();
  // Kernels answer questions for room at most twice a second, and some of those not: anything shorter would be too short.
  Settings settings = quick();
  settings.silence = seconds(2);
  End a(loop, dial(loop, hear_line(child), patience(), settings));
  child.signal(SIGSTOP);
  a.send(bytes, 1 << 20);
  // Much longer than silence would be held against a peer.
  std::atomic<bool> later{false};
  auto timer = loop->at(Deadline::in(settings.silence * 3), [&] { later = true; });
  wait_until(
      *loop, [&] { return later.load(); }, "a pause");
  EXPECT_FALSE(a.ended());
  child.signal(SIGCONT);
  child.say('x');
  EXPECT_EQ(hear_line(child), "whole");
  EXPECT_FALSE(a.ended());
}

// What a machine does that went down and came up again: it knows nothing of the connection.
TEST(TcpCut, APeerThatForgotTheConnectionIsLostAtTheNextWrite) {
  auto [one, other] = tcp_pair();
  const int on = 1;
  if (::setsockopt(other.get(), IPPROTO_TCP, TCP_REPAIR, &on, sizeof on) != 0) {
    GTEST_SKIP() << "making a socket forget its connection (TCP_REPAIR) takes CAP_NET_ADMIN";
  }
  const auto loop = make_loop();
  End a(loop, std::make_unique<TcpStream>(loop, std::move(one), "the other", Settings{}));
  other.reset();
  a.send("hello?");
  const Error error = a.wait_end();
  EXPECT_EQ(error.blame(), Blame::PeerLost);
  EXPECT_THAT(error.text(), HasSubstr("reset by the peer"));
}

bool shell(const std::string& command) { return std::system(("( " + command + " ) >/dev/null 2>&1").c_str()) == 0; }

// This process and a child, each with a network of its own, and a cable between: 10.77.7.1 and 10.77.7.2. Throws
// Unsupported where that is not permitted.
class Cable {
 public:
  explicit Cable(const std::function<void(int, End&)>& body) {
    if (::unshare(CLONE_NEWNET) != 0 && ::unshare(CLONE_NEWUSER | CLONE_NEWNET) != 0) {
      throw Error(Blame::Unsupported, "this process may not make network namespaces");
    }
    peer_ = std::make_unique<Child>([body](int parent) {
      if (::unshare(CLONE_NEWNET) != 0) throw system_error(Blame::Unsupported, "unshare", errno);
      tell_address(parent, "apart");
      wait_for_byte(parent);
      const auto loop = make_loop("child");
      Lobby lobby(loop, "10.77.7.2");
      tell_address(parent, lobby.address());
      End end(loop, lobby.take());
      body(parent, end);
    });
    const std::string process = std::to_string(peer_->process());
    const std::string theirs = "nsenter -t " + process + " -n ip ";
    if (hear_line(*peer_) != "apart" ||
        !shell("ip link set lo up && ip link add name weft0 type veth peer name weft0 netns " + process +
               " && ip addr add 10.77.7.1/24 dev weft0 && ip link set weft0 up && " + theirs +
               "addr add 10.77.7.2/24 dev weft0 && " + theirs + "link set weft0 up && " + theirs + "link set lo up")) {
      throw Error(Blame::Unsupported, "this machine makes no cable between network namespaces (ip, nsenter, veth)");
    }
    peer_->say('x');
    address_ = hear_line(*peer_);
  }
  const std::string& address() const { return address_; }
  Child& peer() { return *peer_; }
  void cut() { ASSERT_TRUE(shell("nsenter -t " + std::to_string(peer_->process()) + " -n ip link set weft0 down")); }
  void mend() { ASSERT_TRUE(shell("nsenter -t " + std::to_string(peer_->process()) + " -n ip link set weft0 up")); }

 private:
  std::unique_ptr<Child> peer_;
  std::string address_;
};

std::unique_ptr<Cable> cable_or_skip(const std::function<void(int, End&)>& body, std::string& why_not) {
  try {
    return std::make_unique<Cable>(body);
  } catch (const Error& error) {
    why_not = error.text();
    return nullptr;
  }
}

void expect_no_answer(const Error& error) {
  EXPECT_EQ(error.blame(), Blame::PeerLost) << error.what();
  EXPECT_THAT(error.text(), HasSubstr("no answer from its machine"));
}

TEST(TcpCut, ACableCutInMidTransferIsNoticed) {
  std::string why_not;
  const auto cable = cable_or_skip(
      [](int parent, End& end) {
        end.take(1 << 20);
        tell_address(parent, "underway");
        wait_for_byte(parent);
      },
      why_not);
  if (!cable) GTEST_SKIP() << why_not;
  const auto loop = make_loop();
  End a(loop, dial(loop, cable->address(), patience(), quick()));
  a.send(pattern(1 << 20));
  EXPECT_EQ(hear_line(cable->peer()), "underway");
  cable->cut();
  a.send(pattern(64 << 20), 1 << 20);
  expect_no_answer(a.wait_end());
}

TEST(TcpCut, ACableCutBehindASmallMessageIsNoticed) {
  std::string why_not;
  const auto cable = cable_or_skip([](int parent, End&) { wait_for_byte(parent); }, why_not);
  if (!cable) GTEST_SKIP() << why_not;
  const auto loop = make_loop();
  Settings settings = quick();
  settings.idle = seconds(1000);  // not by this
  End a(loop, dial(loop, cable->address(), patience(), settings));
  a.send("x");
  a.wait_sent();
  cable->cut();
  a.send("y");
  expect_no_answer(a.wait_end());
}

TEST(TcpCut, ACableCutWhileNothingMovesIsNoticed) {
  std::string why_not;
  const auto cable = cable_or_skip(
      [](int parent, End& end) {
        end.send("ready");
        wait_for_byte(parent);
      },
      why_not);
  if (!cable) GTEST_SKIP() << why_not;
  const auto loop = make_loop();
  End a(loop, dial(loop, cable->address(), patience(), quick()));
  EXPECT_EQ(a.take(5), "ready");
  cable->cut();
  expect_no_answer(a.wait_end());
}

TEST(TcpCut, AShortCutIsBridged) {
  const std::string bytes = pattern(8 << 20);
  std::string why_not;
  const auto cable = cable_or_skip(
      [&](int parent, End& end) {
        EXPECT_TRUE(end.take(bytes.size()) == bytes);
        tell_address(parent, "whole");
        wait_for_byte(parent);
      },
      why_not);
  if (!cable) GTEST_SKIP() << why_not;
  const auto loop = make_loop();
  End a(loop, dial(loop, cable->address()));
  a.send(bytes.substr(0, 4 << 20), 1 << 20);
  cable->cut();
  a.send(bytes.substr(4 << 20), 1 << 20);
  cable->mend();
  EXPECT_EQ(hear_line(cable->peer()), "whole");
}

TEST(TcpCut, ConnectingOverACutCableEndsAtTheDeadline) {
  std::string why_not;
  const auto cable = cable_or_skip([](int, End&) {}, why_not);
  if (!cable) GTEST_SKIP() << why_not;
  cable->cut();
  const auto loop = make_loop();
  End a(loop, dial(loop, cable->address(), Deadline::in(milliseconds(300)), quick()));
  const Error error = a.wait_end();
  EXPECT_TRUE(error.blame() == Blame::Timeout || error.blame() == Blame::PeerLost) << error.what();
  EXPECT_THAT(error.text(), HasSubstr("cannot connect (tcp) to 10.77.7.2"));
}

}  // namespace
}  // namespace weft::transport::tcp
