// SPDX-License-Identifier: Apache-2.0
// The fault matrix between two processes (docs/faults.md): a peer that is killed, stopped and then
// killed, slow, or out of descriptors, while the connection connects, carries headers, carries a
// payload, is idle or closes. In every case messages arrive whole and in order, a connection that
// ends reports the reason once, and no operation stays pending.
#include <algorithm>
#include <array>
#include <csignal>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>

#include <sys/resource.h>

#include <weft/tests/conformance/connection/far.h>
#include <weft/tests/conformance/connection/leaving.h>
#include <weft/tests/harness/folder.h>
#include <weft/tests/harness/sanitized.h>

namespace weft::conformance {
namespace {

constexpr std::size_t kHeaderBytes = 60 << 10;
constexpr std::size_t kPayloadBytes = 64 << 20;

// The kernel reports the end of a process at once. Every timer that would detect it too takes
// longer than this (the shortest, for retransmissions over verbs, 9 s). Bytes that have arrived
// must be read to their end first.
Deadline before_any_timer() {
  return harness::kSanitized ? patience() : Deadline::in(std::chrono::seconds(8));
}

// Checks that the headers are those of messages 0, 1, 2, …, each whole.
class Watch {
 public:
  explicit Watch(Connection& connection) {
    connection.receive({[seen = seen_, &connection](const Arrival& arrival) {
                          std::uint32_t number = 0;
                          if (arrival.header.size() >= sizeof number) {
                            std::memcpy(&number, arrival.header.data(), sizeof number);
                          }
                          const auto whole = pattern(number, arrival.header.size() - sizeof number);
                          seen->good = seen->good && number == seen->messages &&
                                       std::memcmp(arrival.header.data() + sizeof number,
                                                   whole.data(), whole.size()) == 0;
                          ++seen->messages;
                          if (arrival.sizes.empty()) {
                            connection.accept({}, {}, {});
                          } else {
                            seen->holds_payload = true;  // the test accepts it
                          }
                        },
                        [seen = seen_](const Error& why) {
                          std::lock_guard lock(seen->mutex);
                          seen->why = why;
                          ++seen->closings;
                        }});
  }
  bool good() const { return seen_->good; }
  std::uint32_t messages() const { return seen_->messages; }
  bool holds_payload() const { return seen_->holds_payload; }
  int closings() const { return seen_->closings; }
  Error why() const {
    std::lock_guard lock(seen_->mutex);
    return seen_->why.value_or(Error(Blame::Caller, "the connection has not ended"));
  }

 private:
  struct Seen {
    std::atomic<bool> good{true};
    std::atomic<bool> holds_payload{false};
    std::atomic<std::uint32_t> messages{0};
    std::atomic<int> closings{0};
    std::mutex mutex;
    std::optional<Error> why;
  };
  std::shared_ptr<Seen> seen_ = std::make_shared<Seen>();
};

std::vector<std::byte> header_of(std::uint32_t number, std::size_t bytes) {
  std::vector<std::byte> header(sizeof number);
  std::memcpy(header.data(), &number, sizeof number);
  const auto rest = pattern(number, bytes - sizeof number);
  header.insert(header.end(), rest.begin(), rest.end());
  return header;
}

enum class Phase { Connect, Header, Payload, Idle, Close };
constexpr std::array kPhases{Phase::Connect, Phase::Header, Phase::Payload, Phase::Idle,
                             Phase::Close};

std::string name(Phase phase) {
  static constexpr std::array kNames{"Connect", "Header", "Payload", "Idle", "Close"};
  return kNames[static_cast<std::size_t>(phase)];
}

// Brings the other process into the phase in which it is hit.
void be_hit(Far& far, Phase phase) {
  switch (phase) {
    case Phase::Connect: break;
    case Phase::Header:  // at most moments some header is half written
      for (std::uint32_t number = 0;; ++number) {
        const std::size_t bytes = std::min(kHeaderBytes, far.connection->capabilities().max_header);
        const Op op = far.connection->send(header_of(number, bytes), {}, nullptr, {});
        if (!op.done().synchronize(Deadline::never()) || op.error()) break;
      }
      break;
    case Phase::Payload: {
      const auto payload = pattern(1, kPayloadBytes);
      const Op op =
          far.connection->send(header_of(0, 8), std::array{slice_of(payload)}, nullptr, {});
      far.wait_for_word();
      break;
    }
    case Phase::Idle: far.connection->send(header_of(0, 8), {}, nullptr, {}); break;
    case Phase::Close:
      for (std::uint32_t number = 0; number < 3; ++number) {
        expect_good(far.connection->send(header_of(number, 8), {}, nullptr, {}));
      }
      far.connection->close(Error(Blame::Cancelled, "enough"));
      break;
  }
  far.wait_for_word();
}

// True once this end has seen enough for the blow to land in the phase.
bool has_come_far_enough(Phase phase, const Watch& watch) {
  switch (phase) {
    case Phase::Connect: return true;
    case Phase::Header: return watch.messages() >= 20;
    case Phase::Payload: return watch.holds_payload();
    case Phase::Idle: return watch.messages() == 1;
    case Phase::Close: return watch.messages() == 3;
  }
  return true;
}

class ConnectionFaults : public ConnectionProcessClaims {
 protected:
  void hit(Phase phase, bool is_stopped_first) {
    SCOPED_TRACE(GetParam() + ", " + name(phase));
    const auto sent = pattern(2, kPayloadBytes);
    connects_within = std::chrono::seconds(2);
    const bool is_started = start([phase](Far& far) { be_hit(far, phase); });
    if (!is_started) return;
    Watch watch(*near);
    ASSERT_TRUE(loop->drive([&] { return has_come_far_enough(phase, watch); }, patience()));
    if (is_stopped_first) {
      child->signal(SIGSTOP);
    } else {
      child->kill();
    }
    std::vector<std::byte> got(watch.holds_payload() ? kPayloadBytes : 0);
    const Op accepted =
        watch.holds_payload() ? near->accept(std::array{slice_of(got)}, nullptr, {}) : Op();
    const Op stuck = near->send({}, std::array{slice_of(sent)}, nullptr, {});  // never read
    if (is_stopped_first && phase != Phase::Close && phase != Phase::Connect) {
      // A stopped peer may continue as long as it lives: it is waited for.
      for (int turn = 0; turn < 100; ++turn) flush(*loop);
      EXPECT_EQ(watch.closings(), 0) << watch.why().what();
    }
    child->kill();
    EXPECT_TRUE(loop->drive([&] { return watch.closings() > 0; }, before_any_timer()))
        << "the peer's end is not noticed";
    // While connecting, attempts go on until the deadline: another process may listen by then.
    const bool may_be_late = phase == Phase::Connect && watch.why().blame() == Blame::Timeout;
    EXPECT_TRUE(may_be_late || watch.why().blame() == Blame::PeerLost) << watch.why().what();
    EXPECT_TRUE(watch.good());
    if (watch.holds_payload()) {
      EXPECT_TRUE(accepted.done().synchronize(patience()));
      // A payload may be read out of a stopped process's memory.
      if (is_stopped_first && !accepted.error()) {
        EXPECT_TRUE(same(got, pattern(1, kPayloadBytes)));
      } else {
        EXPECT_EQ(failure_of(accepted).blame(), Blame::PeerLost);
      }
    }
    if (phase != Phase::Close) {
      EXPECT_EQ(failure_of(stuck).blame(), watch.why().blame());
    } else {  // a peer that closes may still empty its ring
      EXPECT_TRUE(stuck.done().synchronize(patience()));
      EXPECT_EQ(stuck.error().value_or(watch.why()).blame(), watch.why().blame());
    }
    flush(*loop);
    EXPECT_EQ(watch.closings(), 1);
  }
};

TEST_P(ConnectionFaults, KilledPeerIsNoticedInEveryPhase) {
  for (const Phase phase : kPhases) {
    hit(phase, /*is_stopped_first=*/false);
    if (IsSkipped() || HasFatalFailure()) return;
  }
}

TEST_P(ConnectionFaults, StoppedPeerIsAwaitedUntilKilled) {
  for (const Phase phase : kPhases) {
    hit(phase, /*is_stopped_first=*/true);
    if (IsSkipped() || HasFatalFailure()) return;
  }
}

// close() does not wait for the peer, and the peer still receives everything sent before it.
TEST_P(ConnectionFaults, ClosingDoesNotWaitForAStoppedPeer) {
  const bool is_started = start([](Far& far) {
    Mailbox mail(*far.connection, far.loop);
    EXPECT_EQ(mail.next().header, "before");
    far.wire.say("it stands");
    for (std::uint32_t i = 0; i < 3; ++i)
      EXPECT_TRUE(same(mail.next().payloads.at(0), pattern(i, 1000))) << i;
    EXPECT_EQ(mail.wait_closed().blame(), Blame::PeerLost);
  });
  if (!is_started) return;
  Mailbox mail(*near, loop);
  near->send(bytes_of("before"), {}, nullptr, {});
  EXPECT_EQ(child->hear(), "it stands");
  child->signal(SIGSTOP);
  for (std::uint32_t i = 0; i < 3; ++i) {
    const auto payload = pattern(i, 1000);
    expect_good(near->send({}, std::array{slice_of(payload)}, nullptr, {}));
  }
  near->close(Error(Blame::Cancelled, "enough"));
  EXPECT_EQ(mail.wait_closed().blame(), Blame::Cancelled);
  EXPECT_EQ(mail.closings(), 1);
  child->signal(SIGCONT);
  child->expect_success();
}

TEST_P(ConnectionFaults, StoppedListenerIsAwaitedToDeadline) {
  for (const bool is_killed : {true, false}) {
    loop.reset();  // the next process must not inherit anything from this one
    transport.reset();
    const auto listening = std::make_unique<Child>([&](Child& self) {
      // No thread drives this loop: the process's threads may run for a moment after the signal.
      const auto own_loop = std::make_shared<EventLoop>("stopped", EventLoop::Thread::Given);
      const auto own = open_for_claims(GetParam());
      Harbour harbour(*own->connector(), own_loop);
      self.say(harbour.address());
      static_cast<void>(self.hear());
    });
    const std::string address = listening->hear();
    listening->signal(SIGSTOP);
    transport = open_for_claims(GetParam());
    if (transport->connector()->why_unreachable(address))
      GTEST_SKIP() << GetParam() << " does not reach another process";
    loop = std::make_shared<EventLoop>("near");
    const auto connection = transport->connector()->connect(
        address, {loop, Deadline::in(std::chrono::milliseconds(200))});
    Mailbox mail(*connection, loop);
    const auto payload = pattern(1, kPayloadBytes);
    const Op stuck = connection->send({}, std::array{slice_of(payload)}, nullptr, {});
    flush(*loop);
    if (is_killed) listening->kill();
    const Error why = mail.wait_closed();
    EXPECT_TRUE((is_killed && why.blame() == Blame::PeerLost) || why.blame() == Blame::Timeout)
        << why.what();
    EXPECT_EQ(failure_of(stuck).blame(), why.blame());
  }
}

// The peer takes none of ten messages until it is told to: the sender keeps those that do not fit,
// and none is lost.
TEST_P(ConnectionFaults, SlowPeerHoldsSenderBackWithoutLoss) {
  const bool is_started = start([](Far& far) {
    far.wait_for_word();
    Mailbox mail(*far.connection, far.loop);
    for (std::uint32_t i = 0; i < 10; ++i)
      EXPECT_TRUE(same(mail.next().payloads.at(0), pattern(i, 8 << 20))) << i;
    far.wire.say("all of it");
    far.wait_for_word();
  });
  if (!is_started) return;
  std::vector<std::vector<std::byte>> payloads;
  std::vector<Op> ops;
  for (std::uint32_t i = 0; i < 10; ++i) payloads.push_back(pattern(i, 8 << 20));
  for (const auto& payload : payloads)
    ops.push_back(near->send({}, std::array{slice_of(payload)}, nullptr, {}));
  for (int turn = 0; turn < 100; ++turn) flush(*loop);
  EXPECT_FALSE(ops.back().ended()) << "80 MiB were buffered though the peer has taken none of it";
  child->say("now");
  for (const Op& op : ops) expect_good(op);
  EXPECT_EQ(child->hear(), "all of it");
  child->say("enough");
  child->expect_success();
}

// True if this process has shared memory open or mapped.
bool holds_shared_memory() {
  std::error_code gone;  // a descriptor may be closed meanwhile
  for (const auto& entry : std::filesystem::directory_iterator("/proc/self/fd")) {
    if (std::filesystem::read_symlink(entry.path(), gone).string().find("memfd:weft") !=
        std::string::npos)
      return true;
  }
  std::ifstream maps("/proc/self/maps");
  for (std::string line; std::getline(maps, line);) {
    if (line.find("memfd:weft") != std::string::npos) return true;
  }
  return false;
}

// Listens and connects to itself again and again, and reports each connection.
void make_connections_for_ever(Far& far) {
  for (;;) {
    Harbour harbour(*far.transport->connector(), far.loop);
    const auto one = far.transport->connector()->connect(harbour.address(), {far.loop, patience()});
    const auto other = harbour.next();
    far.wire.say("another");
  }
}

// The process is killed while it makes connections. Nothing that it made outlives it, except the
// name of a socket that was about to be removed at that moment. Its peer keeps nothing once the
// connection has ended.
TEST_P(ConnectionFaults, KilledProcessLeavesNothingBehind) {
  const harness::Folder folder;
  ASSERT_EQ(::setenv("TMPDIR", folder.path().c_str(), 1), 0);
  for (int connections = 1; connections <= 5; ++connections) {
    const bool is_started = start(make_connections_for_ever);
    if (!is_started) break;
    Mailbox mail(*near, loop);
    for (int i = 0; i < connections; ++i) child->hear();
    child->kill();
    EXPECT_EQ(mail.wait_closed().blame(), Blame::PeerLost);
    near.reset();
    EXPECT_TRUE(loop->drive([] { return !holds_shared_memory(); }, patience()))
        << "a shared memory segment is still open";
    for (const auto& entry : std::filesystem::directory_iterator(folder.path())) {
      EXPECT_TRUE(entry.is_socket() && entry.path().filename().string().starts_with("weft-"))
          << entry.path();
    }
  }
  ::unsetenv("TMPDIR");
}

// A process without free descriptors is refused with Busy, or its connection ends; once it has
// some, it connects.
TEST_P(ConnectionFaults, ConnectsOnceDescriptorsAreFreeAgain) {
  if (why_within_the_process(GetParam()))
    GTEST_SKIP() << GetParam() << " does not reach another process";
  Child poor([&](Child& self) {
    const std::string tried =
        self.hear();  // another listener: the refused attempt may still reach it in the end
    const std::string address = self.hear();
    const auto own_loop = std::make_shared<EventLoop>("poor");
    const auto own = open_for_claims(GetParam());
    rlimit before{};
    getrlimit(RLIMIT_NOFILE, &before);
    rlimit none = before;
    none.rlim_cur = 0;
    setrlimit(RLIMIT_NOFILE, &none);
    try {
      const auto refused = own->connector()->connect(
          tried, {own_loop, Deadline::in(std::chrono::milliseconds(100))});
      Mailbox mail(*refused, own_loop);
      const Error why = mail.wait_closed();
      EXPECT_TRUE(why.blame() == Blame::Busy || why.blame() == Blame::Timeout) << why.what();
    } catch (const Error& error) {
      EXPECT_EQ(error.blame(), Blame::Busy) << error.what();
    }
    setrlimit(RLIMIT_NOFILE, &before);
    const auto works = own->connector()->connect(address, {own_loop, patience()});
    Mailbox mail(*works, own_loop);
    expect_good(works->send(bytes_of("here"), {}, nullptr, {}));
    EXPECT_EQ(mail.next().header, "there");
  });
  transport = open_for_claims(GetParam());
  loop = std::make_shared<EventLoop>("rich");
  Harbour in_vain(*transport->connector(), loop);
  Harbour harbour(*transport->connector(), loop);
  poor.say(in_vain.address());
  poor.say(harbour.address());
  const auto connection = harbour.next();
  ASSERT_TRUE(connection);
  Mailbox mail(*connection, loop);
  EXPECT_EQ(mail.next().header, "here");
  expect_good(connection->send(bytes_of("there"), {}, nullptr, {}));
  poor.expect_success();
}

INSTANTIATE_TEST_SUITE_P(Transport, ConnectionFaults, testing::ValuesIn(connecting_backends()),
                         [](const auto& one) { return one.param; });
GTEST_ALLOW_UNINSTANTIATED_PARAMETERIZED_TEST(ConnectionFaults);

}  // namespace
}  // namespace weft::conformance
