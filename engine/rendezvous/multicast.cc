// SPDX-License-Identifier: Apache-2.0
#include <atomic>
#include <cerrno>
#include <random>

#include <net/if.h>
#include <netinet/in.h>
#include <sys/epoll.h>

#include <weft/base/config.h>
#include <weft/base/error.h>
#include <weft/base/event_loop.h>
#include <weft/base/log.h>
#include <weft/base/make_error.h>
#include <weft/engine/rendezvous/discovery.h>
#include <weft/engine/rendezvous/multicast.h>

namespace weft::group {

namespace {

constexpr auto kLook = std::chrono::seconds(1);  // how often a waiting process may report
constexpr auto kInterval =
    std::chrono::milliseconds(100);  // between announcements when nothing happens
constexpr auto kAtMost = std::chrono::milliseconds(2);  // least time between announcements
constexpr int kDatagramsAtOnce = 64;

struct Interface {
  std::string name;
  unsigned index = 0;
  std::string address;
};

Interface choose_interface(const std::string& group, int port, int family) {
  const auto percent = group.find('%');
  Interface chosen;
  if (!config().socket_interfaces.empty()) {
    chosen.name = config().socket_interfaces.front();
  } else if (percent != std::string::npos) {
    chosen.name = group.substr(percent + 1);
  } else {
    chosen.name = interface_towards(group, port);
  }
  if (chosen.name.empty()) chosen.name = "lo";
  chosen.address = address_of_interface(chosen.name, family);
  chosen.index = if_nametoindex(chosen.name.c_str());
  return chosen;
}

std::uint64_t random_nonce() {
  std::random_device device;
  std::uint64_t nonce = 0;
  while (nonce == 0) nonce = (static_cast<std::uint64_t>(device()) << 32) | device();
  return nonce;
}

// The multicast group as an address to bind and to send to, on the interface.
SocketAddress group_address(const std::string& group, int port, const Interface& interface) {
  SocketAddress address = socket_address(group.substr(0, group.find('%')), port);
  if (address.storage.ss_family == AF_INET6) {
    reinterpret_cast<sockaddr_in6*>(&address.storage)->sin6_scope_id = interface.index;
  }
  return address;
}

// A socket that receives from the group and sends to it, on one interface.
Descriptor join_group(const SocketAddress& group, const Interface& interface) {
  const int family = group.storage.ss_family;
  Descriptor socket(::socket(family, SOCK_DGRAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0));
  bool done = socket.get() >= 0;
  const auto set = [&](int level, int name, const auto& value) {
    done = done && setsockopt(socket.get(), level, name, &value, sizeof value) == 0;
  };
  set(SOL_SOCKET, SO_REUSEADDR, 1);
  done = done && ::bind(socket.get(), group.get(), group.length) == 0;
  if (family == AF_INET) {
    ip_mreqn request{};
    request.imr_multiaddr = reinterpret_cast<const sockaddr_in*>(&group.storage)->sin_addr;
    const SocketAddress own = socket_address(interface.address, 0);
    // The source address of the datagrams.
    request.imr_address = reinterpret_cast<const sockaddr_in*>(&own.storage)->sin_addr;
    request.imr_ifindex = static_cast<int>(interface.index);
    set(IPPROTO_IP, IP_ADD_MEMBERSHIP, request);
    set(IPPROTO_IP, IP_MULTICAST_IF, request);
    set(IPPROTO_IP, IP_MULTICAST_LOOP, 1);
    set(IPPROTO_IP, IP_MULTICAST_TTL, 1);
  } else {
    ipv6_mreq request{};
    request.ipv6mr_multiaddr = reinterpret_cast<const sockaddr_in6*>(&group.storage)->sin6_addr;
    request.ipv6mr_interface = interface.index;
    set(IPPROTO_IPV6, IPV6_JOIN_GROUP, request);
    set(IPPROTO_IPV6, IPV6_MULTICAST_IF, static_cast<int>(interface.index));
    set(IPPROTO_IPV6, IPV6_MULTICAST_LOOP, 1);
    set(IPPROTO_IPV6, IPV6_MULTICAST_HOPS, 1);
  }
  if (!done)
    throw system_error(Blame::Caller, "joining the multicast group on interface " + interface.name,
                       errno);
  return socket;
}

// Announces this process and listens to the others, from construction to destruction. Its state
// belongs to its loop.
class Discovery {
 public:
  Discovery(const SocketAddress& group, const Interface& interface, Announcement self)
      : group_(group),
        socket_(join_group(group, interface)),
        state_(std::move(self), Clock::now()),
        loop_("weft multicast") {
    if (!announce()) {
      throw system_error(
          Blame::Caller,
          "announcing over interface " + interface.name +
              ": does it have a route for multicast? WEFT_SOCKET_IFNAME chooses another interface",
          errno);
    }
    loop_.post([this] {
      watch_ = loop_.watch(socket_.get(), EPOLLIN, [this](std::uint32_t) { on_readable(); });
      announce_in(kInterval);
    });
  }

  ~Discovery() {
    std::atomic<bool> ended{false};
    loop_.post([&] {
      watch_.reset();
      timer_.reset();
      // A process that leaves because too many have come must not make the number look right to the
      // rest.
      Announcement bye = state_.to_announce(Clock::now());
      bye.kind = AnnouncementKind::Bye;
      if (!state_.conflict()) send(bye);
      ended = true;
    });
    loop_.drive([&ended] { return ended.load(); });
  }

  Discovery(const Discovery&) = delete;
  Discovery& operator=(const Discovery&) = delete;

  // Blocks until the set is decided or in conflict; returns false if the deadline passes first.
  bool wait(Deadline deadline) {
    return loop_.drive([this] { return over_.load(std::memory_order_acquire); }, deadline);
  }
  // Does not change once wait() has returned true.
  const DiscoveryState& state() const { return state_; }
  std::string describe() {
    std::string text;
    std::atomic<bool> told{false};
    loop_.post([&] {
      text = state_.describe(Clock::now());
      told = true;
    });
    loop_.drive([&told] { return told.load(); });
    return text;
  }

 private:
  using Clock = std::chrono::steady_clock;

  bool send(const Announcement& announcement) {
    const std::string datagram = encode(announcement);
    return ::sendto(socket_.get(), datagram.data(), datagram.size(), MSG_NOSIGNAL, group_.get(),
                    group_.length) >= 0;
  }

  bool announce() {
    last_ = Clock::now();
    const bool sent = send(state_.to_announce(last_));
    if (state_.decided() || state_.conflict()) over_.store(true, std::memory_order_release);
    return sent;
  }

  void announce_in(std::chrono::milliseconds delay) {
    timer_ = loop_.at(Deadline::in(delay), [this] {
      announce();
      announce_in(kInterval);
    });
  }

  void on_readable() {
    bool news = false;
    for (int i = 0; i < kDatagramsAtOnce; ++i) {
      char buffer[512];  // longer than any announcement, so a truncated datagram is never valid
      SocketAddress from;
      from.length = sizeof from.storage;
      const auto count = ::recvfrom(socket_.get(), buffer, sizeof buffer, 0,
                                    reinterpret_cast<sockaddr*>(&from.storage), &from.length);
      if (count < 0) break;
      const auto announcement = decode({buffer, static_cast<std::size_t>(count)});
      if (announcement) news |= state_.hear(*announcement, numeric_address(from), Clock::now());
    }
    if (!news) return;
    if (Clock::now() - last_ >= kAtMost) {
      announce();
      announce_in(kInterval);
    } else {
      announce_in(kAtMost);
    }
  }

  const SocketAddress group_;
  Descriptor socket_;
  DiscoveryState state_;
  Clock::time_point last_;
  std::atomic<bool> over_{false};
  EventLoop loop_;  // after the members that its thread uses
  EventLoop::Registration watch_;
  EventLoop::Registration timer_;
};

}  // namespace

MulticastMeeting meet_by_multicast(
    const std::string& address, int port, const std::string& group, std::optional<int> rank,
    int world_size, Deadline deadline,
    const std::function<void(const std::function<std::string()>& who_came)>& look) {
  const std::string where = "tcp://[" + address + "]:" + std::to_string(port);
  if (group.size() > kMaxAnnouncedName) {
    throw Error(Blame::Caller, where + ": the group_name is longer than " +
                                   std::to_string(kMaxAnnouncedName) + " bytes");
  }
  try {
    const int family = address.find(':') == std::string::npos ? AF_INET : AF_INET6;
    const Interface interface = choose_interface(address, port, family);
    log::debug("meeting at " + where + " over interface " + interface.name + " (" +
               interface.address + ")");
    Descriptor listener = open_listener(family, 0);
    const Announcement self{AnnouncementKind::Here,
                            random_nonce(),
                            world_size,
                            rank,
                            port_of(listener.get()),
                            0,
                            group};
    const auto discovery =
        std::make_shared<Discovery>(group_address(address, port, interface), interface, self);
    while (!discovery->wait(Deadline::sooner(deadline, Deadline::in(kLook)))) {
      if (deadline.passed())
        throw Error(Blame::Timeout, "only " + discovery->describe() + " came in time");
      look([&] { return discovery->describe(); });
    }
    const DiscoveryState& state = discovery->state();
    if (state.conflict()) throw *state.conflict();
    return {state.rank(),
            state.hosts(),
            state.hosts() ? interface.address : state.host_address(),
            state.host_port(),
            std::move(listener),
            interface.address,
            discovery};
  } catch (const Error& error) {
    throw error.within(where);
  }
}

}  // namespace weft::group
