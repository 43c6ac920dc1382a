// SPDX-License-Identifier: Apache-2.0
// The ranks on which the claims about communicators are checked: each has a communicator of the
// backend under test, and memory that this communicator can use.
#pragma once

#include <chrono>
#include <functional>
#include <memory>
#include <ostream>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include <weft/base/event_loop.h>
#include <weft/transport/transport.h>

namespace weft::conformance {

using transport::Communicator;
using transport::Elements;

// Memory that the communicator under test can use. write() and read() return when the copy is made.
class Memory {
 public:
  virtual ~Memory() = default;
  virtual Slice slice() const = 0;
  virtual void write(const void* from) = 0;
  virtual void read(void* to) = 0;
};

// A fence that passes when the test opens it.
struct Gate {
  Fence fence;
  std::function<void()> open;
};

struct Rank {
  int rank = 0;
  int size = 1;
  std::shared_ptr<Communicator> communicator;
  std::shared_ptr<transport::Bootstrap> store;  // for the test itself
  std::shared_ptr<EventLoop> loop;
  std::function<std::shared_ptr<Memory>(std::size_t bytes)> allocate;
  std::function<Gate()> gate;
};

// One backend in one setting.
class Setting {
 public:
  virtual ~Setting() = default;
  virtual std::string name() const = 0;
  virtual int ranks() const = 0;
  // The reason why this machine cannot run the setting; empty if it can.
  virtual std::string why_not() const { return {}; }
  // True if a communicator notices by itself that a peer has ended; otherwise an operation ends at
  // its deadline.
  virtual bool sees_peers_end() const { return false; }
  // Timeout for operations that must run into it; still long enough to join.
  virtual std::chrono::milliseconds short_timeout() const {
    return std::chrono::milliseconds(1500);
  }
  // Runs the body on every rank, each on a thread or in a process of its own. A failure in it fails
  // the current test.
  virtual void run(std::chrono::milliseconds timeout,
                   const std::function<void(Rank&)>& body) const = 0;

  friend std::ostream& operator<<(std::ostream& out, const Setting& setting) {
    return out << setting.name();
  }
};

class CommunicatorClaims : public testing::TestWithParam<std::shared_ptr<Setting>> {
 protected:
  void SetUp() override {
    const std::string reason = GetParam()->why_not();
    if (!reason.empty()) GTEST_SKIP() << reason;
  }
  static void run(const std::function<void(Rank&)>& body) { run(std::chrono::seconds(60), body); }
  static void run(std::chrono::milliseconds timeout, const std::function<void(Rank&)>& body) {
    GetParam()->run(timeout, body);
  }
};

inline std::string name_of(const testing::TestParamInfo<std::shared_ptr<Setting>>& info) {
  return info.param->name();
}

// Waits until all ranks have called it, and drops the communicator: a rank that left earlier would
// discard bytes that others still wait for. (In a group, the engine does this.)
void leave(Rank& rank);

// Runs the body on threads, one for each rank; an exception from it fails the test.
void run_threads(int ranks, const std::function<void(int rank)>& body);

}  // namespace weft::conformance
