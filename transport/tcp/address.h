// SPDX-License-Identifier: Apache-2.0
// The address of a listener as text: "192.0.2.1:4711,[2001:db8::1]:4711#5f0c2a91.00c8d5e1f37b4a69".
// First the listener's hosts and ports, each of which leads to it, then its Identity; without an
// identity any Weft listener may answer. Hosts are IPv4 addresses, IPv6 addresses in brackets (with
// a scope if they are link-local: [fe80::1%eth0]), or names.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include <sys/socket.h>

#include <weft/base/result.h>

namespace weft::transport::tcp {

struct SocketAddress {
  sockaddr_storage storage{};
  socklen_t length = 0;

  sockaddr* get() { return reinterpret_cast<sockaddr*>(&storage); }
  const sockaddr* get() const { return reinterpret_cast<const sockaddr*>(&storage); }
  int family() const { return storage.ss_family; }
  int port() const;
  void set_port(int port);
  bool is_loopback() const;
  bool is_link_local() const;  // IPv6 only
  // "192.0.2.1:4711", "[fe80::1%eth0]:4711".
  std::string text() const;
  friend bool operator==(const SocketAddress& a, const SocketAddress& b);
};

struct Host {
  std::string name;  // without brackets
  int port = 0;
  std::string text() const;
  friend bool operator==(const Host&, const Host&) = default;
};

// Identifies a listener, because addresses are reused: by another process later, and by other
// machines, as 127.0.0.1 and 172.17.0.1 are.
struct Identity {
  std::uint32_t machine = 0;   // see this_machine()
  std::uint64_t listener = 0;  // random
  bool given() const { return machine != 0 || listener != 0; }
  friend bool operator==(const Identity&, const Identity&) = default;
};

struct Address {
  std::vector<Host> hosts;
  Identity identity;
  std::string text() const;
  // Throws Caller, naming the mistake and its place.
  static Address parse(const std::string& text);
};

// A number that is equal for two processes that share their loopback interface, and never 0: a hash
// of the machine's boot and its network namespace. Throws Busy (no descriptors).
std::uint32_t this_machine();

// Returns nothing if the host is a name.
std::optional<SocketAddress> numeric_address(const Host& host);
// Returns all addresses of a host. Resolving a name may take seconds: never do it on a loop.
Result<std::vector<SocketAddress>> resolve(const Host& host);

// Returns the addresses on which a listener listens, with port 0: those of an interface ("eth0"),
// those of a host name, or one address; for 0.0.0.0 and :: those of all interfaces, for "" the
// loopback addresses. Throws Caller, listing the interfaces of this machine.
std::vector<SocketAddress> local_addresses(const std::string& interface_address);

}  // namespace weft::transport::tcp
