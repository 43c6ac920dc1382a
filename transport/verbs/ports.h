// The ports of this machine's RDMA devices as plain data, and which of them a lane uses. Pure
// functions: what is said here comes from device.h, and tests make it up.
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include <weft/base/config.h>
#include <weft/base/result.h>

namespace weft::transport::verbs {

enum class Fabric : std::uint8_t { InfiniBand = 1, Roce = 2 };
enum class GidType : std::uint8_t { InfiniBand, RoceV1, RoceV2 };

using GidBytes = std::array<std::uint8_t, 16>;

// One address of a port.
struct Gid {
  int index = 0;
  GidBytes bytes{};
  GidType type = GidType::InfiniBand;
  std::string interface;  // the network interface it belongs to, where there is one

  bool is_ipv4() const;
  bool is_link_local() const;
  // "10.7.0.1" where it is an IPv4 address, else as IPv6.
  std::string text() const;
};

struct PortReport {
  std::string device;
  int port = 1;
  bool active = false;
  std::string state;             // in libibverbs' words
  std::optional<Fabric> fabric;  // nothing for what Weft cannot use (iWARP)
  std::uint16_t lid = 0;
  int mtu_bytes = 0;
  std::uint32_t max_message = 0;  // bytes of one work request
  std::vector<Gid> gids;

  std::string name() const { return device + ":" + std::to_string(port); }
};

// What the user and the caller want.
struct Wishes {
  std::vector<std::string> devices;  // as WEFT_IB_HCA
  std::optional<int> gid_index;
  std::string interface_address;  // as ListenOptions'; the port that it belongs to is preferred

  static Wishes from(const Config& config, std::string interface_address = {});
};

struct Choice {
  PortReport port;
  Gid gid;
};

// The first usable port, those of `interface_address` before others. Unsupported where there is
// none, saying why of each.
Result<Choice> choose(const std::vector<PortReport>& ports, const Wishes& wishes);

// "rxe0:1 active, RoCE, MTU 1024; GID 0 fe80::1 (RoCE v2, d0), GID 1 10.7.0.1 (RoCE v2, d0)".
std::string describe(const PortReport& port);
std::string_view name(Fabric fabric);

}  // namespace weft::transport::verbs
