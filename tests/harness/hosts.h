// SPDX-License-Identifier: Apache-2.0
// Hosts for ranks of a test: network namespaces whose cables end in a switch, and in which the
// kernel shows another boot. Making them takes root.
#pragma once

#include <cstdlib>
#include <fstream>
#include <string>
#include <thread>
#include <vector>

#include <fcntl.h>
#include <sched.h>
#include <sys/mount.h>
#include <unistd.h>

#include <weft/base/descriptor.h>
#include <weft/tests/harness/folder.h>

namespace weft::harness {

class Hosts {
 public:
  // why_not() tells if that failed. Each host has the device weft0.
  explicit Hosts(int count) {
    if (::geteuid() != 0) {
      why_not_ = "creating network namespaces needs root";
      return;
    }
    // The last one is the switch.
    for (int host = 0; host <= count; ++host) spaces_.push_back(fresh_space());
    if (!spaces_.back() || !spaces_.front()) {
      why_not_ = "no network namespaces may be made";
      return;
    }
    run(count, "link add switch type bridge");
    run(count, "link set switch up");
    for (int host = 0; host < count; ++host) {
      const std::string port = port_of(host);
      run(count, "link add " + port + " type veth peer name weft0 netns " + path(host));
      run(count, "link set " + port + " master switch");
      run(count, "link set " + port + " up");
      run(host, "addr add " + address(host) + "/24 dev weft0");
      run(host, "link set lo up");
      run(host, "link set weft0 up");
      if (host == 0) continue;
      std::ofstream(boot_id(host)) << "00000000-1111-2222-3333-44444444444" << host << "\n";
    }
  }

  const std::string& why_not() const { return why_not_; }
  static std::string address(int host) { return "10.77.9." + std::to_string(host + 1); }

  // Moves this process, which has one thread, to the host. Returns false if it may not.
  static constexpr const char* kMayNotEnter =
      "this container may not mount over /proc/sys/kernel/random/boot_id";
  bool enter(int host) const {
    constexpr const char* kBootId = "/proc/sys/kernel/random/boot_id";
    const std::string id = host == 0 ? kBootId : boot_id(host);
    return ::setns(spaces_[static_cast<std::size_t>(host)].get(), CLONE_NEWNET) == 0 &&
           ::unshare(CLONE_NEWNS) == 0 &&
           ::mount("none", "/", nullptr, MS_REC | MS_PRIVATE, nullptr) == 0 &&
           ::mount(id.c_str(), kBootId, nullptr, MS_BIND, nullptr) == 0 &&
           ::setenv("WEFT_SOCKET_IFNAME", "weft0", 1) == 0;
  }

  // Pulls the host's cable out of the switch: packets vanish, and nobody is told.
  void unplug(int host) {
    run(static_cast<int>(spaces_.size()) - 1, "link set " + port_of(host) + " down");
  }
  void plug(int host) {
    run(static_cast<int>(spaces_.size()) - 1, "link set " + port_of(host) + " up");
  }
  // Puts these hosts' cables into a switch of their own: packets to and from the others vanish.
  void put_apart(const std::vector<int>& hosts) {
    const int space = static_cast<int>(spaces_.size()) - 1;
    run(space, "link add apart type bridge");
    run(space, "link set apart up");
    for (const int host : hosts) run(space, "link set " + port_of(host) + " master apart");
  }
  // Switches the host's own device off: its kernel knows no way to other hosts any more.
  void switch_off(int host) { run(host, "link set weft0 down"); }

 private:
  static Descriptor fresh_space() {
    Descriptor space;
    // A namespace belongs to a thread.
    std::thread([&] {
      if (::unshare(CLONE_NEWNET) == 0)
        space = Descriptor(::open("/proc/thread-self/ns/net", O_RDONLY | O_CLOEXEC));
    }).join();
    return space;
  }
  static std::string port_of(int host) { return "port" + std::to_string(host); }
  std::string path(int host) const {
    return "/proc/" + std::to_string(::getpid()) + "/fd/" +
           std::to_string(spaces_[static_cast<std::size_t>(host)].get());
  }
  std::string boot_id(int host) const { return folder_.path() + "/boot" + std::to_string(host); }
  // Runs ip(8) on the host.
  void run(int host, const std::string& arguments) {
    const std::string command = "nsenter --net=" + path(host) + " ip " + arguments;
    if (std::system(("( " + command + " ) >/dev/null 2>&1").c_str()) != 0 && why_not_.empty())
      why_not_ = "failed: " + command;
  }

  const Folder folder_;
  std::vector<Descriptor> spaces_;
  std::string why_not_;
};

}  // namespace weft::harness
