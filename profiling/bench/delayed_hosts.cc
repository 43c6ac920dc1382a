// SPDX-License-Identifier: Apache-2.0
#include <array>
#include <cerrno>
#include <cstddef>
#include <cstdlib>
#include <cstring>
#include <deque>

#include <fcntl.h>
#include <linux/if_tun.h>
#include <net/if.h>
#include <poll.h>
#include <sched.h>
#include <sys/ioctl.h>
#include <unistd.h>

#include <weft/profiling/bench/delayed_hosts.h>

namespace weft::bench {

namespace {

using Clock = std::chrono::steady_clock;

constexpr std::size_t kMostBytes = 2048;       // of a packet; the devices' MTU is 1500
constexpr std::size_t kAddressEnd = 19;        // the last byte of an IPv4 packet's destination
constexpr std::size_t kMostWaiting = 1 << 16;  // packets; more are lost, as on a real link

struct Packet {
  Clock::time_point due;
  std::size_t to = 0;
  std::size_t bytes = 0;
  std::array<std::byte, kMostBytes> data;
};

std::string failed(const char* what) { return std::string(what) + ": " + std::strerror(errno); }

}  // namespace

std::string DelayedHosts::address(int host) { return "10.93.0." + std::to_string(host + 1); }

std::unique_ptr<DelayedHosts> DelayedHosts::make(int hosts, std::chrono::microseconds one_way,
                                                 std::string& why_not) {
  std::unique_ptr<DelayedHosts> made(new DelayedHosts(one_way));
  if (pipe2(made->ends_, O_CLOEXEC) != 0) return why_not = failed("pipe"), nullptr;
  for (int host = 0; host < hosts && why_not.empty(); ++host) {
    Host one;
    // Runs on a new thread, because a namespace belongs to a thread and to the processes that it
    // starts.
    std::thread([&] {
      if (unshare(CLONE_NEWNET) != 0)
        return static_cast<void>(why_not = failed("no network namespace"));
      one.space = open("/proc/thread-self/ns/net", O_RDONLY | O_CLOEXEC);
      one.device = open("/dev/net/tun", O_RDWR | O_NONBLOCK | O_CLOEXEC);
      ifreq request{};
      request.ifr_flags = IFF_TUN | IFF_NO_PI;
      std::strncpy(request.ifr_name, kInterface, IFNAMSIZ - 1);
      if (one.device < 0 || ioctl(one.device, TUNSETIFF, &request) != 0) {
        why_not = failed("no TUN device");
        return;
      }
      const std::string device = kInterface;
      const std::string setup = "ip link set lo up && ip address add " + address(host) +
                                "/24 dev " + device + " && ip link set " + device + " up";
      if (std::system(setup.c_str()) != 0) why_not = "'" + setup + "' failed";
    }).join();
    made->hosts_.push_back(one);
  }
  if (!why_not.empty()) return nullptr;
  made->carrier_ = std::thread([raw = made.get()] { raw->carry(); });
  return made;
}

DelayedHosts::~DelayedHosts() {
  close(ends_[1]);
  if (carrier_.joinable()) carrier_.join();
  close(ends_[0]);
  for (const Host& host : hosts_) {
    close(host.device);
    close(host.space);
  }
}

std::vector<std::string> DelayedHosts::with_a_host_each(
    const std::vector<std::string>& command) const {
  std::string script = "spaces=(";
  for (const Host& host : hosts_)
    script += " /proc/" + std::to_string(getpid()) + "/fd/" + std::to_string(host.space);
  script += " ); exec nsenter --net=${spaces[$RANK]} \"$@\"";
  std::vector<std::string> wrapped{"bash", "-c", script, "bash"};
  wrapped.insert(wrapped.end(), command.begin(), command.end());
  return wrapped;
}

void DelayedHosts::carry() const {
  std::vector<pollfd> watched;
  for (const Host& host : hosts_) watched.push_back({host.device, POLLIN, 0});
  watched.push_back({ends_[0], POLLIN, 0});
  // All packets wait equally long, so they leave in the order in which they arrived.
  std::deque<Packet> waiting;
  for (;;) {
    const timespec* limit = nullptr;
    timespec left{};
    if (!waiting.empty()) {
      const auto time = std::max(Clock::duration(0), waiting.front().due - Clock::now());
      left.tv_sec = std::chrono::duration_cast<std::chrono::seconds>(time).count();
      left.tv_nsec = (time % std::chrono::seconds(1)).count();
      limit = &left;
    }
    ppoll(watched.data(), watched.size(), limit, nullptr);
    if (watched.back().revents != 0) return;
    for (std::size_t from = 0; from < hosts_.size(); ++from) {
      Packet packet;
      for (ssize_t bytes = 0;
           (bytes = read(hosts_[from].device, packet.data.data(), kMostBytes)) > 0;) {
        packet.bytes = static_cast<std::size_t>(bytes);
        const bool is_ipv4 =
            packet.bytes > kAddressEnd && std::to_integer<int>(packet.data[0]) >> 4 == 4;
        packet.to =
            is_ipv4 ? std::to_integer<std::size_t>(packet.data[kAddressEnd]) - 1 : hosts_.size();
        packet.due = Clock::now() + one_way_;
        if (packet.to < hosts_.size() && waiting.size() < kMostWaiting) waiting.push_back(packet);
      }
    }
    while (!waiting.empty() && waiting.front().due <= Clock::now()) {
      const Packet& packet = waiting.front();
      [[maybe_unused]] const auto gone =
          write(hosts_[packet.to].device, packet.data.data(), packet.bytes);
      waiting.pop_front();
    }
  }
}

}  // namespace weft::bench
