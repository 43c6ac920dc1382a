#include <cerrno>
#include <cstring>
#include <fstream>
#include <memory>
#include <utility>

#include <arpa/inet.h>
#include <fcntl.h>
#include <ifaddrs.h>
#include <netdb.h>
#include <netinet/in.h>
#include <poll.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

#include <weft/base/error.h>
#include <weft/engine/group/address.h>

namespace weft::group {

namespace {

using std::chrono::milliseconds;
using Addresses = std::unique_ptr<addrinfo, decltype(&freeaddrinfo)>;

constexpr auto kLook = milliseconds(5);

class Socket {
 public:
  explicit Socket(int descriptor) : descriptor_(descriptor) {}
  ~Socket() {
    if (descriptor_ >= 0) ::close(descriptor_);
  }
  Socket(const Socket&) = delete;
  Socket& operator=(const Socket&) = delete;
  int get() const { return descriptor_; }
  int release() { return std::exchange(descriptor_, -1); }

 private:
  int descriptor_;
};

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

// One attempt: a connected socket, or -1 and the reason in `number`.
int try_connect(const addrinfo& address, milliseconds patience, int& number) {
  Socket socket(::socket(address.ai_family, address.ai_socktype | SOCK_NONBLOCK | SOCK_CLOEXEC, address.ai_protocol));
  number = socket.get() < 0 ? errno : 0;
  if (number != 0) return -1;
  if (::connect(socket.get(), address.ai_addr, address.ai_addrlen) == 0) return socket.release();
  number = errno;
  if (number != EINPROGRESS) return -1;
  pollfd ready{socket.get(), POLLOUT, 0};
  if (::poll(&ready, 1, static_cast<int>(patience.count())) != 1) {
    number = ETIMEDOUT;
    return -1;
  }
  socklen_t length = sizeof number;
  getsockopt(socket.get(), SOL_SOCKET, SO_ERROR, &number, &length);
  return number == 0 ? socket.release() : -1;
}

// Waits for the next look, bounded by the deadline.
void pause(Deadline deadline) {
  const auto left = std::min(deadline.remaining(), kLook);
  ::poll(nullptr, 0, static_cast<int>(left.count()));
}

}  // namespace

int connect_to(const std::string& host, int port, Deadline deadline) {
  const std::string where = host + ":" + std::to_string(port);
  for (;;) {
    std::string failure;
    const Addresses addresses = resolve(host, port, SOCK_STREAM, failure);
    for (const addrinfo* address = addresses.get(); address != nullptr; address = address->ai_next) {
      int number = 0;
      const int socket = try_connect(*address, std::min(deadline.remaining(), milliseconds(2000)), number);
      if (socket >= 0) return socket;
      failure = std::strerror(number);
    }
    if (deadline.passed()) {
      throw Error(addresses ? Blame::Timeout : Blame::Caller, "nobody answered at " + where + " in time: " + failure +
                                                                  "; has rank 0 started, and can this host reach it?");
    }
    pause(deadline);
  }
}

void wait_for_listener(const std::string& host, int port, Deadline deadline) { ::close(connect_to(host, port, deadline)); }

SocketAddress socket_address(const std::string& host, int port) {
  addrinfo hints{};
  hints.ai_flags = AI_NUMERICHOST | AI_NUMERICSERV;
  hints.ai_socktype = SOCK_STREAM;
  addrinfo* list = nullptr;
  if (getaddrinfo(host.c_str(), std::to_string(port).c_str(), &hints, &list) != 0) {
    throw Error(Blame::Caller, "'" + host + "' is no IP address");
  }
  const Addresses addresses(list, &freeaddrinfo);
  SocketAddress address;
  std::memcpy(&address.storage, list->ai_addr, list->ai_addrlen);
  address.length = list->ai_addrlen;
  return address;
}

int port_of(int socket) {
  sockaddr_storage storage{};
  socklen_t length = sizeof storage;
  getsockname(socket, reinterpret_cast<sockaddr*>(&storage), &length);
  return storage.ss_family == AF_INET6 ? ntohs(reinterpret_cast<const sockaddr_in6*>(&storage)->sin6_port)
                                       : ntohs(reinterpret_cast<const sockaddr_in*>(&storage)->sin_port);
}

std::string default_address() {
  char name[256] = "";
  gethostname(name, sizeof name - 1);
  std::string ignored;
  const Addresses addresses = resolve(name, 0, SOCK_STREAM, ignored);
  for (const addrinfo* address = addresses.get(); address != nullptr; address = address->ai_next) {
    const Socket socket(::socket(address->ai_family, SOCK_STREAM | SOCK_CLOEXEC, 0));
    if (socket.get() >= 0 && ::bind(socket.get(), address->ai_addr, address->ai_addrlen) == 0) {
      return numeric(address->ai_addr, address->ai_addrlen);
    }
  }
  return "127.0.0.1";
}

std::string local_address_towards(const std::string& host, int port) {
  std::string ignored;
  const Addresses addresses = resolve(host, port, SOCK_DGRAM, ignored);
  for (const addrinfo* address = addresses.get(); address != nullptr; address = address->ai_next) {
    const Socket socket(::socket(address->ai_family, SOCK_DGRAM | SOCK_CLOEXEC, 0));
    if (socket.get() < 0 || ::connect(socket.get(), address->ai_addr, address->ai_addrlen) != 0) continue;  // sends nothing
    sockaddr_storage local{};
    socklen_t length = sizeof local;
    if (getsockname(socket.get(), reinterpret_cast<sockaddr*>(&local), &length) != 0) continue;
    return numeric(reinterpret_cast<const sockaddr*>(&local), length);
  }
  return "";
}

std::string address_of_interface(const std::string& name) {
  ifaddrs* list = nullptr;
  if (getifaddrs(&list) != 0) throw system_error(Blame::Device, "reading the network interfaces", errno);
  const std::unique_ptr<ifaddrs, decltype(&freeifaddrs)> interfaces(list, &freeifaddrs);
  std::string known;
  for (const int family : {AF_INET, AF_INET6}) {
    for (const ifaddrs* item = list; item != nullptr; item = item->ifa_next) {
      if (item->ifa_addr == nullptr || item->ifa_addr->sa_family != family) continue;
      if (item->ifa_name == name) {
        return numeric(item->ifa_addr, family == AF_INET ? sizeof(sockaddr_in) : sizeof(sockaddr_in6));
      }
      if (family == AF_INET) known += (known.empty() ? "" : ", ") + std::string(item->ifa_name);
    }
  }
  throw Error(Blame::Caller, "no interface '" + name + "' with an address (WEFT_SOCKET_IFNAME); there are: " + known);
}

bool is_multicast(const std::string& host) {
  in_addr four{};
  if (inet_pton(AF_INET, host.c_str(), &four) == 1) return IN_MULTICAST(ntohl(four.s_addr));
  in6_addr six{};
  return inet_pton(AF_INET6, host.c_str(), &six) == 1 && IN6_IS_ADDR_MULTICAST(&six);
}

LauncherFile::LauncherFile(const std::string& job) {
  const char* folder = std::getenv("TMPDIR");
  std::string name = job;
  for (char& letter : name) {
    if (std::isalnum(static_cast<unsigned char>(letter)) == 0) letter = '-';
  }
  path_ = std::string(folder != nullptr && *folder != '\0' ? folder : "/tmp") + "/weft-" + std::to_string(getuid()) + "-" +
          name;
}

LauncherFile::~LauncherFile() {
  if (published_) ::unlink(path_.c_str());
}

void LauncherFile::publish(int port) {
  // Written aside and moved into place, so that nobody reads half of it.
  const std::string aside = path_ + "." + std::to_string(getpid());
  const int file = ::open(aside.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, 0600);
  if (file < 0) throw system_error(Blame::Caller, "writing " + aside, errno);
  const std::string text = std::to_string(port) + "\n";
  const bool written = ::write(file, text.data(), text.size()) == static_cast<ssize_t>(text.size());
  ::close(file);
  if (!written || ::rename(aside.c_str(), path_.c_str()) != 0) throw system_error(Blame::Caller, "writing " + path_, errno);
  published_ = true;
}

int LauncherFile::port(Deadline deadline) const {
  for (;;) {
    struct stat status {};
    if (::lstat(path_.c_str(), &status) == 0 && S_ISREG(status.st_mode) && status.st_uid == getuid()) {
      int port = 0;
      if (std::ifstream(path_) >> port && port > 0 && port < 65536) return port;
    }
    if (deadline.passed()) throw Error(Blame::Timeout, "rank 0 did not write its address into " + path_ + " in time");
    pause(deadline);
  }
}

}  // namespace weft::group
