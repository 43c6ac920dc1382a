// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cctype>
#include <cerrno>
#include <charconv>
#include <cstdio>
#include <cstring>
#include <fstream>
#include <functional>
#include <memory>

#include <arpa/inet.h>
#include <ifaddrs.h>
#include <net/if.h>
#include <netdb.h>
#include <netinet/in.h>
#include <unistd.h>

#include <weft/base/descriptor.h>
#include <weft/base/make_error.h>
#include <weft/transport/tcp/address.h>

namespace weft::transport::tcp {

namespace {

constexpr std::size_t kMaxText = 4096;  // addresses come from peers

const sockaddr_in* four(const SocketAddress& address) {
  return reinterpret_cast<const sockaddr_in*>(&address.storage);
}
const sockaddr_in6* six(const SocketAddress& address) {
  return reinterpret_cast<const sockaddr_in6*>(&address.storage);
}

class Parser {
 public:
  explicit Parser(const std::string& text) : text_(text) {}

  Address parse() const {
    if (text_.size() > kMaxText)
      fail("it is longer than " + std::to_string(kMaxText) + " characters");
    Address address;
    const auto mark = text_.find('#');
    if (mark != std::string::npos) address.identity = identity(text_.substr(mark + 1));
    const std::string list = text_.substr(0, mark);
    for (std::size_t begin = 0; begin <= list.size();) {
      const auto end = std::min(list.find(',', begin), list.size());
      address.hosts.push_back(host(list.substr(begin, end - begin)));
      begin = end + 1;
    }
    return address;
  }

 private:
  [[noreturn]] void fail(const std::string& why) const {
    throw Error(Blame::Caller,
                "tcp address '" + text_.substr(0, 200) + "': " + why +
                    "; it looks like 192.0.2.1:4711,[2001:db8::1]:4711 or node7:4711");
  }

  Host host(const std::string& item) const {
    if (item.empty()) fail("a host is missing");
    Host found;
    if (item.front() == '[') {
      const auto close = item.find(']');
      if (close == std::string::npos) fail("'" + item + "' opens a bracket and does not close it");
      found.name = item.substr(1, close - 1);
      if (close + 1 >= item.size() || item[close + 1] != ':') fail("'" + item + "' has no port");
      found.port = port(item, item.substr(close + 2));
      check_six(item, found.name);
      return found;
    }
    const auto colon = item.rfind(':');
    if (colon == std::string::npos) fail("'" + item + "' has no port");
    found.name = item.substr(0, colon);
    found.port = port(item, item.substr(colon + 1));
    check_name(item, found.name);
    return found;
  }

  int port(const std::string& item, const std::string& digits) const {
    int value = 0;
    const auto [end, error] = std::from_chars(digits.data(), digits.data() + digits.size(), value);
    if (error != std::errc() || end != digits.data() + digits.size() || value < 1 ||
        value > 65535) {
      fail("'" + item + "' has the port '" + digits + "', which is not a number from 1 to 65535");
    }
    return value;
  }

  void check_six(const std::string& item, const std::string& name) const {
    const auto percent = name.find('%');
    in6_addr ignored{};
    if (inet_pton(AF_INET6, name.substr(0, percent).c_str(), &ignored) != 1) {
      fail("'" + item + "' has no IPv6 address between the brackets");
    }
    if (percent == std::string::npos) return;
    const std::string scope = name.substr(percent + 1);
    const auto odd = [](unsigned char letter) { return letter <= ' ' || letter > '~'; };
    if (scope.empty() || scope.size() >= IF_NAMESIZE ||
        std::any_of(scope.begin(), scope.end(), odd)) {
      fail("'" + item + "' has no interface after the %");
    }
  }

  void check_name(const std::string& item, const std::string& name) const {
    if (name.empty()) fail("'" + item + "' has no host");
    if (name.find(':') != std::string::npos)
      fail("'" + item + "': write an IPv6 address in brackets");
    if (name.find_first_of("[]") != std::string::npos)
      fail("'" + item + "' closes a bracket that is not open");
    const auto odd = [](unsigned char letter) {
      return std::isalnum(letter) == 0 && letter != '-' && letter != '.' && letter != '_';
    };
    if (std::any_of(name.begin(), name.end(), odd))
      fail("'" + name + "' is neither an address nor a host's name");
    in_addr ignored{};
    if (name.find_first_not_of("0123456789.") == std::string::npos &&
        inet_pton(AF_INET, name.c_str(), &ignored) != 1) {
      fail("'" + name + "' is not an IPv4 address");
    }
  }

  Identity identity(const std::string& part) const {
    const auto dot = part.find('.');
    Identity found;
    const auto number = [](std::string_view digits, std::size_t count, auto& value) {
      const auto [end, error] =
          std::from_chars(digits.data(), digits.data() + digits.size(), value, 16);
      return digits.size() == count && error == std::errc() && end == digits.data() + digits.size();
    };
    if (dot == std::string::npos ||
        !number(std::string_view(part).substr(0, dot), 8, found.machine) ||
        !number(std::string_view(part).substr(dot + 1), 16, found.listener)) {
      fail("'#" + part + "' does not name a listener");
    }
    return found;
  }

  const std::string& text_;
};

using Interfaces = std::unique_ptr<ifaddrs, decltype(&freeifaddrs)>;

Interfaces interfaces() {
  ifaddrs* list = nullptr;
  if (getifaddrs(&list) != 0)
    throw system_error(Blame::Busy, "tcp: cannot read the network interfaces", errno);
  return {list, &freeifaddrs};
}

SocketAddress from_sockaddr(const sockaddr* address) {
  SocketAddress made;
  made.length = address->sa_family == AF_INET6 ? sizeof(sockaddr_in6) : sizeof(sockaddr_in);
  std::memcpy(&made.storage, address, made.length);
  return made;
}

// IPv4 first. Link-local IPv6 only if there is nothing else, because peers must know the interface
// on their side to use it.
std::vector<SocketAddress> in_order(std::vector<SocketAddress> found) {
  std::stable_sort(found.begin(), found.end(), [](const auto& a, const auto& b) {
    return std::make_pair(a.is_link_local(), a.family() != AF_INET) <
           std::make_pair(b.is_link_local(), b.family() != AF_INET);
  });
  if (!found.empty() && !found.front().is_link_local()) {
    std::erase_if(found, [](const SocketAddress& address) { return address.is_link_local(); });
  }
  return found;
}

std::vector<SocketAddress> addresses_where(const std::function<bool(const ifaddrs&)>& chosen) {
  std::vector<SocketAddress> found;
  const auto list = interfaces();
  for (const ifaddrs* item = list.get(); item != nullptr; item = item->ifa_next) {
    const int family = item->ifa_addr == nullptr ? AF_UNSPEC : item->ifa_addr->sa_family;
    if ((family == AF_INET || family == AF_INET6) && chosen(*item))
      found.push_back(from_sockaddr(item->ifa_addr));
  }
  return in_order(std::move(found));
}

std::string interface_names() {
  std::vector<std::string> names;
  const auto list = interfaces();
  for (const ifaddrs* item = list.get(); item != nullptr; item = item->ifa_next) {
    if (std::find(names.begin(), names.end(), item->ifa_name) == names.end())
      names.emplace_back(item->ifa_name);
  }
  std::string text;
  for (const auto& name : names) text += (text.empty() ? "" : ", ") + name;
  return text;
}

bool is_any(const SocketAddress& address) {
  return address.family() == AF_INET ? four(address)->sin_addr.s_addr == htonl(INADDR_ANY)
                                     : IN6_IS_ADDR_UNSPECIFIED(&six(address)->sin6_addr);
}

Result<std::vector<SocketAddress>> look_up(const Host& host, int flags) {
  addrinfo hints{};
  hints.ai_socktype = SOCK_STREAM;
  hints.ai_flags = flags | AI_NUMERICSERV;
  addrinfo* list = nullptr;
  const int code = getaddrinfo(host.name.c_str(), std::to_string(host.port).c_str(), &hints, &list);
  if (code != 0) {
    const std::string why = code == EAI_SYSTEM ? std::strerror(errno) : gai_strerror(code);
    return Error(Blame::PeerLost, "the host '" + host.name + "' cannot be resolved: " + why);
  }
  const std::unique_ptr<addrinfo, decltype(&freeaddrinfo)> owned(list, &freeaddrinfo);
  std::vector<SocketAddress> found;
  for (const addrinfo* item = list; item != nullptr; item = item->ai_next) {
    if (item->ai_family == AF_INET || item->ai_family == AF_INET6)
      found.push_back(from_sockaddr(item->ai_addr));
  }
  return found;
}

}  // namespace

int SocketAddress::port() const {
  return ntohs(family() == AF_INET6 ? six(*this)->sin6_port : four(*this)->sin_port);
}

void SocketAddress::set_port(int port) {
  const auto value = htons(static_cast<std::uint16_t>(port));
  if (family() == AF_INET6) {
    reinterpret_cast<sockaddr_in6*>(&storage)->sin6_port = value;
  } else {
    reinterpret_cast<sockaddr_in*>(&storage)->sin_port = value;
  }
}

bool SocketAddress::is_loopback() const {
  if (family() == AF_INET) return ntohl(four(*this)->sin_addr.s_addr) >> 24 == 127;
  return family() == AF_INET6 && IN6_IS_ADDR_LOOPBACK(&six(*this)->sin6_addr);
}

bool SocketAddress::is_link_local() const {
  return family() == AF_INET6 && IN6_IS_ADDR_LINKLOCAL(&six(*this)->sin6_addr);
}

std::string SocketAddress::text() const {
  char name[NI_MAXHOST];
  if (getnameinfo(get(), length, name, sizeof name, nullptr, 0, NI_NUMERICHOST) != 0)
    return "an unnamed socket";
  return Host{name, port()}.text();
}

bool operator==(const SocketAddress& a, const SocketAddress& b) {
  return a.length == b.length && std::memcmp(&a.storage, &b.storage, a.length) == 0;
}

std::string Host::text() const {
  const bool brackets = name.find(':') != std::string::npos;
  return (brackets ? "[" + name + "]:" : name + ":") + std::to_string(port);
}

std::string Address::text() const {
  std::string made;
  for (const Host& host : hosts) made += (made.empty() ? "" : ",") + host.text();
  if (!identity.given()) return made;
  char who[32];
  std::snprintf(who, sizeof who, "#%08x.%016llx", identity.machine,
                static_cast<unsigned long long>(identity.listener));
  return made + who;
}

Address Address::parse(const std::string& text) { return Parser(text).parse(); }

std::uint32_t this_machine() {
  std::string boot;
  errno = 0;
  std::ifstream file("/proc/sys/kernel/random/boot_id");
  if (!file && is_shortage(errno)) {
    throw system_error(Blame::Busy, "tcp: cannot tell which machine this is", errno);
  }
  std::getline(file, boot);
  char space[64];
  const auto length = ::readlink("/proc/self/ns/net", space, sizeof space);
  if (length > 0) boot.append(space, static_cast<std::size_t>(length));
  std::uint32_t hash = 2166136261u;  // FNV-1a: the same in every build
  for (const unsigned char letter : boot) hash = (hash ^ letter) * 16777619u;
  return hash == 0 ? 1 : hash;
}

std::optional<SocketAddress> numeric_address(const Host& host) {
  const auto found = look_up(host, AI_NUMERICHOST);
  if (!found || found.value().empty()) return std::nullopt;
  return found.value().front();
}

Result<std::vector<SocketAddress>> resolve(const Host& host) { return look_up(host, 0); }

std::vector<SocketAddress> local_addresses(const std::string& interface_address) {
  if (interface_address.empty())
    return {*numeric_address({"127.0.0.1", 0}), *numeric_address({"::1", 0})};
  if (const auto one = numeric_address({interface_address, 0})) {
    if (!is_any(*one)) return {*one};
    for (const bool loopback : {false, true}) {
      auto all = addresses_where([&](const ifaddrs& item) {
        return item.ifa_addr->sa_family == one->family() &&
               ((item.ifa_flags & IFF_LOOPBACK) != 0) == loopback;
      });
      if (!all.empty()) return all;
    }
  }
  auto named =
      addresses_where([&](const ifaddrs& item) { return interface_address == item.ifa_name; });
  if (!named.empty()) return named;
  auto resolved = resolve({interface_address, 0});
  if (resolved && !resolved.value().empty()) return in_order(std::move(resolved).value());
  throw Error(Blame::Caller, "tcp: '" + interface_address +
                                 "' is not an address, an interface with an address, or a " +
                                 "host name; interfaces here: " + interface_names());
}

}  // namespace weft::transport::tcp
