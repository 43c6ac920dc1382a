// Where a listener can be reached, as text:
// "192.0.2.1:4711,[2001:db8::1]:4711#5f0c2a91.00c8d5e1f37b4a69". First the ends of which each leads
// there, then who answers (see Identity); without that part anybody who speaks Weft is welcome.
// Hosts are IPv4 addresses, IPv6 addresses in brackets (with a scope where they are link-local:
// [fe80::1%eth0]), or names.
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

// Which listener: addresses are used again, by another process, or by other machines as 127.0.0.1
// and 172.17.0.1 are.
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
  // Throws Caller, saying what is wrong where.
  static Address parse(const std::string& text);
};

// Says that two processes share their loopback interface: the machine's boot and its network
// namespace, as a number that is not 0. Throws Busy (no descriptors).
std::uint32_t this_machine();

// Nothing where the host is a name.
std::optional<SocketAddress> numeric_address(const Host& host);
// All addresses of a host. Names may take seconds; never call it on a loop with one.
Result<std::vector<SocketAddress>> resolve(const Host& host);

// The addresses that a listener takes, with port 0: of an interface ("eth0"), a host's name, one
// address; for 0.0.0.0 and
// :: those of all interfaces, for "" the loopback's. Throws Caller, listing the interfaces there
// are.
std::vector<SocketAddress> local_addresses(const std::string& interface_address);

}  // namespace weft::transport::tcp
