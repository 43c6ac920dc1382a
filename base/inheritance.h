// SPDX-License-Identifier: Apache-2.0
// Lets an object detect that it is a copy in a forked child. The child has none of the threads that
// the object relies on, and it shares the object's connections: the peer would take the child's
// messages for its parent's. So a child neither uses nor ends such objects.
#pragma once

#include <memory>
#include <string>

#include <sys/types.h>

namespace weft {

// A member of such an object. Any thread may use it.
class MadeIn {
 public:
  // Records that this process made the object.
  MadeIn();
  // True if this process is a child that was forked after the object was made.
  bool is_inherited() const noexcept;
  // Throws Caller for a use of an inherited object; `what` names the object: "agent worker0 (rank
  // 0)".
  [[noreturn]] void throw_inherited(const std::string& what) const;

 private:
  unsigned forks_;  // forks_before() of the process that made the object
  pid_t process_;
};

// Returns how many forks lead from the first process to this one.
unsigned forks_before() noexcept;

// Keeps an inherited object until the process ends, because its destructor would wait for threads
// that do not exist.
void keep_inherited(std::shared_ptr<const void> object);

}  // namespace weft
