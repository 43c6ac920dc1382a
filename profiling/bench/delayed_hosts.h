// SPDX-License-Identifier: Apache-2.0
// Hosts on one machine with a slow network between them, for benches that depend on round trips:
// network namespaces, between which a thread of this process carries packets after a delay, because
// not every kernel has netem. A token bucket of the kernel (tc) limits what each host sends, if
// asked to. Each host shows another boot and another name. Programs inside see an ordinary link.
// Needs root and TUN devices; changes nothing outside the namespaces, which end with this object.
#pragma once

#include <chrono>
#include <cstddef>
#include <filesystem>
#include <memory>
#include <string>
#include <thread>
#include <vector>

namespace weft::bench {

class DelayedHosts {
 public:
  static constexpr const char* kInterface = "weft0";
  // A host's token bucket lets so many bytes through at once.
  static constexpr std::size_t kBurstBytes = 20 << 10;

  struct Link {
    std::chrono::microseconds one_way;
    double bits_per_second = 0;  // that each host may send; 0: no limit
  };
  // Null, with the reason, if this machine does not allow it.
  static std::unique_ptr<DelayedHosts> make(int hosts, const Link& link, std::string& why_not);
  ~DelayedHosts();
  DelayedHosts(const DelayedHosts&) = delete;
  DelayedHosts& operator=(const DelayedHosts&) = delete;

  static std::string address(int host);
  // Wraps the command so that each rank runs it on its host: the first so many ranks on the first
  // host, and so on.
  std::vector<std::string> wrap(const std::vector<std::string>& command, int ranks_per_host) const;
  // A program that runs a command on the host with that address, as ssh does: PATH ADDRESS COMMAND.
  std::string agent() const { return folder_ / "agent"; }
  // Why packets may be late, if the kernel does not allow the carrying thread to run first; else
  // "".
  const std::string& why_late() const { return why_late_; }

 private:
  struct Host {
    int space = -1;   // its network namespace
    int device = -1;  // yields the packets that it sends, takes those that it receives
  };
  explicit DelayedHosts(std::chrono::microseconds one_way) : one_way_(one_way) {}
  // Each returns why it failed, or "".
  std::string add_host(const Link& link);
  std::string write_scripts();
  void carry() const;

  const std::chrono::microseconds one_way_;
  std::vector<Host> hosts_;
  std::filesystem::path folder_;  // of scripts and boot ids
  int ends_[2] = {-1, -1};        // a pipe; closing it ends the thread
  std::string why_late_;
  std::thread carrier_;
};

}  // namespace weft::bench
