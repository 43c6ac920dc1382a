// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cerrno>
#include <cstddef>
#include <deque>
#include <fstream>
#include <memory>
#include <random>
#include <string>

#include <arpa/inet.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <sys/un.h>

#include <weft/base/error.h>
#include <weft/base/fork_mutex.h>
#include <weft/base/make_error.h>
#include <weft/base/mutex.h>
#include <weft/engine/launch/process.h>
#include <weft/engine/launch/reserved_port.h>

namespace weft::launch {

namespace {

constexpr int kTries = 100;           // ports of the range, and then of the kernel
constexpr std::size_t kMostHeld = 8;  // ports that free_port() keeps reserved

Error no_port(int number) { return system_error(Blame::Busy, "looking for a free port", number); }

// Binds `port` on all interfaces (0: a port that the kernel chooses) and returns it, or -1 if it is
// taken.
int bindable(int port) {
  const Descriptor socket(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_ANY);
  address.sin_port = htons(static_cast<std::uint16_t>(port));
  socklen_t length = sizeof address;
  if (socket && ::bind(socket.get(), reinterpret_cast<sockaddr*>(&address), length) == 0 &&
      ::getsockname(socket.get(), reinterpret_cast<sockaddr*>(&address), &length) == 0)
    return ntohs(address.sin_port);
  if (errno != EADDRINUSE && errno != EACCES) throw no_port(errno);
  return -1;
}

// The first of the ports that the kernel gives to connecting sockets.
int first_handed_out() {
  int first = 0;
  std::ifstream("/proc/sys/net/ipv4/ip_local_port_range") >> first;
  return first;
}

}  // namespace

std::optional<ReservedPort> ReservedPort::of(int port) {
  Descriptor socket(::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0));
  if (!socket) throw no_port(errno);
  const std::string name = "weft/port/" + std::to_string(port);
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  name.copy(address.sun_path + 1, sizeof address.sun_path - 1);  // a 0 before the name: abstract
  const auto length = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + name.size());
  if (::bind(socket.get(), reinterpret_cast<const sockaddr*>(&address), length) == 0)
    return ReservedPort(port, std::move(socket));
  if (errno == EADDRINUSE) return std::nullopt;
  return ReservedPort(port, {});
}

ReservedPort ReservedPort::choose(int first, int end) {
  std::random_device random;
  const int range = std::max(end - first, 0);
  const int begin = range > 0 ? std::uniform_int_distribution(0, range - 1)(random) : 0;
  const int in_range = std::min(range, kTries);
  for (int i = 0; i < in_range + kTries; ++i) {
    const int port = i < in_range ? first + (begin + i) % range : bindable(0);
    if (port < 0) break;
    auto reserved = of(port);
    // Once the port is reserved, no other process of Weft takes it between this look and its use.
    if (reserved && bindable(port) > 0) return std::move(*reserved);
  }
  throw no_port(EADDRINUSE);
}

int free_port() {
  constexpr int kLowest = 16384;
  static constinit ForkMutex mutex(ForkOrder::Counts);
  // Never destroyed: static variables of others may choose ports until the end.
  static auto* const held WEFT_POINTEE_GUARDED_BY(mutex) =
      std::make_unique<std::deque<ReservedPort>>().release();
  ReservedPort chosen = ReservedPort::choose(kLowest, first_handed_out());
  const int port = chosen.number();
  MutexLock lock(mutex);
  held->push_back(std::move(chosen));
  if (held->size() > kMostHeld) held->pop_front();
  return port;
}

}  // namespace weft::launch
