// Finding addresses during the rendezvous: where rank 0 listens, and by which of our own addresses
// it sees us.
#pragma once

#include <string>

#include <sys/socket.h>

#include <weft/base/deadline.h>
#include <weft/base/descriptor.h>

namespace weft::group {

// Blocks until the host has an address: in a cluster the name of rank 0's machine may appear after
// the ranks have begun. Says at once in the log that it waits. Throws Caller when the name has none
// by the deadline, or for so long as `patience`.
void wait_for_name(const std::string& host, Deadline deadline,
                   std::chrono::milliseconds patience = std::chrono::minutes(1));

// Blocks until something accepts TCP connections there, looking often at first; returns the numeric
// address that does. Throws Timeout naming the address and the last failure; Caller when the host's
// name cannot be resolved by the deadline. `look` is called between two looks with the last
// failure.
std::string wait_for_listener(const std::string& host, int port, Deadline deadline,
                              const std::function<void(const std::string& failure)>& look = {});

// The local address that packets to the host leave from; "" if there is no route.
std::string local_address_towards(const std::string& host, int port);

// That address as it is told to other machines, which have no use for a loopback. A machine's own
// name may stand for one
// ("127.0.1.1 name" in Debian's /etc/hosts): then outward_address(), if there is any. Where the job
// itself names a loopback, by number or as localhost, all its ranks are here.
std::string address_for_others(const std::string& host, int port);
// The same, of what was found: where packets to `host` leave from, and the outward address.
std::string address_for_others(const std::string& host, const std::string& towards_host,
                               const std::string& outward);
// Where the default route leaves from; without one, the address of an interface that runs and is no
// loopback; or "".
std::string outward_address();

// An address of an interface ("eth0"): IPv4 if it has one, or one of the given family; link-local
// ones last. Throws Caller, listing the interfaces there are.
std::string address_of_interface(const std::string& name, int family = AF_UNSPEC);

// The interface that packets to the address leave by, as the kernel routes them; "" if there is no
// route.
std::string interface_towards(const std::string& host, int port);

// The address that this machine's name stands for, if it is one of this machine's; else the
// loopback.
std::string default_address();

struct SocketAddress {
  sockaddr_storage storage{};
  socklen_t length = 0;
  const sockaddr* get() const { return reinterpret_cast<const sockaddr*>(&storage); }
};

std::string numeric_address(const SocketAddress& address);

// From a numeric IPv4 or IPv6 address. Throws Caller for anything else.
SocketAddress socket_address(const std::string& host, int port);
// While it lives, this thread asks a name server again after a second, not after the five that are
// usual. For c10d, which looks up the name of every address that it connects to, for its messages:
// an answer that is lost would hold up a rank.
class BriskLookups {
 public:
  BriskLookups();
  ~BriskLookups();
  BriskLookups(const BriskLookups&) = delete;
  BriskLookups& operator=(const BriskLookups&) = delete;

 private:
  int seconds_ = 0;  // as they were
  int tries_ = 0;
};
// Whether the host has addresses of IPv4 and no others.
bool is_ipv4_only(const std::string& host);
// A socket that listens on all interfaces, of one family; port 0: any that is free. Throws Caller.
Descriptor open_listener(int family, int port);
// Whether the kernel knows a way to the host; nothing is sent. True where its name has no address.
bool has_route_to(const std::string& host, int port);
// Whether one of the host's addresses is this machine's.
bool is_this_machine(const std::string& host);
// The port that a socket is bound to.
int port_of(int socket);
// A connected, non-blocking TCP socket to somebody who listens already. Throws PeerLost when nobody
// does (any more), Timeout when there is no answer by the deadline.
int connect_to(const std::string& host, int port, Deadline deadline);
// Whether the process behind a connection on which nothing arrives has closed it. False for an
// empty one.
bool has_ended(const Descriptor& connection);

// Whether the text is an IP multicast address (224.0.0.0/4, ff00::/8), with or without a scope
// (ff02::1%eth0).
bool is_multicast(const std::string& host);

// How ranks below one mpirun or srun on one machine find rank 0's port: a file named after the job,
// which rank 0 writes and removes again. Only this user's files are read, and only while the
// process that wrote them lives.
class LauncherFile {
 public:
  // `job` names the launcher's job; see launcher_job().
  explicit LauncherFile(const std::string& job);
  ~LauncherFile();
  LauncherFile(const LauncherFile&) = delete;
  LauncherFile& operator=(const LauncherFile&) = delete;

  void publish(int port);
  // Blocks until rank 0 has published. Throws Timeout. `look` is called between two looks.
  int port(Deadline deadline, const std::function<void()>& look) const;
  const std::string& path() const { return path_; }

 private:
  std::string path_;
  int published_ = 0;  // the port; 0: none
};

}  // namespace weft::group
