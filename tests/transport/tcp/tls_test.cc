// SPDX-License-Identifier: Apache-2.0
// Connections that speak TLS, and what becomes of peers that do not agree on it.
#include <array>
#include <mutex>
#include <thread>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <poll.h>

#include <weft/base/log.h>
#include <weft/tests/harness/certificates.h>
#include <weft/tests/transport/tcp/streams.h>
#include <weft/transport/tls/plain_text.h>

namespace weft::transport::tcp {
namespace {

using harness::Authority;
using harness::CertificateOptions;
using std::chrono::milliseconds;
using testing::AllOf;
using testing::HasSubstr;
using testing::Not;

using Given = std::shared_ptr<const tls::Credentials>;

Given credentials(const TlsFiles& files, const tls::Limits& limits = {}) {
  return std::make_shared<const tls::Credentials>(files, limits);
}

Settings with(Given given, std::size_t sockets = 1) {
  Settings settings;
  settings.credentials = std::move(given);
  settings.sockets = sockets;
  return settings;
}

// The lines of the log, while it lives.
class Log {
 public:
  std::string text() const {
    std::lock_guard lock(mutex_);
    return text_;
  }

 private:
  mutable std::mutex mutex_;
  std::string text_;
  const log::Capture capture_{[this](LogLevel level, std::string_view line) {
    std::lock_guard lock(mutex_);
    text_ += (level == LogLevel::Warn ? "W " : "- ") + std::string(line) + "\n";
  }};
};

// The bytes of the first message of a handshake, as far as the listener cannot answer them.
const std::string kHalfHello("\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", 11);

std::string read_all(const Descriptor& socket) {
  std::string text;
  std::array<char, 4096> some{};
  for (ssize_t got = 0; (got = ::recv(socket.get(), some.data(), some.size(), 0)) > 0;)
    text.append(some.data(), static_cast<std::size_t>(got));
  return text;
}

class TlsSockets : public testing::TestWithParam<std::size_t> {};
INSTANTIATE_TEST_SUITE_P(, TlsSockets, testing::Values(1, 3));

TEST_P(TlsSockets, CarryBytesBothWays) {
  Authority authority;
  const Settings settings = with(credentials(authority.issue()), GetParam());
  const auto here = make_loop("here");
  const auto there = make_loop("there");
  Lobby lobby(there, "", settings);
  End a(here, dial(here, lobby.address(), patience(), settings));
  End b(there, lobby.take());
  for (const std::size_t bytes : {1u, 16'383u, 16'384u, 16'385u, 70'000u, 5'000'000u}) {
    for (const std::size_t piece : {0u, 37u, 20'000u}) {
      if (piece == 37 && bytes > 100'000) continue;
      a.send(pattern(bytes, 1), piece);
      b.send(pattern(bytes, 2), piece);
      EXPECT_EQ(b.take(bytes), pattern(bytes, 1)) << bytes << " in pieces of " << piece;
      EXPECT_EQ(a.take(bytes), pattern(bytes, 2)) << bytes << " in pieces of " << piece;
    }
  }
  a.finish_writing();
  EXPECT_EQ(b.wait_end().blame(), Blame::PeerLost);
}

// Bytes that were taken while the peer had no room arrive although nothing is written behind them,
// and the end of the stream behind them.
TEST(Tls, BytesThatWaitForRoomArriveWithoutAnotherWrite) {
  Authority authority;
  const Settings settings = with(credentials(authority.issue()));
  const auto loop = make_loop();
  Lobby lobby(loop, "", settings);
  End a(loop, dial(loop, lobby.address(), patience(), settings));
  End b(loop, lobby.take());
  b.hold(true);
  const std::string bytes = pattern(20'000'000);
  a.send(bytes);
  b.hold(false);
  a.finish_writing();
  EXPECT_EQ(b.take(bytes.size()), bytes);
  EXPECT_EQ(b.wait_end().blame(), Blame::PeerLost);
}

TEST(Tls, NewKeysAreTaken) {
  Authority authority;
  const Settings settings = with(credentials(authority.issue(), {.key_bytes = 100'000}));
  const auto loop = make_loop();
  Lobby lobby(loop, "", settings);
  End a(loop, dial(loop, lobby.address(), patience(), settings));
  End b(loop, lobby.take());
  const std::string bytes = pattern(3'000'000);
  a.send(bytes);
  b.send(bytes);
  EXPECT_EQ(b.take(bytes.size()), bytes);
  EXPECT_EQ(a.take(bytes.size()), bytes);
}

TEST(Tls, NothingIsReadableOnTheWay) {
  Authority authority;
  const Settings settings = with(credentials(authority.issue()));
  const auto loop = make_loop();
  Lobby lobby(loop, "127.0.0.1", settings);
  Address address = Address::parse(lobby.address());
  const Descriptor door = reserved_port();
  ASSERT_EQ(::listen(door.get(), 1), 0);
  const int port = lobby.port();
  std::string seen;
  std::thread relay([&] {
    const Descriptor from(::accept(door.get(), nullptr, nullptr));
    const Descriptor to = raw_connect(port);
    const auto copy = [](const Descriptor& one, const Descriptor& other, std::string* record) {
      std::array<char, 4096> some{};
      for (ssize_t got = 0; (got = ::recv(one.get(), some.data(), some.size(), 0)) > 0;) {
        if (record != nullptr) record->append(some.data(), static_cast<std::size_t>(got));
        ::send(other.get(), some.data(), static_cast<std::size_t>(got), MSG_NOSIGNAL);
      }
      ::shutdown(other.get(), SHUT_WR);
    };
    std::thread back([&] { copy(to, from, nullptr); });
    copy(from, to, &seen);
    back.join();
  });
  address.hosts = {{"127.0.0.1", local_end(door).port()}};
  {
    End a(loop, dial(loop, address.text(), patience(), settings));
    End b(loop, lobby.take());
    a.send("a tensor that is nobody else's business");
    EXPECT_EQ(b.take(39), "a tensor that is nobody else's business");
    a.finish_writing();
    b.finish_writing();
    a.wait_end();
  }
  relay.join();
  EXPECT_THAT(seen, AllOf(Not(HasSubstr("nobody else's")), Not(HasSubstr("weft/tcp"))));
  EXPECT_GT(seen.size(), 39u);
}

TEST(TlsSocket, SendFailsAtOnceAfterAReset) {
  Authority authority;
  const Given given = credentials(authority.issue());
  auto [one, other] = tcp_pair();
  tls::Socket a(std::move(one));
  a.encrypt(given, tls::Role::Connector);
  {
    tls::Socket b(std::move(other));
    b.encrypt(given, tls::Role::Listener);
    bool is_done = false;
    while (!is_done) {
      const auto mine = a.handshake();
      const auto theirs = b.handshake();
      is_done = mine == tls::Progress::Done && theirs == tls::Progress::Done;
    }
    const linger resets{1, 0};
    ASSERT_EQ(::setsockopt(b.get(), SOL_SOCKET, SO_LINGER, &resets, sizeof resets), 0);
  }
  pollfd ended{a.get(), 0, 0};
  ASSERT_EQ(::poll(&ended, 1, 60'000), 1);
  std::string bytes(1 << 20, 'x');
  const iovec piece{bytes.data(), bytes.size()};
  EXPECT_EQ(a.send({&piece, 1}), -1) << "bytes are taken that nobody reads";
  EXPECT_NE(errno, EAGAIN);
  EXPECT_TRUE(a.flush()) << "bytes wait for a socket that has failed";
}

// --- Peers that are refused ---

// The error of a dial, and the listener's log lines of that time.
struct Refusal {
  Error dialled{Blame::Cancelled, ""};
  std::string logged;
};

// Dials once.
Error error_of_dial(const std::shared_ptr<EventLoop>& loop, const std::string& address,
                    Settings settings, milliseconds limit = milliseconds(5'000)) {
  settings.first_pause = std::chrono::hours(1);
  End end(loop, dial(loop, address, Deadline::in(limit), settings));
  return end.wait_end();
}

Refusal refusal(const Given& dialler, const Given& listener) {
  const Log log;
  Refusal refusal;
  const auto loop = make_loop();
  Lobby lobby(loop, "127.0.0.1", with(listener));
  refusal.dialled = error_of_dial(loop, lobby.address(), with(dialler));
  wait_until(
      *loop, [&] { return log.text().find("W tcp: refused a connection") != std::string::npos; },
      "the listener says why");
  EXPECT_EQ(lobby.waiting(), 0u);
  EXPECT_EQ(refusal.dialled.blame(), Blame::PeerLost);
  EXPECT_THAT(refusal.dialled.text(), HasSubstr("cannot connect (tcp) to 127.0.0.1:"));
  refusal.logged = log.text();
  return refusal;
}

TEST(TlsRefusals, OtherAuthority) {
  Authority ours, theirs("another authority");
  const Given us = credentials(ours.issue());
  const Refusal both = refusal(credentials(theirs.issue()), us);
  EXPECT_THAT(both.dialled.text(),
              AllOf(HasSubstr("its certificate (of 127.0.0.1, ::1) is refused"),
                    HasSubstr("that authority as WEFT_TLS_CA")));
  EXPECT_THAT(both.logged, HasSubstr("by the alert 'unknown CA'"));
  // The listener alone refuses it: the dialling side learns so after its part of the handshake.
  const Refusal one = refusal(credentials(theirs.issue({}, &ours)), us);
  EXPECT_THAT(one.dialled.text(), AllOf(HasSubstr("it refuses this process's certificate"),
                                        HasSubstr("'unknown CA'"), HasSubstr("WEFT_TLS_CA")));
  EXPECT_THAT(one.logged, HasSubstr("that authority as WEFT_TLS_CA"));
}

TEST(TlsRefusals, Expired) {
  Authority authority;
  const tls::Limits later{.time = std::time(nullptr) + 7'200};
  const auto soon = [&] { return credentials(authority.issue({.valid_until = 3'600})); };
  const auto long_after = [&] { return credentials(authority.issue(), later); };
  const Refusal dials = refusal(soon(), long_after());
  EXPECT_THAT(dials.dialled.text(), HasSubstr("by the alert 'certificate expired'"));
  EXPECT_THAT(dials.logged, AllOf(HasSubstr("certificate has expired"), HasSubstr("clocks")));
  const Refusal listens = refusal(long_after(), soon());
  EXPECT_THAT(listens.dialled.text(),
              AllOf(HasSubstr("certificate has expired; issue a new one"), HasSubstr("clocks")));
  EXPECT_THAT(listens.logged, HasSubstr("by the alert 'certificate expired'"));
}

TEST(TlsRefusals, WrongName) {
  Authority authority;
  const Given us = credentials(authority.issue({.names = "DNS:train.example,IP:127.0.0.1"}));
  const Given other = credentials(authority.issue({.names = "DNS:mail.example,IP:10.9.8.7"}));
  const Refusal listens = refusal(us, other);
  EXPECT_THAT(listens.dialled.text(),
              AllOf(HasSubstr("is for mail.example, 10.9.8.7"), HasSubstr("address 127.0.0.1"),
                    HasSubstr("(train.example)"), HasSubstr("subjectAltName")));
  EXPECT_THAT(listens.logged, HasSubstr("by the alert 'bad certificate'"));
  const Refusal dials = refusal(other, us);
  EXPECT_THAT(dials.logged, HasSubstr("is for mail.example, 10.9.8.7"));
  EXPECT_THAT(dials.dialled.text(), HasSubstr("'bad certificate'"));
  const Refusal nameless = refusal(us, credentials(authority.issue({.names = ""})));
  EXPECT_THAT(nameless.dialled.text(), HasSubstr("is for no name"));
}

TEST(TlsRefusals, WrongUsage) {
  Authority authority;
  const Given us = credentials(authority.issue());
  const Refusal dials = refusal(credentials(authority.issue({.usage = "serverAuth"})), us);
  EXPECT_THAT(dials.logged, HasSubstr("needs serverAuth and clientAuth"));
}

TEST(TlsRefusals, PlainTextAgainstTls) {
  Authority authority;
  const Given given = credentials(authority.issue());
  const Refusal plain = refusal(nullptr, given);
  EXPECT_THAT(plain.dialled.text(), HasSubstr(tls::kPeerSpeaksTls));
  EXPECT_THAT(plain.logged, HasSubstr(tls::kPeerIsPlain));
  const Refusal encrypted = refusal(given, nullptr);
  EXPECT_THAT(encrypted.dialled.text(), HasSubstr(tls::kPeerIsPlain));
  EXPECT_THAT(encrypted.logged, HasSubstr(tls::kPeerSpeaksTls));
}

// One certificate for all machines.
TEST(Tls, SharedDnsNameStandsForAddresses) {
  Authority authority;
  const auto loop = make_loop();
  const Given given = credentials(authority.issue({.names = "DNS:a.train.example"}));
  for (const char* const other :
       {"DNS:A.Train.Example", "DNS:*.train.example,DNS:a.train.example"}) {
    Lobby lobby(loop, "", with(credentials(authority.issue({.names = other}))));
    End a(loop, dial(loop, lobby.address(), patience(), with(given)));
    End b(loop, lobby.take());
    a.send("ping");
    EXPECT_EQ(b.take(4), "ping");
  }
}

// --- Handshakes that do not end ---

TEST(TlsHandshake, CutIsNamed) {
  Authority authority;
  const Settings settings = with(credentials(authority.issue()));
  const Log log;
  const auto loop = make_loop();
  Lobby lobby(loop, "127.0.0.1", settings);
  for (const std::size_t bytes : {std::size_t{1}, kHalfHello.size()}) {
    const Descriptor stranger = raw_connect(lobby.port());
    ::send(stranger.get(), kHalfHello.data(), bytes, MSG_NOSIGNAL);
    ::shutdown(stranger.get(), SHUT_WR);
    read_all(stranger);
  }
  EXPECT_THAT(log.text(), HasSubstr("it closed the connection in the TLS handshake"));

  const Descriptor door = reserved_port();
  ASSERT_EQ(::listen(door.get(), 1), 0);
  std::thread peer([&] {
    const Descriptor socket(::accept(door.get(), nullptr, nullptr));
    std::array<char, 64 << 10> hello{};
    EXPECT_GT(::recv(socket.get(), hello.data(), hello.size(), 0), 0);
  });
  const Error error = error_of_dial(loop, "127.0.0.1:" + std::to_string(local_end(door).port()),
                                    settings, milliseconds(1'000));
  peer.join();
  EXPECT_EQ(error.blame(), Blame::PeerLost);
  EXPECT_THAT(error.text(), HasSubstr("it closed the connection in the TLS handshake"));
}

TEST(TlsHandshake, HasATimeLimit) {
  Authority authority;
  Settings settings = with(credentials(authority.issue()));
  settings.greeting = settings.attempt = milliseconds(30);
  const Log log;
  const auto loop = make_loop();
  Lobby lobby(loop, "127.0.0.1", settings);
  const Descriptor silent = raw_connect(lobby.port());
  const Descriptor slow = raw_connect(lobby.port());
  ASSERT_EQ(::send(slow.get(), kHalfHello.data(), kHalfHello.size(), 0),
            static_cast<ssize_t>(kHalfHello.size()));
  EXPECT_EQ(read_all(silent), "");
  EXPECT_EQ(read_all(slow), "");
  for (const Descriptor* const stranger : {&silent, &slow}) {
    EXPECT_THAT(log.text(),
                HasSubstr("W tcp: refused a connection from " + local_end(*stranger).text() +
                          ": the TLS handshake took longer than 30 ms"));
  }

  const Descriptor door = reserved_port();  // whose queue takes the connection in, and nobody else
  ASSERT_EQ(::listen(door.get(), 1), 0);
  const Error error = error_of_dial(loop, "127.0.0.1:" + std::to_string(local_end(door).port()),
                                    settings, milliseconds(500));
  EXPECT_EQ(error.blame(), Blame::Timeout);
  EXPECT_THAT(error.text(), HasSubstr("the TLS handshake took longer than 30 ms"));
}

TEST(TlsHandshake, ManyHalfOpenOnesKeepNobodyOut) {
  constexpr std::size_t kMany = 1'000;
  if (!may_have_descriptors(2 * kMany + 200)) GTEST_SKIP() << "too few descriptors";
  Authority authority;
  const Settings settings = with(credentials(authority.issue()));
  const Log log;
  const auto loop = make_loop();
  std::vector<Descriptor> strangers;
  {
    Lobby lobby(loop, "127.0.0.1", settings);
    for (std::size_t i = 0; i < kMany; ++i) {
      strangers.push_back(raw_connect(lobby.port()));
      if (i % 2 == 0) continue;
      ::send(strangers.back().get(), kHalfHello.data(), kHalfHello.size(), MSG_NOSIGNAL);
    }
    End a(loop, dial(loop, lobby.address(), patience(), settings));
    End b(loop, lobby.take());
    a.send("ping");
    EXPECT_EQ(b.take(4), "ping");
    EXPECT_EQ(lobby.waiting(), 0u);
  }
  for (const Descriptor& stranger : strangers) EXPECT_EQ(read_all(stranger), "");
}

// --- Files ---

std::string refused_files(const TlsFiles& files, const tls::Limits& limits = {}) {
  try {
    credentials(files, limits);
  } catch (const Error& error) {
    EXPECT_EQ(error.blame(), Blame::Caller);
    return error.text();
  }
  return "accepted";
}

TEST(TlsFiles, FaultsAreNamed) {
  Authority authority;
  const TlsFiles right = authority.issue();
  const TlsFiles other = authority.issue();
  EXPECT_EQ(refused_files(right), "accepted");
  EXPECT_THAT(refused_files({"/nowhere.pem", right.key, right.authorities}),
              HasSubstr("WEFT_TLS_CERT ('/nowhere.pem') cannot be used: it cannot be read"));
  EXPECT_THAT(refused_files({right.certificate, "/nowhere.key", right.authorities}),
              HasSubstr("WEFT_TLS_KEY ('/nowhere.key') cannot be used: it cannot be read"));
  EXPECT_THAT(refused_files({right.certificate, right.key, "/nowhere.pem"}),
              HasSubstr("WEFT_TLS_CA ('/nowhere.pem') cannot be used"));
  EXPECT_THAT(refused_files({right.certificate, other.key, right.authorities}),
              AllOf(HasSubstr("WEFT_TLS_KEY"), HasSubstr("key values mismatch")));
  EXPECT_THAT(refused_files({right.key, right.key, right.authorities}),
              HasSubstr("it is a file of PEM certificates"));
  EXPECT_THAT(refused_files({right.certificate, right.key, right.key}), HasSubstr("WEFT_TLS_CA"));
  EXPECT_THAT(refused_files(right, {.time = std::time(nullptr) + 200'000}),
              HasSubstr("has expired: issue a new one"));
  EXPECT_THAT(refused_files(right, {.time = std::time(nullptr) - 200'000}),
              HasSubstr("is not valid yet"));
}

}  // namespace
}  // namespace weft::transport::tcp
