// Tells objects that they are a copy in a forked child. A child that was forked has a copy of them,
// but none of the threads that they rely on, and it shares their connections: what it sent there
// would be taken for its parent's. So it neither uses nor ends them.
#pragma once

#include <memory>
#include <string>

#include <sys/types.h>

namespace weft {

// A member of such an object. Usable from every thread.
class MadeIn {
 public:
  // By this process.
  MadeIn();
  // Whether this process is a child that was forked after the object was made.
  bool is_inherited() const noexcept;
  // Throws Caller, of a use where it is; `what` names the object: "agent worker0 (rank 0)".
  [[noreturn]] void throw_inherited(const std::string& what) const;

 private:
  unsigned forks_;  // that lead from the first process to the one that made it
  pid_t process_;
};

// How many forks lead from the first process to this one.
unsigned forks_before() noexcept;

// Keeps an inherited object until the process ends, whose destructor would wait for threads that
// are not there.
void keep_inherited(std::shared_ptr<const void> object);

}  // namespace weft
