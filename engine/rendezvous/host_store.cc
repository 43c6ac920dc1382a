// SPDX-License-Identifier: Apache-2.0
#include <weft/base/descriptor.h>
#include <weft/base/error.h>
#include <weft/base/log.h>
#include <weft/base/shortage.h>
#include <weft/engine/rendezvous/job_store.h>
#include <weft/engine/rendezvous/lives.h>
#include <weft/engine/store/address.h>
#include <weft/engine/store/store.h>
#include <weft/engine/store/tcp_store.h>
#include <weft/engine/tensor/tensor.h>

namespace weft::group {

namespace {

// The reason why c10d could not open a store. c10d gives the errno only as a part of a text.
Error why_no_store(const TcpAddress& address, const std::string& text) {
  if (text.find("EADDRINUSE") != std::string::npos) {
    return {Blame::Caller,
            "the port is taken, by another job perhaps; take another port, or give each job a "
            "group_name: " +
                text};
  }
  try {
    static_cast<void>(open_listener(is_ipv4_only(address.host) ? AF_INET : AF_INET6, 0));
  } catch (const Error& error) {
    if (is_shortage(error.native_code())) return {Blame::Busy, error.text(), error.native_code()};
  }
  if (!has_route_to(address.host, address.port)) {
    return {
        Blame::Unsupported,
        "no network interface leads there; if it is this machine, its loopback interface is down "
        "(ip link set lo up): " +
            text};
  }
  return {Blame::Caller, text};
}

}  // namespace

c10d::TCPStoreOptions server_options(int port, Deadline deadline) {
  c10d::TCPStoreOptions options;
  options.port = static_cast<std::uint16_t>(port);
  options.isServer = true;
  options.waitWorkers = false;
  options.multiTenant = true;  // several groups of one process may share the port
  options.timeout = limit_for_c10d(deadline);
  return options;
}

// Opens a socket for IPv4 alone if the host has no other addresses. c10d's daemon looks up the name
// of every address that connects to it, one after the other. For an IPv4 address at a socket of
// both families even /etc/hosts has no name, so a slow or silent name server would hold up all
// ranks.
c10::intrusive_ptr<c10d::TCPStore> open_store(const std::string& host,
                                              c10d::TCPStoreOptions options) {
  if (is_ipv4_only(host)) {
    try {
      Descriptor socket = open_listener(AF_INET, options.port);
      options.port = static_cast<std::uint16_t>(port_of(socket.get()));
      options.masterListenFd = socket.release();  // the store closes it
    } catch (const Error& error) {
      // This process may have a store there, which is shared; any other failure c10d reports.
      log::debug(error.text());
    }
  }
  const BriskLookups brisk;
  return c10::make_intrusive<c10d::TCPStore>(host, options);
}

void require_descriptors_to_host(int world_size) {
  // c10d's listener and loop, and both ends of this rank's own three connections.
  constexpr int kStore = 14;
  // The job's loop and listener, the backend's, and short-lived ones.
  constexpr int kGroup = 6;
  constexpr int kRank = 4;  // two to the store, one beside them, one of the job
  require_descriptors(kStore + kGroup + kRank * (world_size - 1),
                      "rank 0, which hosts the store of " + std::to_string(world_size) + " ranks,");
}

c10::intrusive_ptr<c10d::Store> host_store(const TcpAddress& address, int world_size, bool shared,
                                           Deadline deadline, Seeker& seeker) {
  require_descriptors_to_host(world_size);
  // c10d would try to reach its own store until the deadline.
  if (!has_route_to(address.host, address.port)) {
    throw why_no_store(address, "no route")
        .within("rank 0 cannot open its store at " + at(address.host, address.port));
  }
  try {
    const auto store = open_store(address.host, server_options(address.port, deadline));
    store->set(kHosted, std::vector<std::uint8_t>{1});
    return store;
  } catch (const std::exception& error) {
    const std::string text = tensor::text_of(error);
    if (shared && text.find("EADDRINUSE") != std::string::npos) {
      log::info("another job hosts a store at " + at(address.host, address.port) +
                "; this one shares it");
      return join_store(address, 0, deadline, seeker);
    }
    const std::string what = "rank 0 cannot open its store at " + at(address.host, address.port);
    throw why_no_store(address, text).within(what);
  }
}

}  // namespace weft::group
