// SPDX-License-Identifier: Apache-2.0
#include <cerrno>
#include <csignal>
#include <cstring>
#include <fstream>
#include <memory>

#include <resolv.h>

#include <arpa/inet.h>
#include <fcntl.h>
#include <ifaddrs.h>
#include <net/if.h>
#include <netdb.h>
#include <netinet/in.h>
#include <poll.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

#include <weft/base/error.h>
#include <weft/base/log.h>
#include <weft/base/make_error.h>
#include <weft/engine/store/address.h>
#include <weft/engine/store/backoff.h>

namespace weft::group {

namespace {

using std::chrono::milliseconds;
using Addresses = std::unique_ptr<addrinfo, decltype(&freeaddrinfo)>;

// Returns null, with the reason in `failure`, when the name cannot be resolved (yet).
Addresses resolve(const std::string& host, int port, int type, std::string& failure) {
  addrinfo hints{};
  hints.ai_family = AF_UNSPEC;
  hints.ai_socktype = type;
  addrinfo* list = nullptr;
  const int code = getaddrinfo(host.c_str(), std::to_string(port).c_str(), &hints, &list);
  if (code != 0) failure = code == EAI_SYSTEM ? std::strerror(errno) : gai_strerror(code);
  return {code == 0 ? list : nullptr, &freeaddrinfo};
}

std::string numeric(const sockaddr* address, socklen_t length) {
  char host[NI_MAXHOST];
  if (getnameinfo(address, length, host, sizeof host, nullptr, 0, NI_NUMERICHOST) != 0) return "";
  return host;
}

// True if the socket is connected to itself. The kernel may pick the destination port as the local
// port if nobody listens there and it is in the range for local ports.
bool is_own_end(int socket) {
  SocketAddress local;
  SocketAddress remote;
  local.length = remote.length = sizeof local.storage;
  return getsockname(socket, reinterpret_cast<sockaddr*>(&local.storage), &local.length) == 0 &&
         getpeername(socket, reinterpret_cast<sockaddr*>(&remote.storage), &remote.length) == 0 &&
         local.length == remote.length &&
         std::memcmp(&local.storage, &remote.storage, local.length) == 0;
}

// Waiting does not help a process that has reached its own limit of descriptors.
void require_descriptors(int number, const std::string& where) {
  if (number == EMFILE)
    throw system_error(Blame::Busy, "no connection can be made to " + where, number);
}

// One attempt: returns a connected socket, or -1 with the errno in `number`.
int try_connect(const addrinfo& address, milliseconds patience, int& number) {
  Descriptor socket(::socket(address.ai_family, address.ai_socktype | SOCK_NONBLOCK | SOCK_CLOEXEC,
                             address.ai_protocol));
  number = socket.get() < 0 ? errno : 0;
  if (number != 0) return -1;
  if (::connect(socket.get(), address.ai_addr, address.ai_addrlen) != 0 && errno != EINPROGRESS) {
    number = errno;
    return -1;
  }
  pollfd ready{socket.get(), POLLOUT, 0};
  if (::poll(&ready, 1, static_cast<int>(patience.count())) != 1) {
    number = ETIMEDOUT;
    return -1;
  }
  socklen_t length = sizeof number;
  getsockopt(socket.get(), SOL_SOCKET, SO_ERROR, &number, &length);
  if (number == 0 && is_own_end(socket.get())) number = ECONNREFUSED;
  return number == 0 ? socket.release() : -1;
}

// Tries each of the host's addresses once. Returns a socket, or -1 with the reason in `failure` and
// its errno in `number` (0: no such host).
int connect_once(const std::string& host, int port, Deadline deadline, std::string& failure,
                 int& number) {
  number = 0;
  const Addresses addresses = resolve(host, port, SOCK_STREAM, failure);
  for (const addrinfo* address = addresses.get(); address != nullptr; address = address->ai_next) {
    const int socket =
        try_connect(*address, std::min(deadline.remaining(), milliseconds(2000)), number);
    if (socket >= 0) return socket;
    failure = std::strerror(number);
  }
  return -1;
}

}  // namespace

int connect_to(const std::string& host, int port, Deadline deadline) {
  Backoff pause;
  for (;;) {
    std::string failure;
    int number = 0;
    const int socket = connect_once(host, port, deadline, failure, number);
    if (socket >= 0) return socket;
    const std::string where = host + ":" + std::to_string(port);
    if (number == ECONNREFUSED)
      throw Error(Blame::PeerLost, "nobody listens at " + where + " any more", number);
    require_descriptors(number, where);
    if (deadline.passed())
      throw Error(Blame::Timeout, "no answer from " + where + ": " + failure, number);
    pause.wait(deadline);
  }
}

bool has_ended(const Descriptor& connection) {
  pollfd look{connection.get(), POLLIN | POLLRDHUP, 0};
  return ::poll(&look, 1, 0) == 1;
}

void wait_for_name(const std::string& host, Deadline deadline, milliseconds patience) {
  const Deadline end = Deadline::sooner(deadline, Deadline::in(patience));
  auto pause = Backoff::between_lookups();
  for (bool told = false;; told = true) {
    std::string failure;
    if (resolve(host, 0, SOCK_STREAM, failure)) return;
    // Without a descriptor, neither /etc/hosts nor a name server can be read.
    require_descriptors(Descriptor(::dup(STDERR_FILENO)) ? 0 : errno, host);
    const std::string what = "the host of rank 0, '" + host +
                             "' (MASTER_ADDR, or in the address given), has no address: " + failure;
    if (end.passed())
      throw Error(Blame::Caller, what + "; is the name right, and does this machine know it?");
    if (!told) log::warn(what + "; looking again for up to " + describe(end.remaining()));
    pause.wait(end);
  }
}

std::string wait_for_listener(const std::string& host, int port, Deadline deadline,
                              const std::function<void(const std::string& failure)>& look) {
  Backoff pause;
  for (;;) {
    std::string failure;
    int number = 0;
    const Descriptor socket(connect_once(host, port, deadline, failure, number));
    SocketAddress there;
    there.length = sizeof there.storage;
    if (socket.get() >= 0) {
      const bool known = ::getpeername(socket.get(), reinterpret_cast<sockaddr*>(&there.storage),
                                       &there.length) == 0;
      return known ? numeric_address(there) : host;
    }
    require_descriptors(number, host + ":" + std::to_string(port));
    if (deadline.passed()) {
      throw Error(number != 0 ? Blame::Timeout : Blame::Caller,
                  "nobody answered at " + host + ":" + std::to_string(port) +
                      " in time: " + failure + "; has rank 0 started, and can this host reach it?",
                  number);
    }
    if (look) look(failure);
    pause.wait(deadline);
  }
}

SocketAddress socket_address(const std::string& host, int port) {
  addrinfo hints{};
  hints.ai_flags = AI_NUMERICHOST | AI_NUMERICSERV;
  hints.ai_socktype = SOCK_STREAM;
  addrinfo* list = nullptr;
  if (getaddrinfo(host.c_str(), std::to_string(port).c_str(), &hints, &list) != 0) {
    throw Error(Blame::Caller, "'" + host + "' is not an IP address");
  }
  const Addresses addresses(list, &freeaddrinfo);
  SocketAddress address;
  std::memcpy(&address.storage, list->ai_addr, list->ai_addrlen);
  address.length = list->ai_addrlen;
  return address;
}

std::string numeric_address(const SocketAddress& address) {
  return numeric(address.get(), address.length);
}

BriskLookups::BriskLookups() {
  if ((_res.options & RES_INIT) == 0) res_init();
  seconds_ = std::exchange(_res.retrans, 1);
  tries_ = std::exchange(_res.retry, 5);
}

BriskLookups::~BriskLookups() {
  _res.retrans = seconds_;
  _res.retry = tries_;
}

bool is_ipv4_only(const std::string& host) {
  std::string failure;
  const Addresses addresses = resolve(host, 0, SOCK_STREAM, failure);
  bool all = addresses != nullptr;
  for (const addrinfo* one = addresses.get(); one != nullptr; one = one->ai_next)
    all = all && one->ai_family == AF_INET;
  return all;
}

bool has_route_to(const std::string& host, int port) {
  std::string failure;
  const Addresses addresses = resolve(host, port, SOCK_DGRAM, failure);
  bool has_way = addresses == nullptr;
  for (const addrinfo* address = addresses.get(); address != nullptr && !has_way;
       address = address->ai_next) {
    const Descriptor socket(::socket(address->ai_family, SOCK_DGRAM | SOCK_CLOEXEC, 0));
    has_way = !socket || ::connect(socket.get(), address->ai_addr, address->ai_addrlen) == 0;
  }
  return has_way;
}

Descriptor open_listener(int family, int port) {
  const SocketAddress any = socket_address(family == AF_INET6 ? "::" : "0.0.0.0", port);
  Descriptor socket(::socket(family, SOCK_STREAM | SOCK_CLOEXEC, 0));
  const int yes = 1, no = 0;
  if (family == AF_INET6) {  // accept IPv4 too, independent of the system's default
    static_cast<void>(::setsockopt(socket.get(), IPPROTO_IPV6, IPV6_V6ONLY, &no, sizeof no));
  }
  // Connections of an earlier job may linger on the port.
  if (socket.get() < 0 ||
      ::setsockopt(socket.get(), SOL_SOCKET, SO_REUSEADDR, &yes, sizeof yes) != 0 ||
      ::bind(socket.get(), any.get(), any.length) != 0 || ::listen(socket.get(), 1024) != 0) {
    throw system_error(Blame::Caller, "opening a port for the store", errno);
  }
  return socket;
}

int port_of(int socket) {
  sockaddr_storage storage{};
  socklen_t length = sizeof storage;
  getsockname(socket, reinterpret_cast<sockaddr*>(&storage), &length);
  return storage.ss_family == AF_INET6
             ? ntohs(reinterpret_cast<const sockaddr_in6*>(&storage)->sin6_port)
             : ntohs(reinterpret_cast<const sockaddr_in*>(&storage)->sin_port);
}

namespace {

// The first of the host's addresses that belongs to this machine, which is one that can be bound;
// "" if there is none.
std::string own_address_of(const std::string& host) {
  std::string ignored;
  const Addresses addresses = resolve(host, 0, SOCK_STREAM, ignored);
  for (const addrinfo* address = addresses.get(); address != nullptr; address = address->ai_next) {
    const Descriptor socket(::socket(address->ai_family, SOCK_STREAM | SOCK_CLOEXEC, 0));
    if (socket.get() >= 0 && ::bind(socket.get(), address->ai_addr, address->ai_addrlen) == 0) {
      return numeric(address->ai_addr, address->ai_addrlen);
    }
  }
  return "";
}

}  // namespace

bool is_this_machine(const std::string& host) { return !own_address_of(host).empty(); }

std::string default_address() {
  char name[256] = "";
  gethostname(name, sizeof name - 1);
  const std::string own = own_address_of(name);
  return own.empty() ? "127.0.0.1" : own;
}

std::string local_address_towards(const std::string& host, int port) {
  std::string ignored;
  const Addresses addresses = resolve(host, port, SOCK_DGRAM, ignored);
  for (const addrinfo* address = addresses.get(); address != nullptr; address = address->ai_next) {
    const Descriptor socket(::socket(address->ai_family, SOCK_DGRAM | SOCK_CLOEXEC, 0));
    if (socket.get() < 0 || ::connect(socket.get(), address->ai_addr, address->ai_addrlen) != 0)
      continue;  // connect() on a UDP socket sends nothing
    sockaddr_storage local{};
    socklen_t length = sizeof local;
    if (getsockname(socket.get(), reinterpret_cast<sockaddr*>(&local), &length) != 0) continue;
    return numeric(reinterpret_cast<const sockaddr*>(&local), length);
  }
  return "";
}

bool is_loopback(const std::string& address) {
  in_addr four{};
  if (inet_pton(AF_INET, address.c_str(), &four) == 1) return ntohl(four.s_addr) >> 24 == 127;
  in6_addr six{};
  if (inet_pton(AF_INET6, address.c_str(), &six) != 1) return false;
  return IN6_IS_ADDR_LOOPBACK(&six) || (IN6_IS_ADDR_V4MAPPED(&six) && six.s6_addr[12] == 127);
}

namespace {

// Names of the loopback: those of RFC 6761, and Debian's names of ::1.
bool names_loopback(const std::string& host) {
  return host == "localhost" || host.starts_with("localhost.") || host.ends_with(".localhost") ||
         host == "ip6-localhost" || host == "ip6-loopback" || is_loopback(host);
}

}  // namespace

std::string address_for_others(const std::string& host, const std::string& towards_host,
                               const std::string& outward) {
  const bool is_of_use = !is_loopback(towards_host) || names_loopback(host) || outward.empty();
  return is_of_use ? towards_host : outward;
}

std::string address_for_others(const std::string& host, int port) {
  return address_for_others(host, local_address_towards(host, port), outward_address());
}

std::string outward_address() {
  // Nobody has the addresses that are reserved for documentation (RFC 5737, 3849), so packets to
  // them take the default route. Nothing is sent.
  for (const char* nobody : {"203.0.113.1", "2001:db8::1"}) {
    const std::string local = local_address_towards(nobody, 9);
    if (!local.empty() && !is_loopback(local) && !local.starts_with("fe80:")) return local;
  }
  ifaddrs* list = nullptr;
  if (getifaddrs(&list) != 0) return "";
  const std::unique_ptr<ifaddrs, decltype(&freeifaddrs)> interfaces(list, &freeifaddrs);
  for (const ifaddrs* item = list; item != nullptr; item = item->ifa_next) {
    const bool is_running =
        (item->ifa_flags & IFF_RUNNING) != 0 && (item->ifa_flags & IFF_LOOPBACK) == 0;
    if (!is_running || item->ifa_addr == nullptr || item->ifa_addr->sa_family != AF_INET) continue;
    return numeric(item->ifa_addr, sizeof(sockaddr_in));
  }
  return "";
}

std::string interface_towards(const std::string& host, int port) {
  const std::string local = local_address_towards(host, port);
  ifaddrs* list = nullptr;
  if (local.empty() || getifaddrs(&list) != 0) return "";
  const std::unique_ptr<ifaddrs, decltype(&freeifaddrs)> interfaces(list, &freeifaddrs);
  for (const ifaddrs* item = list; item != nullptr; item = item->ifa_next) {
    const int family = item->ifa_addr == nullptr ? AF_UNSPEC : item->ifa_addr->sa_family;
    if (family != AF_INET && family != AF_INET6) continue;
    const auto length =
        static_cast<socklen_t>(family == AF_INET ? sizeof(sockaddr_in) : sizeof(sockaddr_in6));
    if (numeric(item->ifa_addr, length) == local) return item->ifa_name;
  }
  return "";
}

std::string address_of_interface(const std::string& name, int family) {
  ifaddrs* list = nullptr;
  if (getifaddrs(&list) != 0)
    throw system_error(Blame::Device, "reading the network interfaces", errno);
  const std::unique_ptr<ifaddrs, decltype(&freeifaddrs)> interfaces(list, &freeifaddrs);
  std::string known;
  std::string found[3];  // IPv4, IPv6, IPv6 link-local
  for (const ifaddrs* item = list; item != nullptr; item = item->ifa_next) {
    const int kind = item->ifa_addr == nullptr ? AF_UNSPEC : item->ifa_addr->sa_family;
    if (kind != AF_INET && kind != AF_INET6) continue;
    const std::string one = item->ifa_name;
    if (("," + known + ",").find("," + one + ",") == std::string::npos)
      known += (known.empty() ? "" : ",") + one;
    if (one != name || (family != AF_UNSPEC && family != kind)) continue;
    const auto* six = reinterpret_cast<const sockaddr_in6*>(item->ifa_addr);
    const int place = kind == AF_INET ? 0 : IN6_IS_ADDR_LINKLOCAL(&six->sin6_addr) ? 2 : 1;
    const auto length =
        static_cast<socklen_t>(kind == AF_INET ? sizeof(sockaddr_in) : sizeof(sockaddr_in6));
    if (found[place].empty()) found[place] = numeric(item->ifa_addr, length);
  }
  for (const std::string& address : found) {
    if (!address.empty()) return address;
  }
  const std::string kind = family == AF_INET ? "IPv4 " : family == AF_INET6 ? "IPv6 " : "";
  throw Error(Blame::Caller, "no interface '" + name + "' with an " + kind +
                                 "address (WEFT_SOCKET_IFNAME); there are: " + known);
}

bool is_multicast(const std::string& host) {
  const std::string address = host.substr(0, host.find('%'));
  in_addr four{};
  if (inet_pton(AF_INET, address.c_str(), &four) == 1) return IN_MULTICAST(ntohl(four.s_addr));
  in6_addr six{};
  return inet_pton(AF_INET6, address.c_str(), &six) == 1 && IN6_IS_ADDR_MULTICAST(&six);
}

LauncherFile::LauncherFile(const std::string& job) {
  const char* folder = std::getenv("TMPDIR");
  std::string name = job;
  for (char& letter : name) {
    if (std::isalnum(static_cast<unsigned char>(letter)) == 0) letter = '-';
  }
  path_ = std::string(folder != nullptr && *folder != '\0' ? folder : "/tmp") + "/weft-" +
          std::to_string(getuid()) + "-" + name;
}

LauncherFile::~LauncherFile() {
  int port = 0;
  // Another meeting may have replaced the file of one that failed.
  if (published_ != 0 && std::ifstream(path_) >> port && port == published_)
    ::unlink(path_.c_str());
}

void LauncherFile::publish(int port) {
  // Writes a temporary file and renames it, so that nobody reads half of it. mkostemp picks the
  // name, since a process of another container that shares the folder may have the same process id.
  std::string aside = path_ + ".XXXXXX";
  const Descriptor file(::mkostemp(aside.data(), O_CLOEXEC));
  if (!file) throw system_error(Blame::Caller, "writing " + aside, errno);
  const std::string text = std::to_string(port) + " " + std::to_string(getpid()) + "\n";
  const bool written =
      ::write(file.get(), text.data(), text.size()) == static_cast<ssize_t>(text.size());
  if (!written || ::rename(aside.c_str(), path_.c_str()) != 0) {
    const int number = errno;
    ::unlink(aside.c_str());
    throw system_error(Blame::Caller, "writing " + path_, number);
  }
  published_ = port;
}

int LauncherFile::port(Deadline deadline, const std::function<void()>& look) const {
  Backoff pause;
  for (;;) {
    struct stat status {};
    if (::lstat(path_.c_str(), &status) == 0 && S_ISREG(status.st_mode) &&
        status.st_uid == getuid()) {
      int port = 0;
      pid_t writer = 0;
      const bool whole = static_cast<bool>(std::ifstream(path_) >> port >> writer);
      if (whole && port > 0 && port < 65536 && writer > 0 && ::kill(writer, 0) == 0) return port;
    }
    if (deadline.passed())
      throw Error(Blame::Timeout, "rank 0 did not write its address into " + path_ + " in time");
    look();
    pause.wait(deadline);
  }
}

}  // namespace weft::group
