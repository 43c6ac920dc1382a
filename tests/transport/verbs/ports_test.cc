// SPDX-License-Identifier: Apache-2.0
// Which port and which of its addresses a connection uses, on invented machines.
#include <arpa/inet.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <weft/transport/verbs/ports.h>

namespace weft::transport::verbs {
namespace {

using testing::HasSubstr;

Gid gid(int index, const std::string& text, GidType type, const std::string& interface = "eth0") {
  Gid made;
  made.index = index;
  made.type = type;
  made.interface = interface;
  const bool is_ipv6 = text.find(':') != std::string::npos;
  EXPECT_EQ(::inet_pton(AF_INET6, (is_ipv6 ? text : "::ffff:" + text).c_str(), made.bytes.data()),
            1);
  return made;
}

PortReport roce(const std::string& device, std::vector<Gid> gids) {
  PortReport port;
  port.device = device;
  port.active = true;
  port.state = "active";
  port.fabric = Fabric::Roce;
  port.mtu_bytes = 4096;
  port.gids = std::move(gids);
  return port;
}

std::string why_not(const std::vector<PortReport>& ports, const Wishes& wishes = {}) {
  const auto chosen = choose(ports, wishes);
  EXPECT_FALSE(chosen.ok());
  if (chosen.ok()) return {};
  EXPECT_EQ(chosen.error().blame(), Blame::Unsupported);
  return chosen.error().text();
}

TEST(VerbsPorts, PrefersRoceV2WithAnIpv4Address) {
  const std::vector<PortReport> ports{
      roce("mlx5_0", {gid(0, "fe80::1", GidType::RoceV1), gid(1, "fe80::1", GidType::RoceV2),
                      gid(2, "10.1.2.3", GidType::RoceV1), gid(3, "10.1.2.3", GidType::RoceV2),
                      gid(4, "2001:db8::7", GidType::RoceV2)})};
  EXPECT_EQ(choose(ports, {}).value().gid.index, 3);
  EXPECT_EQ(choose(ports, {}).value().gid.text(), "10.1.2.3");
}

TEST(VerbsPorts, PrefersRoutableToLinkLocal) {
  const std::vector<PortReport> ports{
      roce("mlx5_0", {gid(0, "fe80::1", GidType::RoceV2), gid(1, "2001:db8::7", GidType::RoceV2)})};
  EXPECT_EQ(choose(ports, {}).value().gid.index, 1);
}

TEST(VerbsPorts, UsesTheFirstInfiniBandAddress) {
  PortReport port = roce("mlx5_0", {gid(0, "fe80::1", GidType::InfiniBand, ""),
                                    gid(1, "fe80::2", GidType::InfiniBand, "")});
  port.fabric = Fabric::InfiniBand;
  EXPECT_EQ(choose({port}, {}).value().gid.index, 0);
}

TEST(VerbsPorts, GivenInterfaceDecides) {
  const std::vector<PortReport> ports{
      roce("mlx5_0", {gid(0, "10.0.0.1", GidType::RoceV2, "eth0")}),
      roce("mlx5_1", {gid(0, "10.0.0.2", GidType::RoceV2, "eth1"),
                      gid(1, "10.0.1.2", GidType::RoceV2, "eth1.7")})};
  EXPECT_EQ(choose(ports, {}).value().port.device, "mlx5_0");
  EXPECT_EQ(choose(ports, {.interface_address = "eth1"}).value().port.device, "mlx5_1");
  EXPECT_EQ(choose(ports, {.interface_address = "10.0.1.2"}).value().gid.index, 1);
  EXPECT_EQ(choose(ports, {.interface_address = "eth1.7"}).value().gid.index, 1);
  EXPECT_EQ(choose(ports, {.interface_address = "127.0.0.1"}).value().port.device, "mlx5_0")
      << "TCP may use another interface";
}

TEST(VerbsPorts, UsesOnlyTheListedDevices) {
  auto second = roce("mlx5_1", {gid(0, "10.0.0.2", GidType::RoceV2)});
  auto other_port = second;
  other_port.port = 2;
  const std::vector<PortReport> ports{roce("mlx5_0", {gid(0, "10.0.0.1", GidType::RoceV2)}), second,
                                      other_port};
  EXPECT_EQ(choose(ports, {.devices = {"mlx5_1"}}).value().port.name(), "mlx5_1:1");
  EXPECT_EQ(choose(ports, {.devices = {"mlx5_1:2"}}).value().port.name(), "mlx5_1:2");
  EXPECT_THAT(why_not(ports, {.devices = {"mlx5_7"}}), HasSubstr("mlx5_0:1 is not in WEFT_IB_HCA"));
}

TEST(VerbsPorts, NamedGidMustExist) {
  const std::vector<PortReport> ports{
      roce("mlx5_0", {gid(0, "fe80::1", GidType::RoceV1), gid(5, "10.0.0.1", GidType::RoceV2)})};
  EXPECT_EQ(choose(ports, {.gid_index = 0}).value().gid.index, 0);
  EXPECT_THAT(why_not(ports, {.gid_index = 1}), HasSubstr("no GID 1 (WEFT_IB_GID_INDEX)"));
}

TEST(VerbsPorts, SaysWhyEachPortIsUnusable) {
  EXPECT_THAT(why_not({}), HasSubstr("no RDMA device"));
  auto down = roce("mlx5_0", {gid(0, "10.0.0.1", GidType::RoceV2)});
  down.active = false;
  down.state = "down";
  auto foreign = roce("siw0", {gid(0, "10.0.0.1", GidType::RoceV2)});
  foreign.fabric.reset();
  const auto text = why_not({down, foreign, roce("mlx5_1", {})});
  EXPECT_THAT(text, HasSubstr("mlx5_0:1 is down, not active"));
  EXPECT_THAT(text, HasSubstr("siw0:1 is neither InfiniBand nor RoCE"));
  EXPECT_THAT(text, HasSubstr("mlx5_1:1 has no GID"));
}

}  // namespace
}  // namespace weft::transport::verbs
