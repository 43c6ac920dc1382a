// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cerrno>

#include <net/if.h>
#include <sys/socket.h>

#include <weft/base/config.h>
#include <weft/base/log.h>
#include <weft/base/make_error.h>
#include <weft/transport/mesh/mesh.h>
#include <weft/transport/registry.h>
#include <weft/transport/stream/stream_connection.h>
#include <weft/transport/tcp/striped_stream.h>
#include <weft/transport/tcp/tcp.h>
#include <weft/transport/tcp/tcp_listener.h>

namespace weft::transport::tcp {

namespace {

Capabilities capabilities_of_sockets() {
  Capabilities capabilities;
  capabilities.inline_bytes = 16 << 10;  // a new socket has room for this much
  return capabilities;
}

std::shared_ptr<Connection> connection_over(std::unique_ptr<ByteStream> stream,
                                            std::shared_ptr<EventLoop> loop,
                                            const Settings& settings) {
  return connect_over(std::move(stream), capabilities_of_sockets(), "tcp", std::move(loop),
                      settings.linger);
}

// Only a machine's own addresses can be bound.
bool is_own(SocketAddress address) {
  address.set_port(0);
  const Descriptor socket(::socket(address.family(), SOCK_DGRAM | SOCK_CLOEXEC, 0));
  return socket && ::bind(socket.get(), address.get(), address.length) == 0;
}

// Returns why this host cannot lead to the listener from here; nothing if it may, as every name
// does.
std::optional<std::string> why_unreachable_at(const Host& host, const Identity& identity) {
  const auto percent = host.name.find('%');
  if (percent != std::string::npos && ::if_nametoindex(host.name.c_str() + percent + 1) == 0) {
    return host.text() + " is behind an interface that this machine does not have";
  }
  const auto address = numeric_address(host);
  if (address && address->is_loopback() && identity.given() && identity.machine != this_machine()) {
    return host.text() +
           " is the loopback address of another machine or network namespace: give its listener an "
           "interface with WEFT_SOCKET_IFNAME there (ListenOptions::interface_address)";
  }
  if (address && !address->is_loopback() && identity.given() &&
      identity.machine != this_machine() && is_own(*address)) {
    return host.text() +
           " is an address of both this machine and the listener's, and leads to this one (as with "
           "the bridge of a container runtime): set WEFT_SOCKET_IFNAME on both to an interface "
           "whose addresses differ";
  }
  return std::nullopt;
}

}  // namespace

Tcp::Tcp(const Settings& settings) : settings_(settings) {
  if (settings.sockets < 1 || settings.sockets > kMaxSockets) {
    throw Error(Blame::Caller, "tcp: a connection has 1 to " + std::to_string(kMaxSockets) +
                                   " sockets, not " + std::to_string(settings.sockets));
  }
}

std::shared_ptr<Communicator> Tcp::join(const JoinOptions& options) {
  return mesh::join(*this, options);
}

Capabilities Tcp::capabilities() const { return capabilities_of_sockets(); }

std::optional<std::string> Tcp::why_unreachable(const std::string& text) const {
  try {
    const Address address = Address::parse(text);
    std::optional<std::string> first;
    for (const Host& host : address.hosts) {
      const auto why = why_unreachable_at(host, address.identity);
      if (!why) return std::nullopt;
      if (!first) first = why;
    }
    return first;
  } catch (const Error& error) {
    if (error.blame() == Blame::Busy)
      return std::nullopt;  // unknown for now; connecting will report the shortage
    return error.text();
  }
}

std::unique_ptr<Listener> Tcp::listen(const ListenOptions& options) {
  if (!options.loop || !options.accepted)
    throw Error(Blame::Caller, "tcp listen: a loop and `accepted` must be given");
  const auto accept = [weak = std::weak_ptr(options.loop), accepted = options.accepted,
                       settings = settings_](std::unique_ptr<ByteStream> stream) {
    const auto loop = weak.lock();
    if (!loop) return;
    std::shared_ptr<Connection> connection;
    try {
      connection = connection_over(std::move(stream), loop, settings);
    } catch (const Error& error) {
      return log::warn("tcp: a connection was accepted and dropped: " + error.text());
    }
    accepted(std::move(connection));
  };
  return std::make_unique<TcpListener>(options.loop, options.interface_address, settings_, accept,
                                       options.short_of_something);
}

std::shared_ptr<Connection> Tcp::connect(const std::string& address,
                                         const ConnectOptions& options) {
  if (!options.loop)
    throw Error(Blame::Caller, "tcp connect to " + address + ": a loop must be given");
  auto sockets = TcpStream::dial(options.loop, Address::parse(address), options.deadline, settings_,
                                 options.has_listened);
  return connection_over(as_one(std::move(sockets)), options.loop, settings_);
}

Result<std::shared_ptr<Transport>> open() {
  if (!make_socket(AF_INET) && !make_socket(AF_INET6)) {
    return system_error(is_shortage(errno) ? Blame::Busy : Blame::Unsupported,
                        "neither IPv4 nor IPv6 TCP sockets are available", errno);
  }
  Settings settings;
  settings.sockets = static_cast<std::size_t>(config().tcp_sockets);
  try {
    settings.credentials = tls::credentials();
  } catch (const Error& error) {
    return error;
  }
  return std::shared_ptr<Transport>(std::make_shared<Tcp>(settings));
}

}  // namespace weft::transport::tcp
