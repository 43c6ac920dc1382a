// SPDX-License-Identifier: Apache-2.0
// How connections begin and end: listening, connecting to nobody, closing, dropping, lost peers.
#include <array>
#include <future>
#include <set>

#include <weft/tests/conformance/connection/connection_pair.h>

namespace weft::conformance {
namespace {

TEST_P(ConnectionClaims, EachConnectionIsAcceptedSeparately) {
  const auto near_loop = std::make_shared<EventLoop>("near");
  const auto far_loop = std::make_shared<EventLoop>("far");
  Harbour harbour(connector_, far_loop);
  constexpr int kConnections = 10;
  std::vector<std::shared_ptr<Connection>> near;
  for (int i = 0; i < kConnections; ++i) {
    near.push_back(connect(harbour.address(), near_loop));
    near.back()->send(bytes_of(std::to_string(i)), {}, nullptr, {});
  }
  std::set<std::string> seen;
  for (int i = 0; i < kConnections; ++i) {
    const auto far = harbour.next();
    ASSERT_TRUE(far);
    Mailbox mail(*far, far_loop);
    seen.insert(mail.next().header);
  }
  EXPECT_EQ(seen.size(), static_cast<std::size_t>(kConnections));
}

TEST_P(ConnectionClaims, ConnectingToNobodyEndsByTheDeadline) {
  const auto loop = std::make_shared<EventLoop>("near");
  std::string address;
  {
    Harbour harbour(connector_, loop);
    address = harbour.address();
  }
  const auto connection = connect(address, loop, Deadline::in(std::chrono::milliseconds(300)));
  Mailbox mail(*connection, loop);
  const Op sent = connection->send(bytes_of("hello"), {}, nullptr, {});
  const Error why = mail.wait_closed();
  EXPECT_TRUE(why.blame() == Blame::PeerLost || why.blame() == Blame::Timeout) << why.what();
  EXPECT_NE(why.text().find(connection->peer()), std::string::npos) << why.what();
  EXPECT_EQ(failure_of(sent).blame(), why.blame());
  EXPECT_EQ(failure_of(connection->send(bytes_of("again"), {}, nullptr, {})).blame(), why.blame());
}

// A stopped process, or one that computes on its loop. The kernel may have accepted the connection
// long before.
TEST_P(ConnectionClaims, UnacceptingListenerTimesOutConnecting) {
  const auto loop = std::make_shared<EventLoop>("near");
  const auto stuck = std::make_shared<EventLoop>("stuck", EventLoop::Thread::Given);
  Harbour harbour(connector_, stuck);
  const auto payload = pattern(1, 8 << 20);
  const auto connection =
      connect(harbour.address(), loop, Deadline::in(std::chrono::milliseconds(200)));
  Mailbox mail(*connection, loop);
  const Op sent = connection->send(bytes_of("hello"), std::array{slice_of(payload)}, nullptr, {});
  const Error why = mail.wait_closed();
  EXPECT_EQ(why.blame(), Blame::Timeout) << why.what();
  EXPECT_NE(why.text().find(connection->peer()), std::string::npos) << why.what();
  EXPECT_EQ(failure_of(sent).blame(), Blame::Timeout);
}

TEST_P(ConnectionClaims, ForeignAddressesAreRefused) {
  const auto loop = std::make_shared<EventLoop>("near");
  for (const char* address : {"", "nonsense", "/", "1/2/3/4/5", "carrier-pigeon://loft"}) {
    EXPECT_TRUE(connector_.why_unreachable(address)) << address;
    try {
      const auto connection = connect(address, loop);
      ADD_FAILURE() << "'" << address << "' was taken";
    } catch (const Error& error) {
      EXPECT_EQ(error.blame(), Blame::Caller) << error.what();
    }
  }
}

TEST_P(ConnectionClaims, ConnectionsOutliveTheirListener) {
  const ConnectionPair pair = open();  // its listener is already destroyed
  Mailbox near_mail(*pair.near, pair.near_loop);
  Mailbox far_mail(*pair.far, pair.far_loop);
  warm_up(pair, near_mail, far_mail);
}

TEST_P(ConnectionClaims, MayBeDroppedBeforeAnySend) {
  for (int i = 0; i < 20; ++i) {
    const auto near_loop = std::make_shared<EventLoop>("near");
    const auto far_loop = std::make_shared<EventLoop>("far");
    Harbour harbour(connector_, far_loop);
    connect(harbour.address(), near_loop).reset();
    const auto kept = connect(harbour.address(), near_loop);
  }
}

TEST_P(ConnectionClaims, MayBeDroppedInsideItsOwnHandlers) {
  for (const bool drops_when_closed : {false, true}) {
    ConnectionPair pair = open();
    Mailbox near_mail(*pair.near, pair.near_loop);
    struct Owner {
      std::mutex mutex;
      std::shared_ptr<Connection> connection;
      std::atomic<bool> dropped{false};
      void drop() {
        std::shared_ptr<Connection> last;
        {
          std::lock_guard lock(mutex);
          last.swap(connection);
        }
        last.reset();
        dropped = true;
      }
    };
    const auto owner = std::make_shared<Owner>();
    owner->connection = pair.far;
    auto* const far = pair.far.get();
    far->receive({[=](const Arrival&) {
                    if (!drops_when_closed)
                      return owner->drop();  // without accepting the message that has arrived
                    far->accept({}, nullptr, {});
                  },
                  [=](const Error&) { owner->drop(); }});
    pair.far.reset();
    pair.near->send(bytes_of("drop it"), {}, nullptr, {});
    pair.near->send(bytes_of("and this"), {}, nullptr, {});
    if (drops_when_closed) pair.near->close(Error(Blame::Cancelled, "now"));
    EXPECT_TRUE(pair.far_loop->drive([&] { return owner->dropped.load(); }, patience()));
    const Error why = near_mail.wait_closed();
    EXPECT_EQ(why.blame(), drops_when_closed ? Blame::Cancelled : Blame::PeerLost) << why.what();
  }
}

TEST_P(ConnectionClaims, DroppedConnectionStartsNoHandler) {
  ConnectionPair pair = open();
  std::atomic<int> calls{0};
  pair.far->receive({[&](const Arrival&) { ++calls; }, [&](const Error&) { ++calls; }});
  flush(*pair.far_loop);
  pair.far.reset();
  Mailbox mail(*pair.near, pair.near_loop);
  pair.near->send(bytes_of("too late"), {}, nullptr, {});
  mail.wait_closed();
  flush(*pair.far_loop);
  flush(*pair.far_loop);
  EXPECT_EQ(calls, 0);
}

TEST_P(ConnectionClaims, SentMessagesArriveDespiteClosing) {
  const ConnectionPair pair = open();
  Mailbox near_mail(*pair.near, pair.near_loop);
  Mailbox mail(*pair.far, pair.far_loop);
  warm_up(pair, near_mail, mail);
  const auto payload = pattern(1, 1 << 20);
  std::size_t done = 0;
  for (int i = 0; i < 20; ++i) {
    const Op op =
        pair.near->send(bytes_of(std::to_string(i)), std::array{slice_of(payload)}, nullptr, {});
    expect_good(op);
    ++done;
  }
  // A message in the other direction that is never read must not discard messages on their way.
  pair.far->send(bytes_of("unread"), std::array{slice_of(payload)}, nullptr, {});
  pair.near->close(Error(Blame::Cancelled, "finished for today"));
  for (std::size_t i = 0; i < done; ++i) {
    const Letter letter = mail.next();
    EXPECT_EQ(letter.header, std::to_string(i));
    EXPECT_TRUE(same(letter.payloads.at(0), payload));
  }
  const Error why = mail.wait_closed();
  EXPECT_EQ(why.blame(), Blame::PeerLost);
  EXPECT_NE(why.text().find("finished for today"), std::string::npos) << why.what();
  EXPECT_EQ(mail.closings(), 1);
}

TEST_P(ConnectionClaims, ClosingFailsPendingSendsInOrder) {
  const ConnectionPair pair = open();
  Mailbox near_mail(*pair.near, pair.near_loop);
  pair.far->receive({[](const Arrival&) {}, [](const Error&) {}});  // accepts no message
  const auto payload = pattern(2, 64 << 20);
  struct Ended {
    std::mutex mutex;
    std::vector<int> order;
  };
  const auto ended = std::make_shared<Ended>();
  std::vector<Op> ops;
  for (int i = 0; i < 5; ++i) {
    ops.push_back(pair.near->send(bytes_of("stuck"), std::array{slice_of(payload)}, nullptr, {}));
    ops.back().on_ended([ended, i] {
      std::lock_guard lock(ended->mutex);
      ended->order.push_back(i);
    });
  }
  pair.near->close(Error(Blame::Cancelled, "no more"));
  pair.near->close(Error(Blame::Timeout, "closed twice"));
  for (const Op& op : ops) {
    const Error error = failure_of(op);
    EXPECT_EQ(error.blame(), Blame::Cancelled);
    EXPECT_NE(error.text().find("no more"), std::string::npos) << error.what();
  }
  const auto order = [&] {  // tasks run after the operation has ended
    std::lock_guard lock(ended->mutex);
    return ended->order;
  };
  EXPECT_TRUE(pair.near_loop->drive([&] { return order().size() == ops.size(); }, patience()));
  EXPECT_EQ(order(), (std::vector<int>{0, 1, 2, 3, 4}));
  EXPECT_EQ(near_mail.wait_closed().blame(), Blame::Cancelled);
  EXPECT_EQ(failure_of(pair.near->send({}, {}, nullptr, {})).blame(), Blame::Cancelled);
  EXPECT_EQ(failure_of(pair.near->accept({}, nullptr, {})).blame(), Blame::Cancelled);
  for (int i = 0; i < 10; ++i) flush(*pair.near_loop);
  EXPECT_EQ(near_mail.closings(), 1);
}

TEST_P(ConnectionClaims, ClosingFailsAWaitingAccept) {
  const ConnectionPair pair = open();
  const auto payload = pattern(3, 8 << 20);
  std::atomic<bool> arrived{false};
  pair.far->receive({[&](const Arrival&) { arrived = true; }, [](const Error&) {}});
  const Op sent = pair.near->send({}, std::array{slice_of(payload)}, nullptr, {});
  ASSERT_TRUE(pair.far_loop->drive([&] { return arrived.load(); }, patience()));
  std::vector<std::byte> got(payload.size());
  auto pin = std::make_shared<int>(0);
  const std::weak_ptr<int> watch = pin;
  const Op accepted = pair.far->accept(std::array{slice_of(got)}, std::move(pin),
                                       Fence(std::make_shared<HostFlag>()));
  flush(*pair.far_loop);
  EXPECT_FALSE(accepted.ended());
  pair.far->close(Error(Blame::Cancelled, "will not wait"));
  EXPECT_EQ(failure_of(accepted).blame(), Blame::Cancelled);
  EXPECT_TRUE(watch.expired());
  EXPECT_TRUE(sent.done().synchronize(patience())) << "the sender is not told of the close";
}

TEST_P(ConnectionClaims, DroppedPeerEndsAnIdleConnection) {
  ConnectionPair pair = open();
  Mailbox near_mail(*pair.near, pair.near_loop);
  {
    Mailbox far_mail(*pair.far, pair.far_loop);
    warm_up(pair, near_mail, far_mail);
    pair.far.reset();
  }
  EXPECT_EQ(near_mail.wait_closed().blame(), Blame::PeerLost);
  EXPECT_EQ(near_mail.closings(), 1);
  EXPECT_EQ(failure_of(pair.near->send(bytes_of("anybody?"), {}, nullptr, {})).blame(),
            Blame::PeerLost);
}

TEST_P(ConnectionClaims, DroppedPeerFailsItsUnfinishedMessage) {
  ConnectionPair pair = open();
  std::atomic<bool> arrived{false};
  std::atomic<int> closings{0};
  pair.near->receive({[&](const Arrival&) { arrived = true; }, [&](const Error&) { ++closings; }});
  const auto payload = pattern(4, 64 << 20);
  const Op sent = pair.far->send(bytes_of("cut"), std::array{slice_of(payload)}, nullptr, {});
  ASSERT_TRUE(pair.near_loop->drive([&] { return arrived.load(); }, patience()));
  pair.far.reset();
  EXPECT_EQ(failure_of(sent).blame(), Blame::Cancelled);
  std::vector<std::byte> got(payload.size());
  EXPECT_EQ(failure_of(pair.near->accept(std::array{slice_of(got)}, nullptr, {})).blame(),
            Blame::PeerLost);
  EXPECT_TRUE(pair.near_loop->drive([&] { return closings > 0; }, patience()));
  flush(*pair.near_loop);
  EXPECT_EQ(closings, 1);
}

TEST_P(ConnectionClaims, DroppedPeerLeavesNoSendPending) {
  ConnectionPair pair = open();
  std::atomic<bool> arrived{false};
  pair.near->receive({[&](const Arrival&) { arrived = true; }, [](const Error&) {}});
  pair.far->send(bytes_of("never accepted"), {}, nullptr, {});
  ASSERT_TRUE(pair.near_loop->drive([&] { return arrived.load(); }, patience()));
  pair.far->receive({[](const Arrival&) {}, [](const Error&) {}});
  const auto payload = pattern(5, 64 << 20);
  const Op stuck = pair.near->send({}, std::array{slice_of(payload)}, nullptr, {});
  const Op behind = pair.near->send({}, {}, nullptr, {});
  flush(*pair.near_loop);
  EXPECT_FALSE(stuck.ended());
  pair.far.reset();
  // The connection may read them in order to discard them, but they end.
  EXPECT_TRUE(stuck.done().synchronize(patience()));
  EXPECT_TRUE(behind.done().synchronize(patience()));
}

TEST_P(ConnectionClaims, LateReceiveHearsOfTheEnd) {
  ConnectionPair pair = open();
  pair.far->close(Error(Blame::Cancelled, "gone early"));
  pair.near->close(Error(Blame::Cancelled, "here too"));
  flush(*pair.near_loop);
  Mailbox mail(*pair.near, pair.near_loop);
  mail.wait_closed();
  EXPECT_EQ(mail.closings(), 1);
}

TEST_P(ConnectionClaims, BlockingInAHandlerReturnsFalse) {
  const ConnectionPair pair = open();
  const auto never = std::make_shared<HostFlag>();
  const Op stuck = pair.near->send({}, {}, nullptr, Fence(never));
  std::promise<bool> result;
  const Deadline limit = patience();
  pair.near_loop->post([&] { result.set_value(stuck.done().synchronize(limit)); });
  EXPECT_FALSE(result.get_future().get());
  EXPECT_FALSE(limit.passed()) << "it waited instead";
  never->raise();
  expect_good(stuck);
}

}  // namespace
}  // namespace weft::conformance
