// SPDX-License-Identifier: Apache-2.0
#include <algorithm>

#include <arpa/inet.h>

#include <weft/transport/verbs/ports.h>

namespace weft::transport::verbs {

namespace {

std::string_view name(GidType type) {
  switch (type) {
    case GidType::InfiniBand: return "InfiniBand";
    case GidType::RoceV1: return "RoCE v1";
    default: return "RoCE v2";
  }
}

// How much an address of a port is preferred; lower is better. RoCE v2 can be routed; IPv4
// addresses are those that people usually give to such networks; link-local addresses reach only
// the same link.
int rank_of(const Gid& gid) {
  if (gid.type == GidType::InfiniBand) return gid.index;
  return (gid.type == GidType::RoceV2 ? 0 : 4) + (gid.is_link_local() ? 2 : 0) +
         (gid.is_ipv4() ? 0 : 1);
}

const Gid* gid_for(const PortReport& port, const Wishes& wishes) {
  const Gid* best = nullptr;
  const auto is_wanted = [&](const Gid& gid) {
    return gid.interface == wishes.interface_address || gid.text() == wishes.interface_address;
  };
  for (const Gid& gid : port.gids) {
    if (wishes.gid_index) {
      if (gid.index == *wishes.gid_index) return &gid;
      continue;
    }
    const auto key = [&](const Gid& one) { return std::pair(!is_wanted(one), rank_of(one)); };
    if (best == nullptr || key(gid) < key(*best)) best = &gid;
  }
  return best;
}

bool is_listed(const PortReport& port, const std::vector<std::string>& devices) {
  return devices.empty() || std::ranges::any_of(devices, [&](const std::string& wanted) {
           return wanted == port.device || wanted == port.name();
         });
}

std::optional<std::string> why_unusable(const PortReport& port, const Wishes& wishes) {
  if (!is_listed(port, wishes.devices)) return "is not in WEFT_IB_HCA";
  if (!port.fabric) return "is neither InfiniBand nor RoCE";
  if (!port.active) return "is " + port.state + ", not active";
  if (gid_for(port, wishes) == nullptr) {
    return wishes.gid_index
               ? "has no GID " + std::to_string(*wishes.gid_index) + " (WEFT_IB_GID_INDEX)"
               : "has no GID: give its network interface an address";
  }
  return std::nullopt;
}

bool belongs_to(const PortReport& port, const std::string& interface_address) {
  return !interface_address.empty() && std::ranges::any_of(port.gids, [&](const Gid& gid) {
    return gid.interface == interface_address || gid.text() == interface_address;
  });
}

}  // namespace

bool Gid::is_ipv4() const {
  return std::all_of(bytes.begin(), bytes.begin() + 10, [](auto byte) { return byte == 0; }) &&
         bytes[10] == 0xff && bytes[11] == 0xff;
}

bool Gid::is_link_local() const { return bytes[0] == 0xfe && (bytes[1] & 0xc0) == 0x80; }

std::string Gid::text() const {
  char text[INET6_ADDRSTRLEN] = {};
  if (is_ipv4()) {
    ::inet_ntop(AF_INET, &bytes[12], text, sizeof text);
  } else {
    ::inet_ntop(AF_INET6, bytes.data(), text, sizeof text);
  }
  return text;
}

Wishes Wishes::from(const Config& config, std::string interface_address) {
  return {config.ib_devices, config.ib_gid_index, std::move(interface_address)};
}

Result<Choice> choose(const std::vector<PortReport>& ports, const Wishes& wishes) {
  std::string reasons;
  const PortReport* chosen = nullptr;
  for (const PortReport& port : ports) {
    if (const auto why = why_unusable(port, wishes)) {
      reasons += (reasons.empty() ? "" : "; ") + port.name() + " " + *why;
      continue;
    }
    const bool is_nearer = chosen != nullptr && belongs_to(port, wishes.interface_address) &&
                           !belongs_to(*chosen, wishes.interface_address);
    if (chosen == nullptr || is_nearer) chosen = &port;
  }
  if (chosen != nullptr) return Choice{*chosen, *gid_for(*chosen, wishes)};
  if (ports.empty())
    reasons = "this machine has no RDMA device (or its kernel modules are not loaded: ib_uverbs)";
  return Error(Blame::Unsupported, "no RDMA port can be used: " + reasons);
}

std::string_view name(Fabric fabric) {
  return fabric == Fabric::InfiniBand ? "InfiniBand" : "RoCE";
}

std::string describe(const PortReport& port) {
  std::string text = port.name() + " " + (port.active ? "active" : port.state) + ", " +
                     (port.fabric ? std::string(name(*port.fabric)) : "not usable by Weft") +
                     ", MTU " + std::to_string(port.mtu_bytes);
  if (port.lid != 0) text += ", LID " + std::to_string(port.lid);
  for (const Gid& gid : port.gids) {
    text += (&gid == &port.gids.front() ? "; GID " : ", GID ") + std::to_string(gid.index) + " " +
            gid.text() + " (" + std::string(name(gid.type)) +
            (gid.interface.empty() ? "" : ", " + gid.interface) + ")";
  }
  return text;
}

}  // namespace weft::transport::verbs
