// SPDX-License-Identifier: Apache-2.0
// Listeners, and strangers that connect to them.
#include <atomic>
#include <future>

#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/resource.h>
#include <unistd.h>

#include <weft/base/log.h>
#include <weft/tests/harness/few_descriptors.h>
#include <weft/tests/transport/tcp/streams.h>
#include <weft/transport/tcp/greeting.h>

namespace weft::transport::tcp {
namespace {

using std::chrono::milliseconds;
using testing::HasSubstr;

// Blocks until the listener closes the socket; true if it sent no more than its own greeting.
bool put_out(const Descriptor& stranger) {
  char answer[Greeting::kBytes + 1];
  const auto got = ::recv(stranger.get(), answer, sizeof answer, MSG_WAITALL);
  return got <= static_cast<ssize_t>(Greeting::kBytes);
}

void expect_welcome(const std::shared_ptr<EventLoop>& loop, Lobby& lobby) {
  End a(loop, dial(loop, lobby.address()));
  End b(loop, lobby.take());
  a.send("ping");
  EXPECT_EQ(b.take(4), "ping");
  EXPECT_EQ(lobby.waiting(), 0u) << "a stranger was accepted";
}

TEST(TcpListener, AddressNamesItsHostAndIdentity) {
  const auto loop = make_loop();
  const Lobby lobby(loop);
  const Lobby other(loop);
  const Address address = Address::parse(lobby.address());
  EXPECT_EQ(address.hosts.front().name, "127.0.0.1");
  EXPECT_EQ(address.identity.machine, this_machine());
  EXPECT_NE(address.identity, Address::parse(other.address()).identity);
}

TEST(TcpListener, ListensOnTheNamedInterface) {
  const auto loop = make_loop();
  for (const std::string interface_address : {"lo", "127.0.0.1", "localhost"}) {
    Lobby lobby(loop, interface_address);
    EXPECT_THAT(lobby.address(), HasSubstr("127.0.0.1:")) << interface_address;
    expect_welcome(loop, lobby);
  }
}

TEST(TcpListener, ForeignAddressIsACallerError) {
  const auto loop = make_loop();
  try {
    const Lobby lobby(loop, "203.0.113.77");
    FAIL() << "listens at " << lobby.address();
  } catch (const Error& error) {
    EXPECT_EQ(error.blame(), Blame::Caller) << error.what();
    EXPECT_THAT(error.text(), HasSubstr("203.0.113.77"));
  }
}

TEST(TcpListener, QueuesEarlyConnections) {
  const auto loop = make_loop();
  Lobby lobby(loop);
  std::vector<std::unique_ptr<End>> ends;
  for (int i = 0; i < 10; ++i) {
    ends.push_back(std::make_unique<End>(loop, dial(loop, lobby.address())));
    ends.back()->send(std::string(1, static_cast<char>('a' + i)));
  }
  std::string heard;
  for (int i = 0; i < 10; ++i) {
    End accepted(loop, lobby.take());
    heard += accepted.take(1);
  }
  std::sort(heard.begin(), heard.end());
  EXPECT_EQ(heard, "abcdefghij");
}

TEST(TcpListener, StrangersAreNotAccepted) {
  const auto loop = make_loop();
  Lobby lobby(loop);
  { const Descriptor scanner = raw_connect(lobby.port()); }
  const std::string random = pattern(1 << 16, 5);
  const auto half = Greeting::encode({});
  const std::string known(reinterpret_cast<const char*>(half.data()), 8);
  for (const std::string& bytes :
       {std::string("GET / HTTP/1.1\r\nHost: weft\r\n\r\n"), std::string("\0", 1), random,
        known + random, known + std::string("\1\0\0\0", 4)}) {
    const Descriptor stranger = raw_connect(lobby.port());
    ::send(stranger.get(), bytes.data(), bytes.size(), MSG_NOSIGNAL | MSG_DONTWAIT);
    EXPECT_TRUE(put_out(stranger)) << bytes.substr(0, 40);
  }
  expect_welcome(loop, lobby);
}

TEST(TcpListener, HalfAGreetingIsNotAccepted) {
  const auto loop = make_loop();
  Lobby lobby(loop);
  const auto greeting = Greeting::encode(Address::parse(lobby.address()).identity);
  for (std::size_t bytes = 0; bytes < Greeting::kBytes; ++bytes) {
    const Descriptor stranger = raw_connect(lobby.port());
    ASSERT_EQ(::send(stranger.get(), greeting.data(), bytes, 0), static_cast<ssize_t>(bytes));
    ::shutdown(stranger.get(), SHUT_WR);
    EXPECT_TRUE(put_out(stranger)) << bytes;
  }
  expect_welcome(loop, lobby);
}

TEST(TcpListener, SilentStrangersAreDropped) {
  const auto loop = make_loop();
  Settings settings;
  settings.greeting = milliseconds(20);
  Lobby lobby(loop, "", settings);
  const Descriptor silent = raw_connect(lobby.port());
  const Descriptor slow = raw_connect(lobby.port());
  ASSERT_EQ(::send(slow.get(), "weft", 4, 0), 4);
  EXPECT_TRUE(put_out(silent));
  EXPECT_TRUE(put_out(slow));
  Lobby patient(loop);
  expect_welcome(loop, patient);
}

TEST(TcpListener, GreetingMayComeInPieces) {
  const auto loop = make_loop();
  Lobby lobby(loop);
  const auto greeting = Greeting::encode({});
  const Descriptor peer = raw_connect(lobby.port());
  for (const std::byte& byte : greeting) ASSERT_EQ(::send(peer.get(), &byte, 1, 0), 1);
  ASSERT_EQ(::send(peer.get(), "hello", 5, 0), 5);
  End accepted(loop, lobby.take());
  EXPECT_EQ(accepted.take(5), "hello");
  std::byte answer[Greeting::kBytes];
  EXPECT_EQ(::recv(peer.get(), answer, sizeof answer, MSG_WAITALL),
            static_cast<ssize_t>(sizeof answer));
}

TEST(TcpListener, DestroyedListenerRefuses) {
  const auto loop = make_loop();
  auto lobby = std::make_unique<Lobby>(loop);
  const std::string address = lobby->address();
  End a(loop, dial(loop, address));
  End b(loop, lobby->take());
  lobby.reset();
  End late(loop, dial(loop, address, Deadline::in(milliseconds(50))));
  EXPECT_EQ(late.wait_end().blame(), Blame::PeerLost);
  a.send("goes on");
  EXPECT_EQ(b.take(7), "goes on");
}

TEST(TcpListener, UngreetedSocketsEndWithIt) {
  const auto loop = make_loop();
  auto lobby = std::make_unique<Lobby>(loop);
  const Descriptor waiting = raw_connect(lobby->port());
  lobby.reset();
  EXPECT_TRUE(put_out(waiting));
}

TEST(TcpListener, MayEndInsideItsOwnHandler) {
  const auto loop = make_loop();
  std::unique_ptr<TcpListener> listener;
  std::promise<void> ended;
  listener = std::make_unique<TcpListener>(loop, "", Settings{}, [&](std::unique_ptr<ByteStream>) {
    listener.reset();
    ended.set_value();
  });
  const std::string address = listener->address();
  End a(loop, dial(loop, address));
  EXPECT_EQ(ended.get_future().wait_for(std::chrono::seconds(60)), std::future_status::ready);
  a.wait_end();
}

TEST(TcpListener, AcceptsAfterADescriptorShortage) {
  std::atomic<int> warnings{0};
  const log::Capture capture([&](LogLevel level, std::string_view text) {
    if (level == LogLevel::Warn && text.find("cannot accept") != std::string_view::npos) ++warnings;
  });
  const auto loop = make_loop();
  Settings settings;
  settings.shortage = milliseconds(5);
  Lobby lobby(loop, "127.0.0.1", settings);
  const Descriptor client(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  const auto address = numeric_address({"127.0.0.1", lobby.port()});
  // No descriptor number above the present ones is allowed: the listener gets none for an accepted
  // socket.
  rlimit limit{};
  ::getrlimit(RLIMIT_NOFILE, &limit);
  std::vector<Descriptor> filler;
  const rlimit tight{static_cast<rlim_t>(client.get()) + 8, limit.rlim_max};
  ASSERT_EQ(::setrlimit(RLIMIT_NOFILE, &tight), 0);
  for (;;) {
    Descriptor one(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
    if (!one) break;
    filler.push_back(std::move(one));
  }
  ASSERT_EQ(::connect(client.get(), address->get(), address->length), 0);
  const auto greeting = Greeting::encode({});
  ASSERT_EQ(::send(client.get(), greeting.data(), greeting.size(), 0),
            static_cast<ssize_t>(greeting.size()));
  wait_until(
      *loop, [&] { return warnings > 0; }, "the listener warns that it is short of descriptors");
  EXPECT_EQ(lobby.waiting(), 0u);
  ASSERT_EQ(::setrlimit(RLIMIT_NOFILE, &limit), 0);
  filler.clear();
  const auto accepted = lobby.take();
  EXPECT_TRUE(accepted);
  EXPECT_EQ(warnings, 1) << "the warning must be logged once";
}

TEST(TcpListener, SilentStrangersMakeRoomForAPeer) {
  std::atomic<int> warnings{0};
  const log::Capture capture([&](LogLevel level, std::string_view text) {
    if (level == LogLevel::Warn && text.find("cannot accept") != std::string_view::npos) ++warnings;
  });
  const auto loop = make_loop();
  Settings settings;
  settings.greeting = std::chrono::minutes(10);  // the timer must not be the reason
  Lobby lobby(loop, "127.0.0.1", settings);
  std::vector<Descriptor> strangers;
  for (int i = 0; i < 50; ++i) strangers.push_back(raw_connect(lobby.port()));
  End early(loop, dial(loop, lobby.address()));  // it comes behind them
  End first(loop, lobby.take());
  const harness::FewDescriptors few(1);  // for the dialling side
  End a(loop, dial(loop, lobby.address()));
  End b(loop, lobby.take());
  a.send("ping");
  EXPECT_EQ(b.take(4), "ping");
  EXPECT_EQ(warnings, 0) << "the listener lacks descriptors, although strangers have them";
}

TEST(TcpListener, WarnsOfAddressesItCannotListenAt) {
  std::vector<std::string> warnings;
  const log::Capture capture([&](LogLevel level, std::string_view text) {
    if (level == LogLevel::Warn) warnings.emplace_back(text);
  });
  const auto loop = make_loop();
  rlimit limit{};
  ::getrlimit(RLIMIT_NOFILE, &limit);
  // One descriptor is left; the first address takes it.
  const int next = Descriptor(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0)).get();
  const rlimit tight{static_cast<rlim_t>(next) + 1, limit.rlim_max};
  ASSERT_EQ(::setrlimit(RLIMIT_NOFILE, &tight), 0);
  const auto lobby = std::make_unique<Lobby>(loop);
  ASSERT_EQ(::setrlimit(RLIMIT_NOFILE, &limit), 0);
  EXPECT_EQ(Address::parse(lobby->address()).hosts.size(), 1u);
  EXPECT_THAT(warnings,
              testing::ElementsAre(HasSubstr("does not listen at [::1], only at others: ")));
}

}  // namespace
}  // namespace weft::transport::tcp
