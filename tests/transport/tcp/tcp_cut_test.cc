// SPDX-License-Identifier: Apache-2.0
// Peers that are killed, stopped, forgotten, or behind a cut cable. Each test has a process and, if
// needed, a network of its own.
#include <csignal>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <linux/tcp.h>
#include <netinet/in.h>

#include <weft/tests/transport/tcp/cable.h>

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

// A child that listens, accepts one connection and passes it to `body`.
Child listening_child(const std::string& interface_address,
                      const std::function<void(int, End&)>& body) {
  return Child([=](int parent) {
    const auto loop = make_loop("child");
    Lobby lobby(loop, interface_address);
    tell_line(parent, lobby.address());
    End end(loop, lobby.take());
    body(parent, end);
  });
}

TEST(TcpCut, KilledPeersLastBytesArrive) {
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

TEST(TcpCut, PeerKilledMidTransferIsLost) {
  Child child = listening_child("", [](int parent, End& end) {
    end.take(1 << 20);
    end.hold(true);
    tell_line(parent, "full");
    wait_for_byte(parent);
  });
  const auto loop = make_loop();
  End a(loop, dial(loop, hear_line(child)));
  a.send(pattern(64 << 20), 1 << 20);
  EXPECT_EQ(hear_line(child), "full");
  child.signal(SIGKILL);
  EXPECT_EQ(a.wait_end().blame(), Blame::PeerLost);
}

TEST(TcpCut, StoppedPeerIsWaitedFor) {
  const std::string bytes = pattern(32 << 20);
  Child child = listening_child("", [&](int parent, End& end) {
    end.send("here");
    wait_for_byte(parent);  // stopped here
    tell_line(parent, end.take(bytes.size()) == bytes ? "whole" : "something else");
    wait_for_byte(parent);
  });
  const auto loop = make_loop();
  // Kernels answer window probes at most twice a second, and skip some: any shorter time would be
  // too short.
  Settings settings = quick();
  settings.silence = seconds(2);
  End a(loop, dial(loop, hear_line(child), patience(), settings));
  EXPECT_EQ(a.take(4), "here");
  child.signal(SIGSTOP);
  a.send(bytes, 1 << 20);
  // Much longer than the silence after which a peer counts as lost.
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

void expect_reset(const Error& error) {
  EXPECT_EQ(error.blame(), Blame::PeerLost);
  EXPECT_THAT(error.text(), HasSubstr("reset by the peer"));
}

TEST(TcpCut, ForgetfulPeerIsLostAtTheNextWrite) {
  auto [one, other] = tcp_pair();
  const auto loop = make_loop();
  Settings settings;
  settings.idle = seconds(1000);  // the idle timer must not be the reason
  End a(loop, std::make_unique<TcpStream>(loop, std::move(one), "the other", settings));
  if (!forget(std::move(other))) GTEST_SKIP() << kMayNotForget;
  a.send("hello?");
  expect_reset(a.wait_end());
}

TEST(TcpCut, ForgetfulPeerIsLostWhileIdle) {
  auto [one, other] = tcp_pair();
  const auto loop = make_loop();
  End a(loop, std::make_unique<TcpStream>(loop, std::move(one), "the other", quick()));
  if (!forget(std::move(other))) GTEST_SKIP() << kMayNotForget;
  expect_reset(a.wait_end());
}

// Returns a cable to a child that accepts one connection and passes it to `body`; or null, and the
// reason, if no cable can be laid.
std::unique_ptr<Cable> cable_or_skip(const std::function<void(int, End&)>& body,
                                     std::string& why_not) {
  return lay_cable(
      [body](int parent) {
        const auto loop = make_loop("child");
        Lobby lobby(loop, "10.77.7.2");
        tell_line(parent, lobby.address());
        End end(loop, lobby.take());
        body(parent, end);
      },
      why_not);
}

void expect_no_answer(const Error& error) {
  EXPECT_EQ(error.blame(), Blame::PeerLost) << error.what();
  EXPECT_THAT(error.text(), HasSubstr("no answer from its machine"));
}

TEST(TcpCut, CableCutMidTransferIsNoticed) {
  std::string why_not;
  const auto cable = cable_or_skip(
      [](int parent, End& end) {
        end.take(1 << 20);
        tell_line(parent, "underway");
        wait_for_byte(parent);
      },
      why_not);
  if (!cable) GTEST_SKIP() << why_not;
  const auto loop = make_loop();
  End a(loop, dial(loop, cable->heard(), patience(), quick()));
  a.send(pattern(1 << 20));
  EXPECT_EQ(hear_line(cable->peer()), "underway");
  cable->cut();
  a.send(pattern(64 << 20), 1 << 20);
  expect_no_answer(a.wait_end());
}

TEST(TcpCut, CableCutAfterASmallMessageIsNoticed) {
  std::string why_not;
  const auto cable = cable_or_skip([](int parent, End&) { wait_for_byte(parent); }, why_not);
  if (!cable) GTEST_SKIP() << why_not;
  const auto loop = make_loop();
  Settings settings = quick();
  settings.idle = seconds(1000);  // the idle timer must not be the reason
  End a(loop, dial(loop, cable->heard(), patience(), settings));
  a.send("x");
  a.wait_sent();
  cable->cut();
  a.send("y");
  expect_no_answer(a.wait_end());
}

TEST(TcpCut, CableCutWhileIdleIsNoticed) {
  std::string why_not;
  const auto cable = cable_or_skip(
      [](int parent, End& end) {
        end.send("ready");
        wait_for_byte(parent);
      },
      why_not);
  if (!cable) GTEST_SKIP() << why_not;
  const auto loop = make_loop();
  End a(loop, dial(loop, cable->heard(), patience(), quick()));
  EXPECT_EQ(a.take(5), "ready");
  cable->cut();
  expect_no_answer(a.wait_end());
}

TEST(TcpCut, ShortCutIsBridged) {
  const std::string bytes = pattern(8 << 20);
  std::string why_not;
  const auto cable = cable_or_skip(
      [&](int parent, End& end) {
        tell_line(parent, end.take(bytes.size()) == bytes ? "whole" : "something else");
        wait_for_byte(parent);
      },
      why_not);
  if (!cable) GTEST_SKIP() << why_not;
  const auto loop = make_loop();
  End a(loop, dial(loop, cable->heard()));
  a.send(bytes.substr(0, 4 << 20), 1 << 20);
  cable->cut();
  a.send(bytes.substr(4 << 20), 1 << 20);
  cable->mend();
  EXPECT_EQ(hear_line(cable->peer()), "whole");
}

TEST(TcpCut, ConnectingOverACutCableTimesOut) {
  std::string why_not;
  const auto cable = cable_or_skip([](int, End&) {}, why_not);
  if (!cable) GTEST_SKIP() << why_not;
  cable->cut();
  const auto loop = make_loop();
  End a(loop, dial(loop, cable->heard(), Deadline::in(milliseconds(300)), quick()));
  const Error error = a.wait_end();
  EXPECT_TRUE(error.blame() == Blame::Timeout || error.blame() == Blame::PeerLost) << error.what();
  EXPECT_THAT(error.text(), HasSubstr("cannot connect (tcp) to 10.77.7.2"));
}

}  // namespace
}  // namespace weft::transport::tcp
