// SPDX-License-Identifier: Apache-2.0
// A connector's messages wait here until the listener has proved that it knows Options::secret, or
// until the connection has ended: then sending them fails. So calls may be issued meanwhile.
#pragma once

#include <atomic>
#include <string>
#include <string_view>
#include <vector>

#include <weft/base/mutex.h>
#include <weft/base/task.h>
#include <weft/transport/challenge.h>

namespace weft::call {

inline constexpr std::string_view kChallengePurpose = "weft rpc challenge 1";

class Gate {
 public:
  explicit Gate(const std::string& secret)
      : challenge(transport::Side::Connector, secret, kChallengePurpose) {}

  // Opened by the thread that connects, and then used on the loop.
  transport::Challenge challenge;

  // Runs the task, or keeps it until open(). This and the next two may be called by any thread.
  void pass(Task task);
  void open();
  bool is_open() const { return open_; }

 private:
  Mutex mutex_;
  std::atomic<bool> open_{false};
  std::vector<Task> waiting_ WEFT_GUARDED_BY(mutex_);
};

}  // namespace weft::call
