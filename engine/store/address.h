// SPDX-License-Identifier: Apache-2.0
// Finds addresses during the rendezvous: where rank 0 listens, and which of this machine's
// addresses it sees.
#pragma once

#include <string>

#include <sys/socket.h>

#include <weft/base/deadline.h>
#include <weft/base/descriptor.h>

namespace weft::group {

// Blocks until the host has an address: in a cluster the name of rank 0's machine may appear after
// the ranks have begun. Logs at once that it waits. Throws Caller if the name has no address by the
// deadline or after `patience`.
void wait_for_name(const std::string& host, Deadline deadline,
                   std::chrono::milliseconds patience = std::chrono::minutes(1));

// Blocks until something accepts TCP connections there, trying often at first; returns its numeric
// address. Throws Timeout with the address and the last failure; Caller if the host's name cannot
// be resolved by the deadline. Calls `look` between two attempts, with the last failure.
std::string wait_for_listener(const std::string& host, int port, Deadline deadline,
                              const std::function<void(const std::string& failure)>& look = {});

// The local address that packets to the host leave from; "" if there is no route.
std::string local_address_towards(const std::string& host, int port);

// True for a numeric loopback address.
bool is_loopback(const std::string& address);

// The same as it is told to other machines, which cannot use a loopback address. The name of this
// machine may stand for a loopback address ("127.0.1.1 name" in Debian's /etc/hosts); if so,
// returns outward_address(), if there is one. If `host` itself is a loopback address or localhost,
// all ranks are on this machine, and the loopback address is returned.
std::string address_for_others(const std::string& host, int port);
// The same for known addresses: where packets to `host` leave from, and the outward address.
std::string address_for_others(const std::string& host, const std::string& towards_host,
                               const std::string& outward);
// The local address of the default route. Without a route, the address of a running interface other
// than the loopback; or "".
std::string outward_address();

// An address of an interface ("eth0"): IPv4 if it has one, unless `family` is given; link-local
// addresses last. Throws Caller, listing the interfaces.
std::string address_of_interface(const std::string& name, int family = AF_UNSPEC);

// The interface through which the kernel routes packets to the address; "" if there is no route.
std::string interface_towards(const std::string& host, int port);

// The address that this machine's host name stands for, if it belongs to this machine; else the
// loopback address.
std::string default_address();

struct SocketAddress {
  sockaddr_storage storage{};
  socklen_t length = 0;
  const sockaddr* get() const { return reinterpret_cast<const sockaddr*>(&storage); }
};

std::string numeric_address(const SocketAddress& address);

// From a numeric IPv4 or IPv6 address. Throws Caller for anything else.
SocketAddress socket_address(const std::string& host, int port);
// While it lives, this thread asks a name server again after one second, not the usual five. For
// c10d, which looks up the name of every address that it connects to, for its messages: a lost
// answer would hold up a rank.
class BriskLookups {
 public:
  BriskLookups();
  ~BriskLookups();
  BriskLookups(const BriskLookups&) = delete;
  BriskLookups& operator=(const BriskLookups&) = delete;

 private:
  int seconds_ = 0;  // the values to restore
  int tries_ = 0;
};
// True if the host has IPv4 addresses and no others.
bool is_ipv4_only(const std::string& host);
// A socket that listens on all interfaces, of one address family. Port 0 takes any free port.
// Throws Caller.
Descriptor open_listener(int family, int port);
// True if the kernel has a route to the host, or if its name has no address. Sends nothing.
bool has_route_to(const std::string& host, int port);
// True if one of the host's addresses belongs to this machine.
bool is_this_machine(const std::string& host);
// The port that a socket is bound to.
int port_of(int socket);
// Returns a connected, non-blocking TCP socket to a listener that is known to exist. Throws
// PeerLost if the connection is refused, Timeout if nobody answers by the deadline.
int connect_to(const std::string& host, int port, Deadline deadline);
// True if the process at the other end has closed a connection on which nothing else arrives. False
// for an empty Descriptor.
bool has_ended(const Descriptor& connection);

// True for an IP multicast address (224.0.0.0/4, ff00::/8), with or without a scope (ff02::1%eth0).
bool is_multicast(const std::string& host);

// How ranks that one mpirun or srun started on one machine find rank 0's port: rank 0 writes a file
// named after the job, and removes it again. A reader trusts only files of the same user, and only
// while the process that wrote them is alive.
class LauncherFile {
 public:
  // `job` names the launcher's job; see launcher_job().
  explicit LauncherFile(const std::string& job);
  ~LauncherFile();
  LauncherFile(const LauncherFile&) = delete;
  LauncherFile& operator=(const LauncherFile&) = delete;

  void publish(int port);
  // Blocks until rank 0 has published. Calls `look` between two attempts. Throws Timeout.
  int port(Deadline deadline, const std::function<void()>& look) const;
  const std::string& path() const { return path_; }

 private:
  std::string path_;
  int published_ = 0;  // the port; 0: nothing published
};

}  // namespace weft::group
