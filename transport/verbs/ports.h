// SPDX-License-Identifier: Apache-2.0
// The ports of this machine's RDMA devices as plain data, and the choice of the port for a
// connection. Pure functions: device.h fills in the data, or a test does.
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
  std::string interface;  // the network interface that it belongs to, if any

  bool is_ipv4() const;
  bool is_link_local() const;
  // "10.7.0.1" for an IPv4 address, else in IPv6 notation.
  std::string text() const;
};

struct PortReport {
  std::string device;
  int port = 1;
  bool active = false;
  std::string state;             // libibverbs' text
  std::optional<Fabric> fabric;  // empty if Weft cannot use it (iWARP)
  std::uint16_t lid = 0;
  int mtu_bytes = 0;
  std::uint32_t max_message = 0;  // bytes of one work request
  std::vector<Gid> gids;

  std::string name() const { return device + ":" + std::to_string(port); }
};

// The user's wishes (from Config) and the caller's.
struct Wishes {
  std::vector<std::string> devices;  // from WEFT_IB_HCA
  std::optional<int> gid_index;
  std::string interface_address;  // from ListenOptions; its port is preferred

  static Wishes from(const Config& config, std::string interface_address = {});
};

struct Choice {
  PortReport port;
  Gid gid;
};

// Returns the first usable port; ports of `interface_address` come before others. Returns
// Unsupported if there is none, with the reason for each port.
Result<Choice> choose(const std::vector<PortReport>& ports, const Wishes& wishes);

// "rxe0:1 active, RoCE, MTU 1024; GID 0 fe80::1 (RoCE v2, d0), GID 1 10.7.0.1 (RoCE v2, d0)".
std::string describe(const PortReport& port);
std::string_view name(Fabric fabric);

}  // namespace weft::transport::verbs
