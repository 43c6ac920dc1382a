// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <atomic>

#include <weft/base/log.h>
#include <weft/base/mutex.h>
#include <weft/base/tls_files.h>
#include <weft/transport/mesh/mesh.h>
#include <weft/transport/registry.h>
#include <weft/transport/stream/stream_connection.h>
#include <weft/transport/verbs/ring_writer.h>
#include <weft/transport/verbs/verbs.h>
#include <weft/transport/verbs/verbs_stream.h>

namespace weft::transport::verbs {

namespace {

constexpr auto kHello = std::chrono::seconds(20);  // time limit for the hello of an accepted peer
constexpr long kGuests = 256;                      // connections of a listener without a hello

Capabilities capabilities_of_rings() {
  Capabilities capabilities;
  capabilities.inline_bytes = 64 << 10;
  capabilities.one_sided = true;
  capabilities.direct_bytes = kDirectBytes;
  return capabilities;
}

std::string_view scheme_of(Fabric fabric) { return fabric == Fabric::InfiniBand ? "ib/" : "roce/"; }

void warn_of_tls() {
  static std::atomic<bool> is_said{false};
  if (!tls_files().given() || is_said.exchange(true)) return;
  log::warn(
      "verbs: data that goes over RDMA is not encrypted, although WEFT_TLS_CERT is set; to encrypt "
      "all of it, choose the backend tcp");
}

class VerbsListener final : public Listener {
 public:
  VerbsListener(std::unique_ptr<Listener> meeting, Fabric fabric)
      : meeting_(std::move(meeting)), fabric_(fabric) {}
  std::string address() const override { return Address{fabric_, meeting_->address()}.text(); }

 private:
  const std::unique_ptr<Listener> meeting_;
  const Fabric fabric_;
};

}  // namespace

std::string Address::text() const { return std::string(scheme_of(fabric)) + meeting; }

Address Address::parse(const std::string& text) {
  for (const Fabric fabric : {Fabric::InfiniBand, Fabric::Roce}) {
    if (text.starts_with(scheme_of(fabric))) return {fabric, text.substr(scheme_of(fabric).size())};
  }
  throw Error(Blame::Caller,
              "'" + text + "' is not a verbs address: it begins with neither ib/ nor roce/");
}

Verbs::Verbs(std::vector<std::shared_ptr<Device>> devices, const Config& config,
             std::shared_ptr<Transport> meeting)
    : devices_(std::move(devices)), config_(config), meeting_(std::move(meeting)) {
  for (const auto& device : devices_)
    registrations_[device.get()] = std::make_shared<RegistrationCache>(device, config.gpu_direct);
  way_from("");
}

Verbs::Way Verbs::way_from(const std::string& interface_address) const {
  Path path = find_path(devices_, config_, interface_address);
  auto registrations = registrations_.at(path.device.get());
  return {std::move(path), std::move(registrations)};
}

Verbs::Way Verbs::way_out() const {
  UniqueLock lock(mutex_);
  const std::string interface_address = listens_at_;
  lock.unlock();
  return way_from(interface_address);
}

std::vector<std::string> Verbs::describe() const {
  std::vector<std::string> lines;
  for (const auto& device : devices_) {
    for (const PortReport& port : device->ports()) lines.push_back(verbs::describe(port));
  }
  try {
    const Choice choice = way_from("").path.choice;
    lines.push_back("used: " + choice.port.name() + ", GID " + std::to_string(choice.gid.index) +
                    " " + choice.gid.text());
    lines.push_back("memory of GPUs: " + describe_gpu_ways(*way_from("").path.device));
  } catch (const Error& error) {
    lines.push_back(error.text());
  }
  return lines;
}

std::shared_ptr<Communicator> Verbs::join(const JoinOptions& options) {
  return mesh::join(*this, options);
}

Capabilities Verbs::capabilities() const { return capabilities_of_rings(); }

std::optional<std::string> Verbs::why_unreachable(const std::string& text) const {
  try {
    const Address address = Address::parse(text);
    const Fabric here = *way_out().path.choice.port.fabric;
    if (address.fabric != here) {
      return "its RDMA port is on " + std::string(verbs::name(address.fabric)) +
             ", the port of this process on " + std::string(verbs::name(here)) +
             "; choose ports of one fabric on all hosts with WEFT_IB_HCA";
    }
    return meeting_->connector()->why_unreachable(address.meeting);
  } catch (const Error& error) {
    return error.text();
  }
}

std::unique_ptr<Listener> Verbs::listen(const ListenOptions& options) {
  if (!options.loop || !options.accepted)
    throw Error(Blame::Caller, "verbs listen: a loop and `accepted` must be given");
  warn_of_tls();
  const Way way = way_from(options.interface_address);
  {
    MutexLock lock(mutex_);
    listens_at_ = options.interface_address;
  }
  ListenOptions meeting = options;
  // Counts the accepted connections whose peers have not sent a hello: each holds one reference.
  // They are limited because each already has a queue pair and locked memory.
  const auto unmet = std::make_shared<const int>();
  meeting.accepted = [way, unmet, weak = std::weak_ptr(options.loop),
                      accepted = options.accepted](std::shared_ptr<Connection> guest) {
    const auto loop = weak.lock();
    if (!loop) return;
    if (unmet.use_count() > kGuests)
      return log::warn("verbs: too many connections without a hello; dropped one");
    std::shared_ptr<Connection> connection;
    try {
      auto stream = std::make_unique<VerbsStream>(way.path, way.registrations, std::move(guest),
                                                  Deadline::in(kHello), unmet);
      connection = connect_over(std::move(stream), capabilities_of_rings(), "verbs", loop);
    } catch (const Error& error) {
      return log::warn("verbs: a connection was accepted and dropped: " + error.text());
    }
    accepted(std::move(connection));
  };
  log::info("verbs: listening on " + way.path.name() + ", GID " + way.path.choice.gid.text());
  return std::make_unique<VerbsListener>(meeting_->connector()->listen(meeting),
                                         *way.path.choice.port.fabric);
}

std::shared_ptr<Connection> Verbs::connect(const std::string& text, const ConnectOptions& options) {
  if (!options.loop)
    throw Error(Blame::Caller, "verbs connect to " + text + ": a loop must be given");
  const Address address = Address::parse(text);
  if (const auto why = why_unreachable(text))
    throw Error(Blame::Caller, "verbs: cannot connect to " + text + ": " + *why);
  const Way way = way_out();
  auto meeting = meeting_->connector()->connect(address.meeting, options);
  auto stream = std::make_unique<VerbsStream>(way.path, way.registrations, std::move(meeting),
                                              options.deadline);
  return connect_over(std::move(stream), capabilities_of_rings(), "verbs", options.loop);
}

Result<std::shared_ptr<Transport>> open() {
  try {
    const auto library = Library::open();
    if (!library) return library.error();
    auto devices = open_devices(library.value());
    // Peers meet over TCP. The tcp backend is looked up in the table that also lists this one, so a
    // program that links verbs also links tcp.
    const auto table = backends();
    const auto tcp = std::ranges::find(table, "tcp", &Backend::name);
    if (tcp == table.end())
      return Error(Blame::Unsupported,
                   "peers of verbs connect over tcp first, which this build does not have");
    auto meeting = tcp->open();
    if (!meeting)
      return meeting.error().within("peers of verbs connect over tcp first, which cannot be used");
    return std::shared_ptr<Transport>(
        std::make_shared<Verbs>(std::move(devices), config(), std::move(meeting).value()));
  } catch (const Error& error) {
    return error;
  }
}

}  // namespace weft::transport::verbs
