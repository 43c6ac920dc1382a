// SPDX-License-Identifier: Apache-2.0
// The tcp backend, beyond what the other files check. Its connections pass the claims of
// tests/conformance/connection, which finds it in the registry.
#include <atomic>
#include <memory>
#include <optional>
#include <string>

#include <arpa/inet.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <ifaddrs.h>

#include <weft/tests/transport/tcp/streams.h>
#include <weft/transport/tcp/tcp.h>

namespace weft::transport::tcp {
namespace {

using std::chrono::milliseconds;
using testing::HasSubstr;

Blame blame_of(const std::function<void()>& call) {
  try {
    call();
  } catch (const Error& error) {
    return error.blame();
  }
  ADD_FAILURE() << "no error";
  return Blame::Cancelled;
}

TEST(Tcp, KnowsUnreachableAddresses) {
  Tcp tcp;
  const Connector& connector = *tcp.connector();
  const Identity here{this_machine(), 1};
  const Identity elsewhere{this_machine() + 1, 1};
  const auto why = [&](const std::string& host, const Identity& identity) {
    return connector.why_unreachable(Address{{{host, 4711}}, identity}.text());
  };
  EXPECT_EQ(why("127.0.0.1", here), std::nullopt);
  EXPECT_EQ(why("127.0.0.1", {}), std::nullopt);
  EXPECT_EQ(why("192.0.2.1", elsewhere), std::nullopt);
  EXPECT_EQ(why("node7", elsewhere), std::nullopt);
  EXPECT_THAT(why("127.0.0.1", elsewhere).value_or(""),
              HasSubstr("loopback address of another machine"));
  EXPECT_THAT(why("::1", elsewhere).value_or(""), HasSubstr("loopback address of another machine"));
  EXPECT_THAT(why("fe80::1%nosuchif0", here).value_or(""),
              HasSubstr("an interface that this machine does not have"));
  EXPECT_EQ(
      connector.why_unreachable(Address{{{"127.0.0.1", 1}, {"192.0.2.1", 1}}, elsewhere}.text()),
      std::nullopt)
      << "one reachable address suffices";
  EXPECT_THAT(connector.why_unreachable("no address at all").value_or(""),
              HasSubstr("has no port"));
}

// Two machines may have the same address on bridges of their own.
TEST(Tcp, OwnAddressIsNotAnotherMachines) {
  ifaddrs* all = nullptr;
  ASSERT_EQ(getifaddrs(&all), 0);
  const std::unique_ptr<ifaddrs, decltype(&freeifaddrs)> owned(all, &freeifaddrs);
  std::string own;
  for (const ifaddrs* one = all; one != nullptr && own.empty(); one = one->ifa_next) {
    if (one->ifa_addr == nullptr || one->ifa_addr->sa_family != AF_INET) continue;
    char text[INET_ADDRSTRLEN];
    const auto& address = reinterpret_cast<const sockaddr_in&>(*one->ifa_addr);
    if (ntohl(address.sin_addr.s_addr) >> 24 == IN_LOOPBACKNET) continue;
    own = inet_ntop(AF_INET, &address.sin_addr, text, sizeof text);
  }
  if (own.empty()) GTEST_SKIP() << "this machine has loopback addresses only";
  Tcp tcp;
  const auto why = [&](std::uint32_t machine) {
    return tcp.connector()->why_unreachable(Address{{{own, 4711}}, {machine, 1}}.text());
  };
  EXPECT_EQ(why(this_machine()), std::nullopt);
  EXPECT_THAT(why(this_machine() + 1).value_or(""),
              HasSubstr(own + ":4711 is an address of both this machine and the listener"));
  EXPECT_THAT(why(this_machine() + 1).value_or(""), HasSubstr("WEFT_SOCKET_IFNAME"));
}

TEST(Tcp, WrongArgumentsAreTheCallersErrors) {
  Tcp tcp;
  Connector& connector = *tcp.connector();
  const auto loop = make_loop();
  EXPECT_EQ(blame_of([&] { connector.connect("nonsense", {loop, patience()}); }), Blame::Caller);
  EXPECT_EQ(blame_of([&] {
              connector.connect("127.0.0.1:1", {nullptr, patience()});
            }),
            Blame::Caller);
  EXPECT_EQ(blame_of([&] { connector.listen({loop, "", nullptr}); }), Blame::Caller);
  EXPECT_EQ(blame_of([&] { connector.listen({nullptr, "", [](auto) {}}); }), Blame::Caller);
  EXPECT_EQ(blame_of([&] { connector.listen({loop, "nosuchif0", [](auto) {}}); }), Blame::Caller);
}

TEST(Tcp, FailedConnectionEndsWithTheReason) {
  Tcp tcp;
  const auto loop = make_loop();
  const Descriptor nobody = reserved_port();
  const auto connection =
      tcp.connector()->connect("127.0.0.1:" + std::to_string(local_end(nobody).port()),
                               {loop, Deadline::in(milliseconds(30))});
  const Op op = connection->send(std::as_bytes(std::span("header", 6)), {}, nullptr, {});
  std::atomic<bool> closed{false};
  std::optional<Error> why;
  connection->receive({[](const Arrival&) {},
                       [&](const Error& error) {
                         why = error;
                         closed = true;
                       }});
  wait_until(
      *loop, [&] { return closed.load(); }, "the connection ends");
  EXPECT_EQ(why->blame(), Blame::PeerLost);
  EXPECT_THAT(why->text(), HasSubstr("Connection refused"));
  wait_until(
      *loop, [&] { return op.ended(); }, "the send ends");
  ASSERT_TRUE(op.error());
  EXPECT_THAT(op.error()->text(), HasSubstr("Connection refused"));
}

}  // namespace
}  // namespace weft::transport::tcp
