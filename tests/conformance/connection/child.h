// SPDX-License-Identifier: Apache-2.0
// The other end of a connection in a process of its own. Fork it before the test makes threads.
#pragma once

#include <chrono>
#include <functional>
#include <string>

#include <sys/types.h>

namespace weft::conformance {

class Child {
 public:
  // Runs the body in a new process, which ends when the body returns, with status 0 if no
  // expectation failed and nothing was thrown. The process is killed after its lifetime, and when
  // the test ends.
  explicit Child(const std::function<void(Child& self)>& body,
                 std::chrono::seconds lifetime = std::chrono::minutes(1));
  ~Child();
  Child(const Child&) = delete;
  Child& operator=(const Child&) = delete;

  // Send a line to the other process; receive one. hear() blocks; it returns an empty line when the
  // other process has ended.
  void say(const std::string& line) const;
  std::string hear();

  void kill();
  void signal(int number) const;
  // Blocks until the process has ended; fails the test if its status is not 0.
  void expect_success();

 private:
  [[noreturn]] void live(const std::function<void(Child& self)>& body);
  void reap(bool must_be_well);

  const std::chrono::seconds lifetime_;
  pid_t process_ = 0;
  int socket_ = -1;
  std::string heard_;
};

}  // namespace weft::conformance
