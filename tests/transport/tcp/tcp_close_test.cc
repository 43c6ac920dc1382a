// SPDX-License-Identifier: Apache-2.0
// After close() a connection is kept until its peer has ended its side, so that sent bytes are not
// lost. A peer that does not end its side is given up; the owner learned of the end long before.
#include <array>
#include <atomic>
#include <future>
#include <thread>

#include <gmock/gmock.h>
#include <sys/socket.h>
#include <unistd.h>

#include <weft/base/log.h>
#include <weft/tests/harness/few_descriptors.h>
#include <weft/tests/harness/leftovers.h>
#include <weft/tests/harness/mail.h>
#include <weft/tests/harness/memory_bootstrap.h>
#include <weft/tests/transport/tcp/cable.h>
#include <weft/transport/mesh/table.h>
#include <weft/transport/tcp/tcp.h>

namespace weft::transport::tcp {
namespace {

using harness::bytes_of;
using harness::expect_good;
using harness::Mailbox;
using std::chrono::milliseconds;
using std::chrono::seconds;

// All timers are disabled: each test enables the one that it is about.
Settings endless() {
  Settings settings;
  settings.idle = seconds(1000);
  settings.silence = seconds(1000);
  settings.linger = seconds(1000);
  return settings;
}

// A closed connection that remains keeps its socket.
class TcpClose : public testing::Test {
 protected:
  void connection_over(Descriptor socket, const Settings& settings) {
    loop = make_loop();
    connection =
        connect_over(std::make_unique<TcpStream>(loop, std::move(socket), "the other", settings),
                     Capabilities(), "tcp", loop, settings.linger);
    expect_good(connection->send(bytes_of("what comes first"), {}, nullptr, {}));
  }
  void lane_to(const std::string& address, const Settings& settings) {
    loop = make_loop();
    Tcp tcp(settings);
    Connector& connector = *tcp.connector();
    connection = connector.connect(address, {loop, patience()});
    expect_good(connection->send(bytes_of("what comes first"), {}, nullptr, {}));
  }
  // Closes the connection; afterwards nothing of it may remain.
  void close() {
    const auto descriptors = harness::open_descriptors();
    Mailbox mail(*connection, loop);
    connection->close(Error(Blame::Cancelled, "enough"));
    EXPECT_EQ(mail.wait_closed().blame(), Blame::Cancelled);
    // Sooner than the default linger time.
    const Deadline before = Deadline::in(kLinger - seconds(10));
    EXPECT_TRUE(loop->drive([&] { return harness::open_descriptors() < descriptors; }, before))
        << "the socket is still open";
  }

  std::shared_ptr<EventLoop>
      loop;  // its thread is in the network that the test is in when it is made
  std::shared_ptr<Connection> connection;
};

TEST_F(TcpClose, ForgetfulPeerLeavesNothing) {
  auto [one, other] = tcp_pair();
  connection_over(std::move(one), endless());
  if (!forget(std::move(other))) GTEST_SKIP() << kMayNotForget;
  close();
}

TEST_F(TcpClose, SilentPeerIsGivenUpAfterTheLinger) {
  auto [one, silent] = tcp_pair();
  Settings settings = endless();
  settings.linger = milliseconds(300);
  connection_over(std::move(one), settings);
  close();
}

// A stranger is not waited for, but can read why it was turned away.
TEST_F(TcpClose, PeerThatIsTurnedAwayIsNotWaitedFor) {
  auto [one, silent] = tcp_pair();
  connection_over(std::move(one), endless());
  const auto descriptors = harness::open_descriptors();
  connection->turn_away(Error(Blame::PeerLost, "nobody knows it"));
  EXPECT_TRUE(loop->drive([&] { return harness::open_descriptors() < descriptors; },
                          Deadline::in(kLinger - seconds(10))))
      << "the socket is still open";
  std::array<char, 1024> bytes{};
  std::string text;
  for (ssize_t got = 0; (got = ::read(silent.get(), bytes.data(), bytes.size())) > 0;)
    text.append(bytes.data(), static_cast<std::size_t>(got));
  EXPECT_THAT(text, testing::EndsWith("nobody knows it"));
}

// Rank 0 of two joins, then come sockets that greet its listener and say nothing, then rank 1.
class TcpStrangers : public testing::Test {
 protected:
  std::future<std::shared_ptr<Communicator>> joined(int rank) {
    transport::JoinOptions options;
    options.rank = rank;
    options.size = 2;
    options.group_name = "test";
    options.store = store_;
    options.timeout = seconds(60);
    options.loop = loops_[static_cast<std::size_t>(rank)];
    return std::async(std::launch::async,
                      [options] { return std::make_shared<Tcp>()->join(options); });
  }
  int port_of_rank_0() {
    const auto address = mesh::decode_address(store_->get("mesh/address/0", patience())).value();
    return Address::parse(address).hosts.front().port;
  }
  static void greet(const Descriptor& stranger, int port) {
    const auto address = numeric_address({"127.0.0.1", port});
    ASSERT_EQ(::connect(stranger.get(), address->get(), address->length), 0);
    const auto greeting = Greeting::encode({});
    ASSERT_EQ(::send(stranger.get(), greeting.data(), greeting.size(), 0),
              static_cast<ssize_t>(greeting.size()));
  }
  static void hear_greeting(const Descriptor& stranger) {
    Greeting::Bytes answer;
    ASSERT_EQ(::recv(stranger.get(), answer.data(), answer.size(), MSG_WAITALL),
              static_cast<ssize_t>(answer.size()));
  }

  std::atomic<bool> is_short_{false};
  const log::Capture capture_{[this](LogLevel, std::string_view text) {
    if (text.find("cannot accept connections") != std::string_view::npos) is_short_ = true;
  }};
  const std::shared_ptr<harness::MemoryBootstrap> store_ =
      std::make_shared<harness::MemoryBootstrap>();
  const std::array<std::shared_ptr<EventLoop>, 2> loops_{make_loop("0"), make_loop("1")};
  std::future<std::shared_ptr<Communicator>> first_ = joined(0);
};

TEST_F(TcpStrangers, SilentOnesAreFew) {
  constexpr int kStrangers = 400, kMost = 300;
  const auto before = harness::open_descriptors();
  const int port = port_of_rank_0();
  std::vector<Descriptor> strangers;
  for (int i = 0; i < kStrangers; ++i) {
    strangers.emplace_back(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
    greet(strangers.back(), port);
    hear_greeting(strangers.back());
  }
  const auto kept = [&] { return harness::open_descriptors() - before - kStrangers; };
  // Sooner than the time limit for a hello.
  for (const Deadline soon = Deadline::in(seconds(5)); kept() > kMost && !soon.passed();)
    std::this_thread::sleep_for(milliseconds(20));
  EXPECT_LE(kept(), kMost);
  auto second = joined(1);
  EXPECT_TRUE(first_.get());
  EXPECT_TRUE(second.get());
}

// A shortage of descriptors that is over when the ranks meet.
TEST_F(TcpStrangers, PassedShortageFailsNoGroup) {
  const int port = port_of_rank_0();
  const Descriptor stranger(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  {
    const harness::FewDescriptors few(0);
    greet(stranger, port);
    for (const Deadline limit = Deadline::in(seconds(20)); !is_short_ && !limit.passed();)
      std::this_thread::sleep_for(milliseconds(1));
    ASSERT_TRUE(is_short_) << "the listener has not met the shortage";
  }
  hear_greeting(stranger);
  auto second = joined(1);
  EXPECT_TRUE(first_.get());
  EXPECT_TRUE(second.get());
}

// A child at the other end of the cable that accepts a connection and then does nothing.
std::unique_ptr<Cable> cable_to_a_lane(std::string& why_not) {
  return lay_cable(
      [](int parent) {
        const auto child_loop = make_loop("child");
        Tcp tcp;
        Connector& connector = *tcp.connector();
        std::shared_ptr<Connection> accepted;
        const auto listener = connector.listen(
            {.loop = child_loop, .interface_address = "10.77.7.2", .accepted = [&](auto lane) {
               accepted = std::move(lane);
             }});
        tell_line(parent, listener->address());
        wait_for_byte(parent);
      },
      why_not);
}

TEST_F(TcpClose, CutCableEndsAfterTheSilence) {
  std::string why_not;
  const auto cable = cable_to_a_lane(why_not);
  if (!cable) GTEST_SKIP() << why_not;
  Settings settings = endless();
  settings.silence = milliseconds(400);
  lane_to(cable->heard(), settings);
  cable->cut();
  close();
}

TEST_F(TcpClose, CutCableEndsAfterTheLinger) {
  std::string why_not;
  const auto cable = cable_to_a_lane(why_not);
  if (!cable) GTEST_SKIP() << why_not;
  Settings settings = endless();
  settings.linger = milliseconds(300);
  lane_to(cable->heard(), settings);
  cable->cut();
  close();
}

}  // namespace
}  // namespace weft::transport::tcp
