// SPDX-License-Identifier: Apache-2.0
#include <random>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <netinet/in.h>

#include <weft/transport/tcp/address.h>

namespace weft::transport::tcp {
namespace {

using testing::HasSubstr;

TEST(TcpAddress, ReadsHostsOfEveryKind) {
  const Address address =
      Address::parse("192.0.2.1:4711,[2001:db8::1]:4712,[fe80::1%eth0]:1,node-7.example:65535");
  EXPECT_THAT(address.hosts,
              testing::ElementsAre(Host{"192.0.2.1", 4711}, Host{"2001:db8::1", 4712},
                                   Host{"fe80::1%eth0", 1}, Host{"node-7.example", 65535}));
  EXPECT_FALSE(address.identity.given());
}

TEST(TcpAddress, RoundTripsThroughText) {
  for (const std::string text :
       {"192.0.2.1:4711", "[2001:db8::1]:4711,127.0.0.1:1", "[fe80::1%eth0]:4711",
        "node7:80#5f0c2a91.00c8d5e1f37b4a69", "127.0.0.1:4711#00000001.ffffffffffffffff"}) {
    EXPECT_EQ(Address::parse(text).text(), text);
  }
  const auto address = Address::parse("a:1#5f0c2a91.00c8d5e1f37b4a69");
  EXPECT_EQ(address.identity, (Identity{0x5f0c2a91, 0x00c8d5e1f37b4a69}));
}

TEST(TcpAddress, SaysWhatIsWrongWithMalformedText) {
  std::string too_long(5000, 'a');
  too_long += ":1";
  const std::pair<std::string, std::string> wrong[] = {
      {"", "a host is missing"},
      {"127.0.0.1:1,", "a host is missing"},
      {",127.0.0.1:1", "a host is missing"},
      {"127.0.0.1", "has no port"},
      {"127.0.0.1:", "the port ''"},
      {"127.0.0.1:0", "the port '0'"},
      {"127.0.0.1:65536", "the port '65536'"},
      {"127.0.0.1:-1", "the port '-1'"},
      {"127.0.0.1:+1", "the port '+1'"},
      {"127.0.0.1: 1", "the port ' 1'"},
      {"127.0.0.1:1x", "the port '1x'"},
      {"127.0.0.1:99999999999999999999", "which is not a number from 1 to 65535"},
      {"127.0.0.256:1", "'127.0.0.256' is not an IPv4 address"},
      {"127.0.0:1", "'127.0.0' is not an IPv4 address"},
      {":1", "has no host"},
      {"[::1:1", "opens a bracket and does not close it"},
      {"[::1]", "has no port"},
      {"[::1]1", "has no port"},
      {"[::1]:", "the port ''"},
      {"::1]:1", "write an IPv6 address in brackets"},
      {"1]:1", "closes a bracket that is not open"},
      {"::1:1", "write an IPv6 address in brackets"},
      {"[]:1", "no IPv6 address between the brackets"},
      {"[127.0.0.1]:1", "no IPv6 address between the brackets"},
      {"[fe80::1%]:1", "no interface after the %"},
      {"[fe80::1%an-interface-of-a-long-name]:1", "no interface after the %"},
      {"no de:1", "neither an address nor a host's name"},
      {"node\n:1", "neither an address nor a host's name"},
      {"127.0.0.1:1#", "does not name a listener"},
      {"127.0.0.1:1#12", "does not name a listener"},
      {"127.0.0.1:1#5f0c2a91.00c8d5e1f37b4a6", "does not name a listener"},
      {"127.0.0.1:1#5f0c2a91.00c8d5e1f37b4a6g", "does not name a listener"},
      {too_long, "longer than 4096"},
  };
  for (const auto& [text, complaint] : wrong) {
    try {
      Address::parse(text);
      ADD_FAILURE() << "taken for an address: " << text;
    } catch (const Error& error) {
      EXPECT_EQ(error.blame(), Blame::Caller);
      EXPECT_THAT(error.text(), HasSubstr(complaint)) << text;
      EXPECT_THAT(error.text(), HasSubstr("192.0.2.1:4711"))
          << "the error does not show a valid address";
    }
  }
}

// Addresses come from peers: any change to the text must give a valid address or a refusal.
TEST(TcpAddress, RandomTextIsRefusedOrAnAddress) {
  const std::string good = "192.0.2.1:4711,[fe80::1%eth0]:1,node7:65535#5f0c2a91.00c8d5e1f37b4a69";
  std::mt19937 random(7);
  const auto upto = [&](std::size_t limit) {
    return std::uniform_int_distribution<std::size_t>(0, limit)(random);
  };
  std::size_t accepted = 0;
  for (int i = 0; i < 20'000; ++i) {
    std::string text = good;
    for (std::size_t change = 0; change <= upto(3); ++change) {
      const std::size_t at = upto(text.size() - 1);
      switch (upto(3)) {
        case 0: text[at] = static_cast<char>(upto(255)); break;
        case 1: text.erase(at, 1 + upto(4)); break;
        case 2: text.insert(at, 1, good[upto(good.size() - 1)]); break;
        default: text.resize(at + 1);
      }
      if (text.empty()) text = "x";
    }
    try {
      const Address address = Address::parse(text);
      ++accepted;
      EXPECT_EQ(Address::parse(address.text()).text(), address.text()) << text;
      for (const Host& host : address.hosts)
        EXPECT_TRUE(host.port > 0 && host.port < 65536) << text;
    } catch (const Error& error) {
      EXPECT_EQ(error.blame(), Blame::Caller) << text;
    }
  }
  EXPECT_GT(accepted, 0u);
}

TEST(TcpAddress, NumericAddressesNeedNoResolving) {
  EXPECT_EQ(numeric_address({"127.0.0.1", 7})->text(), "127.0.0.1:7");
  EXPECT_EQ(numeric_address({"::1", 7})->text(), "[::1]:7");
  EXPECT_EQ(numeric_address({"fe80::1%lo", 7})->text(), "[fe80::1%lo]:7");
  EXPECT_EQ(numeric_address({"localhost", 7}), std::nullopt);
  EXPECT_EQ(numeric_address({"fe80::1%nosuchif0", 7}), std::nullopt);
}

TEST(TcpAddress, ResolvesNames) {
  const auto found = resolve({"localhost", 7});
  ASSERT_TRUE(found) << found.error().what();
  for (const auto& address : found.value()) {
    EXPECT_TRUE(address.is_loopback()) << address.text();
    EXPECT_EQ(address.port(), 7);
  }
  const auto none = resolve({"no-such-host.invalid", 7});
  ASSERT_FALSE(none);
  EXPECT_THAT(none.error().text(), HasSubstr("'no-such-host.invalid' cannot be resolved"));
}

TEST(TcpAddress, KnowsLoopbackAndLinkLocalOnes) {
  EXPECT_TRUE(numeric_address({"127.1.2.3", 1})->is_loopback());
  EXPECT_TRUE(numeric_address({"::1", 1})->is_loopback());
  EXPECT_FALSE(numeric_address({"192.0.2.1", 1})->is_loopback());
  EXPECT_TRUE(numeric_address({"fe80::1%lo", 1})->is_link_local());
  EXPECT_FALSE(numeric_address({"fd00::1", 1})->is_link_local());
}

TEST(TcpAddress, ListensOnTheLoopbackUnlessTold) {
  const auto addresses = local_addresses("");
  ASSERT_EQ(addresses.size(), 2u);
  EXPECT_EQ(addresses[0].text(), "127.0.0.1:0");
  EXPECT_EQ(addresses[1].text(), "[::1]:0");
}

TEST(TcpAddress, FindsAnInterfaceByNameAddressOrHost) {
  EXPECT_EQ(local_addresses("lo").front().text(), "127.0.0.1:0");
  ASSERT_EQ(local_addresses("::1").size(), 1u);
  EXPECT_EQ(local_addresses("::1").front().text(), "[::1]:0");
  EXPECT_TRUE(local_addresses("localhost").front().is_loopback());
}

TEST(TcpAddress, AnyAddressMeansAllInterfaces) {
  const auto addresses = local_addresses("0.0.0.0");
  ASSERT_FALSE(addresses.empty());
  for (const auto& address : addresses) {
    EXPECT_EQ(address.family(), AF_INET);
    EXPECT_NE(address.text(), "0.0.0.0:0");
  }
}

TEST(TcpAddress, UnknownInterfaceErrorListsAll) {
  try {
    local_addresses("nosuchif0");
    FAIL() << "no error";
  } catch (const Error& error) {
    EXPECT_EQ(error.blame(), Blame::Caller);
    EXPECT_THAT(error.text(), HasSubstr("'nosuchif0'"));
    EXPECT_THAT(error.text(), HasSubstr("lo"));
  }
}

TEST(TcpAddress, MachineIdentityIsStable) {
  EXPECT_NE(this_machine(), 0u);
  EXPECT_EQ(this_machine(), this_machine());
}

}  // namespace
}  // namespace weft::transport::tcp
