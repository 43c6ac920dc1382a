// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>

#include <weft/base/error.h>
#include <weft/engine/rendezvous/url.h>
#include <weft/engine/store/address.h>

namespace weft::group {
namespace {

TEST(Url, SplitsHostPortPathAndQuery) {
  const Url tcp = Url::parse("tcp://host.example:29500?rank=1&world_size=4");
  EXPECT_EQ(tcp.scheme, "tcp");
  EXPECT_EQ(tcp.host, "host.example");
  EXPECT_EQ(tcp.port, 29500);
  EXPECT_EQ(tcp.number("rank"), 1);
  EXPECT_EQ(tcp.number("world_size"), 4);
  const Url six = Url::parse("tcp://[ff02::7%eth0]:80");
  EXPECT_EQ(six.host, "ff02::7%eth0");
  EXPECT_EQ(six.port, 80);
  const Url file = Url::parse("file:///tmp/a/b?world_size=2");
  EXPECT_EQ(file.host, "");
  EXPECT_EQ(file.path, "/tmp/a/b");
  EXPECT_EQ(file.number("world_size"), 2);
  EXPECT_FALSE(file.number("rank"));
  EXPECT_FALSE(Url::parse("env://").port);
}

TEST(Url, RefusesInvalidText) {
  for (const char* text :
       {"", "host:80", "http://host", "tcp://host:x", "tcp://host:0", "tcp://host:65536",
        "tcp://[::1", "tcp://[::1]x", "env://?rank", "env://?color=3"}) {
    try {
      Url::parse(text);
      ADD_FAILURE() << "'" << text << "' was accepted";
    } catch (const Error& error) {
      EXPECT_EQ(error.blame(), Blame::Caller) << text;
    }
  }
  EXPECT_THROW(static_cast<void>(Url::parse("env://?rank=one").number("rank")), Error);
  EXPECT_THROW(static_cast<void>(Url::parse("env://?rank=-1").number("rank")), Error);
  EXPECT_THROW(to_number("RANK", "1 "), Error);
  EXPECT_THROW(to_number("RANK", ""), Error);
  EXPECT_EQ(to_number("RANK", "12"), 12);
}

TEST(Address, KnowsMulticastAddresses) {
  for (const char* text : {"224.0.0.1", "239.255.255.255", "ff02::1", "ff15::7%eth0"})
    EXPECT_TRUE(is_multicast(text)) << text;
  for (const char* text :
       {"127.0.0.1", "10.0.0.1", "240.0.0.1", "::1", "fe80::1%lo", "localhost", "", "224.0.0"}) {
    EXPECT_FALSE(is_multicast(text)) << text;
  }
}

TEST(Address, LoopbackIsForLoopbackJobsOnly) {
  for (const char* loopback : {"127.0.0.1", "127.0.1.1", "::1"}) {
    EXPECT_EQ(address_for_others("node1", loopback, "10.0.0.7"), "10.0.0.7") << loopback;
    EXPECT_EQ(address_for_others("node1", loopback, ""), loopback) << "there is no other address";
    for (const char* host : {"localhost", "localhost.localdomain", "a.localhost", "ip6-localhost",
                             "127.0.0.1", "127.0.1.1", "::1", "::ffff:127.0.0.1"}) {
      EXPECT_EQ(address_for_others(host, loopback, "10.0.0.7"), loopback) << host;
    }
  }
  EXPECT_EQ(address_for_others("node1", "10.0.0.6", "10.0.0.7"), "10.0.0.6")
      << "the address of the route";
  EXPECT_EQ(address_for_others("node1", "", "10.0.0.7"), "") << "no route";
}

TEST(Address, OutwardIsThisMachinesNotLoopback) {
  const std::string outward = outward_address();
  if (outward.empty()) GTEST_SKIP() << "this machine has no network";
  EXPECT_TRUE(is_this_machine(outward)) << outward;
  EXPECT_EQ(address_for_others("node1", outward, "10.0.0.7"), outward) << "not a loopback address";
}

TEST(Address, InterfaceIsFoundByName) {
  EXPECT_EQ(address_of_interface("lo", AF_INET), "127.0.0.1");
  try {
    address_of_interface("no-such-if");
    FAIL();
  } catch (const Error& error) {
    EXPECT_EQ(error.blame(), Blame::Caller);
    EXPECT_NE(error.text().find("there are: "), std::string::npos) << error.text();
    EXPECT_NE(error.text().find("lo"), std::string::npos) << error.text();
  }
}

}  // namespace
}  // namespace weft::group
