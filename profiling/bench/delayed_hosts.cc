// SPDX-License-Identifier: Apache-2.0
#include <cerrno>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <fstream>
#include <future>
#include <system_error>

#include <fcntl.h>
#include <linux/if_tun.h>
#include <net/if.h>
#include <poll.h>
#include <pthread.h>
#include <sched.h>
#include <sys/ioctl.h>
#include <sys/prctl.h>
#include <unistd.h>

#include <weft/profiling/bench/delayed_hosts.h>

namespace weft::bench {

namespace {

using Clock = std::chrono::steady_clock;

// In front of each packet: struct virtio_net_hdr, whose header C++ cannot read.
constexpr std::size_t kHeaderBytes = 10;
constexpr std::size_t kMostBytes = kHeaderBytes + (64 << 10);
constexpr std::size_t kAddressEnd = kHeaderBytes + 19;  // the last byte of an IPv4 destination
constexpr std::size_t kMostWaiting = 64 << 20;          // bytes; more are lost, as on a real link
// The kernel leaves cutting segments to the device, as to a network card, up to this length. With
// the headers of its segments, a packet fits into the token bucket.
constexpr int kLongestPacket = 16 << 10;

struct Packet {
  Clock::time_point due;
  std::size_t to = 0;
  std::vector<std::byte> data;
};

std::string failed(const char* what) { return std::string(what) + ": " + std::strerror(errno); }

std::string run(const std::string& command) {
  return std::system(command.c_str()) == 0 ? "" : "'" + command + "' failed";
}

// Lets the calling thread run before others, as a wire does not wait for processors. Returns why it
// may not, or "".
std::string run_first() {
  prctl(PR_SET_TIMERSLACK, 1);
  const sched_param first{.sched_priority = 1};
  const int error = pthread_setschedparam(pthread_self(), SCHED_FIFO, &first);
  return error == 0 ? ""
                    : std::string("the thread that carries packets may not run first: ") +
                          std::strerror(error);
}

}  // namespace

std::string DelayedHosts::address(int host) { return "10.93.0." + std::to_string(host + 1); }

std::unique_ptr<DelayedHosts> DelayedHosts::make(int hosts, const Link& link,
                                                 std::string& why_not) {
  std::unique_ptr<DelayedHosts> made(new DelayedHosts(link.one_way));
  if (pipe2(made->ends_, O_CLOEXEC) != 0) return why_not = failed("pipe"), nullptr;
  while (why_not.empty() && static_cast<int>(made->hosts_.size()) < hosts)
    why_not = made->add_host(link);
  if (why_not.empty()) why_not = made->write_scripts();
  if (!why_not.empty()) return nullptr;
  std::promise<std::string> late;
  made->carrier_ = std::thread([raw = made.get(), &late] {
    late.set_value(run_first());
    raw->carry();
  });
  made->why_late_ = late.get_future().get();
  return made;
}

std::string DelayedHosts::add_host(const Link& link) {
  const int host = static_cast<int>(hosts_.size());
  Host& one = hosts_.emplace_back();
  std::string why_not;
  // Runs on a new thread, because a namespace belongs to a thread and to the processes that it
  // starts.
  std::thread([&] {
    if (unshare(CLONE_NEWNET) != 0)
      return static_cast<void>(why_not = failed("no network namespace"));
    one.space = open("/proc/thread-self/ns/net", O_RDONLY | O_CLOEXEC);
    one.device = open("/dev/net/tun", O_RDWR | O_NONBLOCK | O_CLOEXEC);
    ifreq request{};
    request.ifr_flags = IFF_TUN | IFF_NO_PI | IFF_VNET_HDR;
    std::strncpy(request.ifr_name, kInterface, IFNAMSIZ - 1);
    if (one.device < 0 || ioctl(one.device, TUNSETIFF, &request) != 0)
      return static_cast<void>(why_not = failed("no TUN device"));
    if (ioctl(one.device, TUNSETOFFLOAD, TUN_F_CSUM | TUN_F_TSO4) != 0)
      return static_cast<void>(why_not = failed("no segmentation by a TUN device"));
    const std::string device = kInterface;
    why_not = run("ip link set lo up && ip address add " + address(host) + "/24 dev " + device +
                  " && ip link set " + device + " gso_max_size " + std::to_string(kLongestPacket) +
                  " up");
    if (!why_not.empty() || link.bits_per_second == 0) return;
    why_not = run("tc qdisc add dev " + device + " root tbf rate " +
                  std::to_string(std::llround(link.bits_per_second)) + "bit burst " +
                  std::to_string(kBurstBytes) + " limit " + std::to_string(kMostWaiting));
  }).join();
  return why_not;
}

std::string DelayedHosts::write_scripts() {
  std::string name = std::filesystem::temp_directory_path() / "weft-hosts-XXXXXX";
  if (mkdtemp(name.data()) == nullptr) return failed("no temporary folder");
  folder_ = name;
  std::string spaces;
  std::ofstream names(folder_ / "hosts");
  names << "127.0.0.1 localhost\n";
  for (std::size_t host = 0; host < hosts_.size(); ++host) {
    for (const char* prefix : {"", "::ffff:"})  // c10d asks for the IPv6 form
      names << prefix << address(static_cast<int>(host)) << " weft-host" << host << "\n";
    std::ofstream(folder_ / ("boot" + std::to_string(host)))
        << "00000000-1111-2222-3333-4444444444" << 10 + host << "\n";
    spaces += " /proc/" + std::to_string(getpid()) + "/fd/" + std::to_string(hosts_[host].space);
  }
  std::ofstream(folder_ / "enter")
      << "#!/bin/bash\n"
      << "spaces=(" << spaces << " ); host=$1; shift\n"
      << "exec nsenter --net=${spaces[$host]} unshare --mount --uts bash -c '\n"
      << "  mount --bind " << name << "/boot$0 /proc/sys/kernel/random/boot_id || exit\n"
      << "  mount --bind " << name << "/hosts /etc/hosts && hostname weft-host$0 || exit\n"
      << "  exec \"$@\"' $host \"$@\"\n";
  std::ofstream(folder_ / "agent") << "#!/bin/bash\n"
                                   << "host=$((${1##*.} - 1)); shift\n"
                                   << "exec " << name << "/enter $host bash -c \"$*\"\n";
  for (const char* script : {"enter", "agent"})
    std::filesystem::permissions(folder_ / script, std::filesystem::perms::owner_all);
  return run(name + "/enter 0 true");
}

DelayedHosts::~DelayedHosts() {
  close(ends_[1]);
  if (carrier_.joinable()) carrier_.join();
  close(ends_[0]);
  for (const Host& host : hosts_) {
    close(host.device);
    close(host.space);
  }
  std::error_code ignored;
  if (!folder_.empty()) std::filesystem::remove_all(folder_, ignored);
}

std::vector<std::string> DelayedHosts::wrap(const std::vector<std::string>& command,
                                            int ranks_per_host) const {
  const std::string script = "exec '" + (folder_ / "enter").string() + "' $((RANK / " +
                             std::to_string(ranks_per_host) + ")) \"$@\"";
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
  std::size_t waiting_bytes = 0;
  std::vector<std::byte> data(kMostBytes);
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
    for (const Host& host : hosts_) {
      for (ssize_t count = 0; (count = read(host.device, data.data(), data.size())) > 0;) {
        const auto bytes = static_cast<std::size_t>(count);
        const bool is_ipv4 =
            bytes > kAddressEnd && std::to_integer<int>(data[kHeaderBytes]) >> 4 == 4;
        const std::size_t to =
            is_ipv4 ? std::to_integer<std::size_t>(data[kAddressEnd]) - 1 : hosts_.size();
        if (to >= hosts_.size() || waiting_bytes + bytes > kMostWaiting) continue;
        waiting.push_back({Clock::now() + one_way_, to, {data.data(), data.data() + bytes}});
        waiting_bytes += bytes;
      }
    }
    while (!waiting.empty() && waiting.front().due <= Clock::now()) {
      const Packet& packet = waiting.front();
      [[maybe_unused]] const auto gone =
          write(hosts_[packet.to].device, packet.data.data(), packet.data.size());
      waiting_bytes -= packet.data.size();
      waiting.pop_front();
    }
  }
}

}  // namespace weft::bench
