// SPDX-License-Identifier: Apache-2.0
// Hosts on one machine with a slow network between them, for benches that depend on round trips:
// network namespaces, between which a thread of this process carries packets after a delay.
// Programs inside see an ordinary link. Needs root and TUN devices; changes nothing outside the
// namespaces, which end with this object.
#pragma once

#include <chrono>
#include <memory>
#include <string>
#include <thread>
#include <vector>

namespace weft::bench {

class DelayedHosts {
 public:
  static constexpr const char* kInterface = "weft0";

  // Null, with the reason, if this machine does not allow it.
  static std::unique_ptr<DelayedHosts> make(int hosts, std::chrono::microseconds one_way,
                                            std::string& why_not);
  ~DelayedHosts();
  DelayedHosts(const DelayedHosts&) = delete;
  DelayedHosts& operator=(const DelayedHosts&) = delete;

  static std::string address(int host);
  // Wraps the command so that each rank runs it on the host of its number.
  std::vector<std::string> with_a_host_each(const std::vector<std::string>& command) const;

 private:
  struct Host {
    int space = -1;   // its network namespace
    int device = -1;  // yields the packets that it sends, takes those that it receives
  };
  explicit DelayedHosts(std::chrono::microseconds one_way) : one_way_(one_way) {}
  void carry() const;

  const std::chrono::microseconds one_way_;
  std::vector<Host> hosts_;
  int ends_[2] = {-1, -1};  // a pipe; closing it ends the thread
  std::thread carrier_;
};

}  // namespace weft::bench
