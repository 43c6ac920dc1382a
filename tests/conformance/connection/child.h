// The other end of a lane in a process of its own. Fork it before the test makes threads.
#pragma once

#include <chrono>
#include <functional>
#include <string>

#include <sys/types.h>

namespace weft::conformance {

class Child {
 public:
  // Runs the body in a new process, which ends when the body returns: well if no expectation failed
  // and nothing was thrown. It is killed after its lifetime, and when the test ends.
  explicit Child(const std::function<void(Child& self)>& body,
                 std::chrono::seconds lifetime = std::chrono::minutes(1));
  ~Child();
  Child(const Child&) = delete;
  Child& operator=(const Child&) = delete;

  // Lines from one process to the other. read() blocks; empty when the other process has ended.
  void say(const std::string& line) const;
  std::string hear();

  void kill();
  void signal(int number) const;
  // Blocks until it has ended; fails the test if it did not end well.
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
