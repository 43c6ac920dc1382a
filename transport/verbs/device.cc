// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cerrno>
#include <cstring>

#include <fcntl.h>
#include <net/if.h>

#include <weft/base/log.h>
#include <weft/base/make_error.h>
#include <weft/transport/verbs/device.h>

namespace weft::transport::verbs {

namespace {

constexpr std::size_t kFewGids = 256;     // entries of one device; a port uses a handful
constexpr std::size_t kManyGids = 65536;  // larger than any device's table
constexpr std::uint32_t kMaxGid = 255;    // largest index in the address of a queue pair

std::optional<Fabric> fabric_of(const ibv_context& context, const ibv_port_attr& port) {
  if (context.device->transport_type != IBV_TRANSPORT_IB) return std::nullopt;
  switch (port.link_layer) {
    case IBV_LINK_LAYER_UNSPECIFIED:
    case IBV_LINK_LAYER_INFINIBAND: return Fabric::InfiniBand;
    case IBV_LINK_LAYER_ETHERNET: return Fabric::Roce;
    default: return std::nullopt;
  }
}

GidType type_of(std::uint32_t type) {
  switch (type) {
    case IBV_GID_TYPE_ROCE_V1: return GidType::RoceV1;
    case IBV_GID_TYPE_ROCE_V2: return GidType::RoceV2;
    default: return GidType::InfiniBand;
  }
}

int bytes_of(ibv_mtu mtu) { return mtu >= IBV_MTU_256 && mtu <= IBV_MTU_4096 ? 128 << mtu : 0; }

}  // namespace

Device::Device(std::shared_ptr<const Library> library, ibv_device* device)
    : library_(std::move(library)), name_(library_->get_device_name(device)) {
  context_ = library_->open_device(device);
  if (context_ == nullptr) {
    throw system_error(Blame::Unsupported,
                       name_ + ": cannot be opened; is /dev/infiniband in this container?", errno);
  }
  ::fcntl(context_->async_fd, F_SETFL, ::fcntl(context_->async_fd, F_GETFL) | O_NONBLOCK);
  const int failed = library_->query_device(context_, &limits_);
  if (failed == 0) domain_ = library_->alloc_pd(context_);
  if (domain_ == nullptr) {
    const int number = failed != 0 ? failed : errno;
    library_->close_device(context_);
    throw system_error(Blame::Busy, name_ + ": no protection domain", number);
  }
}

Device::~Device() {
  library_->dealloc_pd(domain_);
  library_->close_device(context_);
}

PortReport Device::report(int port) const {
  PortReport report;
  report.device = name_;
  report.port = port;
  ibv_port_attr attributes{};
  const auto number = static_cast<std::uint8_t>(port);
  // The library's exported symbol fills only the older, shorter part of the struct; Weft does not
  // use the newer fields.
  if (library_->query_port(context_, number,
                           reinterpret_cast<_compat_ibv_port_attr*>(&attributes)) != 0) {
    report.state = "unknown";
    return report;
  }
  report.active = attributes.state == IBV_PORT_ACTIVE;
  report.state = library_->port_state_str(attributes.state);
  report.fabric = fabric_of(*context_, attributes);
  report.lid = attributes.lid;
  report.mtu_bytes = bytes_of(attributes.active_mtu);
  report.max_message = attributes.max_msg_sz;
  std::vector<ibv_gid_entry> entries;
  ssize_t count = -1;
  // A buffer that is too small is an error; the library does not return a part of the table.
  for (std::size_t room = kFewGids; count < 0 && room <= kManyGids; room *= 4) {
    entries.resize(room);
    count = library_->query_gid_table(context_, entries.data(), entries.size(), 0,
                                      sizeof(ibv_gid_entry));
  }
  if (count < 0)
    log::warn(name_ +
              ": its table of GIDs cannot be read: " + std::strerror(static_cast<int>(-count)));
  entries.resize(count > 0 ? static_cast<std::size_t>(count) : 0);
  for (const ibv_gid_entry& entry : entries) {
    if (entry.port_num != static_cast<std::uint32_t>(port) || entry.gid_index > kMaxGid) continue;
    Gid gid;
    gid.index = static_cast<int>(entry.gid_index);
    std::memcpy(gid.bytes.data(), entry.gid.raw, gid.bytes.size());
    gid.type = type_of(entry.gid_type);
    char interface[IF_NAMESIZE] = {};
    if (entry.ndev_ifindex != 0 && ::if_indextoname(entry.ndev_ifindex, interface) != nullptr)
      gid.interface = interface;
    report.gids.push_back(std::move(gid));
  }
  return report;
}

std::vector<PortReport> Device::ports() const {
  std::vector<PortReport> ports;
  for (int port = 1; port <= limits_.phys_port_cnt; ++port) ports.push_back(report(port));
  return ports;
}

bool Device::has_ended(int returned, const char* what) const {
  if (returned == 0) return true;
  log::error(name_ + ": " + what + ": " + std::strerror(returned > 0 ? returned : errno));
  return false;
}

std::vector<std::shared_ptr<Device>> open_devices(const std::shared_ptr<const Library>& library) {
  int count = 0;
  ibv_device** const list = library->get_device_list(&count);
  if (list == nullptr)
    throw system_error(Blame::Unsupported,
                       "libibverbs finds no RDMA devices (are there any, and is the kernel module "
                       "ib_uverbs loaded?)",
                       errno);
  std::vector<std::shared_ptr<Device>> devices;
  std::string reasons;
  for (int i = 0; i < count; ++i) {
    try {
      devices.push_back(std::make_shared<Device>(library, list[i]));
    } catch (const Error& error) {
      reasons += (reasons.empty() ? "" : "; ") + error.text();
    }
  }
  library->free_device_list(list);
  if (devices.empty() && !reasons.empty())
    throw Error(Blame::Unsupported, "no RDMA device can be used: " + reasons);
  return devices;
}

Path find_path(const std::vector<std::shared_ptr<Device>>& devices, const Config& config,
               const std::string& interface_address) {
  std::vector<PortReport> ports;
  for (const auto& device : devices) std::ranges::move(device->ports(), std::back_inserter(ports));
  auto chosen = choose(ports, Wishes::from(config, interface_address));
  if (!chosen) throw chosen.error();
  Path path;
  path.choice = std::move(chosen).value();
  path.device = *std::ranges::find(devices, path.choice.port.device, &Device::name);
  path.service_level =
      static_cast<std::uint8_t>(config.ib_service_level.value_or(path.service_level));
  path.traffic_class =
      static_cast<std::uint8_t>(config.ib_traffic_class.value_or(path.traffic_class));
  path.timeout = static_cast<std::uint8_t>(config.ib_timeout.value_or(path.timeout));
  return path;
}

}  // namespace weft::transport::verbs
