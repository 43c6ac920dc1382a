// SPDX-License-Identifier: Apache-2.0
// Messages between two processes, and the effects of killing one of them.
#include <array>
#include <optional>

#include <weft/tests/conformance/connection/far.h>

namespace weft::conformance {
namespace {

// Waits for a message, which it does not accept.
bool has_come(Connection& near, EventLoop& loop) {
  const auto arrived = std::make_shared<std::atomic<bool>>(false);
  near.receive({[arrived](const Arrival&) { *arrived = true; }, [](const Error&) {}});
  return loop.drive([&] { return arrived->load(); }, patience());
}

TEST_P(ConnectionProcessClaims, EchoesMessagesOfAllSizes) {
  const std::array<std::size_t, 8> sizes{0, 1, 13, 4096, 65'537, 1 << 20, 16 << 20, 3};
  const bool is_started = start([&](Far& far) {
    Mailbox mail(*far.connection, far.loop);
    for (std::size_t i = 0; i < 3 * sizes.size(); ++i) {
      const Letter letter = mail.next();
      expect_good(far.connection->send(bytes_of(letter.header),
                                       std::array{slice_of(letter.payloads.at(0))}, nullptr, {}));
    }
    far.wait_for_word();
  });
  if (!is_started) return;
  Mailbox mail(*near, loop);
  for (std::uint32_t round = 0; round < 3; ++round) {
    for (const std::size_t bytes : sizes) {
      const auto payload = pattern(round, bytes);
      near->send(bytes_of(std::to_string(bytes)), std::array{slice_of(payload)}, nullptr, {});
      const Letter letter = mail.next();
      EXPECT_EQ(letter.header, std::to_string(bytes));
      ASSERT_EQ(letter.payloads.size(), 1u);
      EXPECT_TRUE(same(letter.payloads[0], payload));
    }
  }
  child->say("enough");
  child->expect_success();
}

TEST_P(ConnectionProcessClaims, CarriesALotBothWaysAtOnce) {
  const auto exchange = [](Connection& connection, const std::shared_ptr<EventLoop>& on,
                           std::uint32_t mine, std::uint32_t theirs) {
    Mailbox mail(connection, on);
    std::vector<std::vector<std::byte>> payloads;
    std::vector<Op> ops;
    for (std::uint32_t i = 0; i < 100; ++i) payloads.push_back(pattern(mine + i, 256 << 10));
    for (const auto& payload : payloads)
      ops.push_back(connection.send({}, std::array{slice_of(payload)}, nullptr, {}));
    for (std::uint32_t i = 0; i < 100; ++i) {
      EXPECT_TRUE(same(mail.next().payloads.at(0), pattern(theirs + i, 256 << 10))) << i;
    }
    for (const Op& op : ops) expect_good(op);
  };
  const bool is_started = start([&](Far& far) {
    exchange(*far.connection, far.loop, 1000, 0);
    far.wait_for_word();
  });
  if (!is_started) return;
  exchange(*near, loop, 0, 1000);
  child->say("enough");
  child->expect_success();
}

TEST_P(ConnectionProcessClaims, SentMessagesArriveDespiteProcessEnd) {
  const auto payload = pattern(1, 1 << 20);
  const bool is_started = start([&](Far& far) {
    Mailbox mail(*far.connection, far.loop);
    mail.next();
    for (int i = 0; i < 5; ++i)
      expect_good(far.connection->send({}, std::array{slice_of(payload)}, nullptr, {}));
    far.connection->close(Error(Blame::Cancelled, "the process ends"));
    mail.wait_closed();
  });
  if (!is_started) return;
  Mailbox mail(*near, loop);
  near->send(bytes_of("begin"), {}, nullptr, {});
  for (int i = 0; i < 5; ++i) EXPECT_TRUE(same(mail.next().payloads.at(0), payload)) << i;
  EXPECT_EQ(mail.wait_closed().blame(), Blame::PeerLost);
  child->expect_success();
}

TEST_P(ConnectionProcessClaims, KilledPeerEndsAnIdleConnection) {
  const bool is_started = start([](Far& far) {
    Mailbox mail(*far.connection, far.loop);
    mail.next();
    far.connection->send(bytes_of("here"), {}, nullptr, {});
    far.wait_for_word();
  });
  if (!is_started) return;
  Mailbox mail(*near, loop);
  near->send(bytes_of("there?"), {}, nullptr, {});
  EXPECT_EQ(mail.next().header, "here");
  child->kill();
  const Error why = mail.wait_closed();
  EXPECT_EQ(why.blame(), Blame::PeerLost);
  EXPECT_NE(why.text().find(near->peer()), std::string::npos) << why.what();
  EXPECT_EQ(mail.closings(), 1);
  EXPECT_EQ(failure_of(near->send(bytes_of("anybody?"), {}, nullptr, {})).blame(), Blame::PeerLost);
}

TEST_P(ConnectionProcessClaims, KilledPeerFailsItsUnfinishedMessage) {
  const auto payload = pattern(2, 64 << 20);
  const bool is_started = start([&](Far& far) {
    const Op sent =
        far.connection->send(bytes_of("cut"), std::array{slice_of(payload)}, nullptr, {});
    far.wait_for_word();
  });
  if (!is_started) return;
  struct Seen {
    std::atomic<bool> arrived{false};
    std::atomic<int> closings{0};
  };
  const auto seen = std::make_shared<Seen>();
  near->receive({[seen](const Arrival&) { seen->arrived = true; },
                 [seen](const Error&) { ++seen->closings; }});
  ASSERT_TRUE(loop->drive([&] { return seen->arrived.load(); }, patience()));
  child->kill();
  std::vector<std::byte> got(payload.size());
  EXPECT_EQ(failure_of(near->accept(std::array{slice_of(got)}, nullptr, {})).blame(),
            Blame::PeerLost);
  EXPECT_TRUE(loop->drive([&] { return seen->closings > 0; }, patience()));
  flush(*loop);
  EXPECT_EQ(seen->closings, 1);
}

TEST_P(ConnectionProcessClaims, KilledPeerFailsPendingSends) {
  const bool is_started = start([](Far& far) {
    far.connection->send(bytes_of("never accepted"), {}, nullptr, {});
    far.connection->receive({[](const Arrival&) {}, [](const Error&) {}});
    far.wait_for_word();
  });
  if (!is_started) return;
  ASSERT_TRUE(has_come(*near, *loop));
  const auto payload = pattern(3, 64 << 20);
  const Op stuck = near->send({}, std::array{slice_of(payload)}, nullptr, {});
  const Op behind = near->send({}, {}, nullptr, {});
  flush(*loop);
  EXPECT_FALSE(stuck.ended());
  child->kill();
  EXPECT_EQ(failure_of(stuck).blame(), Blame::PeerLost);
  EXPECT_EQ(failure_of(behind).blame(), Blame::PeerLost);
}

// Sends until a send fails, which must happen. Sends before the end has been noticed may succeed.
void expect_sends_to_fail(Connection& near, EventLoop& loop) {
  const auto payload = pattern(5, 1 << 20);
  std::optional<Error> why;
  const Deadline soon = Deadline::in(std::chrono::seconds(20));
  while (!why && !soon.passed()) {
    const Op sent = near.send({}, std::array{slice_of(payload)}, nullptr, {});
    loop.drive([&] { return sent.ended(); }, Deadline::in(std::chrono::seconds(5)));
    ASSERT_TRUE(sent.ended()) << "the send neither ends nor fails";
    why = sent.error();
  }
  ASSERT_TRUE(why);
  EXPECT_EQ(why->blame(), Blame::PeerLost);
}

TEST_P(ConnectionProcessClaims, LaterSendsToAKilledPeerFail) {
  const bool is_started = start([](Far& far) {
    const auto left = pattern(4, 64);
    far.connection->send(bytes_of("never accepted"), std::array{slice_of(left)}, nullptr, {});
    far.connection->receive({[](const Arrival&) {}, [](const Error&) {}});
    far.wait_for_word();
  });
  if (!is_started) return;
  ASSERT_TRUE(has_come(*near, *loop));
  child->kill();
  expect_sends_to_fail(*near, *loop);
}

TEST_P(ConnectionProcessClaims, LaterSendsToAnEndedPeerFail) {
  const bool is_started = start([](Far& far) {
    const auto left = pattern(4, 64);
    expect_good(
        far.connection->send(bytes_of("never accepted"), std::array{slice_of(left)}, nullptr, {}));
    far.connection->close(Error(Blame::Cancelled, "the process ends"));
    far.wait_for_word();
  });
  if (!is_started) return;
  ASSERT_TRUE(has_come(*near, *loop));
  // This end notices the close before the peer's process ends.
  for (int turn = 0; turn < 3; ++turn) flush(*loop);
  child->say("enough");
  child->expect_success();
  expect_sends_to_fail(*near, *loop);
}

// Returns the address of a process that listened and was killed. Call it before start(), after
// which this process has threads.
std::string address_of_a_killed_listener(const std::string& backend) {
  Child killed([&](Child& self) {
    const auto own_loop = std::make_shared<EventLoop>("gone");
    const auto own = transport::open(backend);
    Harbour harbour(*own->connector(), own_loop);
    self.say(harbour.address());
    static_cast<void>(self.hear());
  });
  return killed.hear();
}

TEST_P(ConnectionProcessClaims, KilledListenerCannotBeReached) {
  const std::string address = address_of_a_killed_listener(GetParam());
  const bool is_started = start([](Far& far) { far.wait_for_word(); });
  if (!is_started) return;
  const auto connection = transport->connector()->connect(
      address, {loop, Deadline::in(std::chrono::milliseconds(300))});
  Mailbox mail(*connection, loop);
  const Error why = mail.wait_closed();
  EXPECT_TRUE(why.blame() == Blame::PeerLost || why.blame() == Blame::Timeout) << why.what();
}

// As a remote call connects: the worker has listened before, so a refusal does not mean that its
// process has yet to start.
TEST_P(ConnectionProcessClaims, RefusingPeerThatListenedIsLost) {
  const std::string address = address_of_a_killed_listener(GetParam());
  const bool is_started = start([](Far& far) { far.wait_for_word(); });
  if (!is_started) return;
  const auto connection = transport->connector()->connect(
      address, {.loop = loop, .deadline = Deadline::never(), .has_listened = true});
  Mailbox mail(*connection, loop);
  const Op sent = connection->send(bytes_of("anybody?"), {}, nullptr, {});
  EXPECT_EQ(mail.wait_closed().blame(), Blame::PeerLost);
  EXPECT_EQ(failure_of(sent).blame(), Blame::PeerLost);
}

INSTANTIATE_TEST_SUITE_P(Transport, ConnectionProcessClaims,
                         testing::ValuesIn(connecting_backends()),
                         [](const auto& one) { return one.param; });
GTEST_ALLOW_UNINSTANTIATED_PARAMETERIZED_TEST(ConnectionProcessClaims);

}  // namespace
}  // namespace weft::conformance
