// SPDX-License-Identifier: Apache-2.0
// The user's call, or the part of a model, to which the operations of this thread belong. Errors
// and wait reports name it in front of the operation ("checkpoint::save: all_gather_into #1"),
// which the user has never called; the flight recorder and the timeline keep it with the operation.
#pragma once

namespace weft::trace {

class CalledBy {
 public:
  // `name`: of static lifetime (see keep). Does nothing inside of another one, since the user has
  // called the outermost.
  explicit CalledBy(const char* name) : is_outermost_(outermost == nullptr) {
    if (is_outermost_) outermost = name;
  }
  ~CalledBy() {
    if (is_outermost_) outermost = nullptr;
  }
  CalledBy(const CalledBy&) = delete;
  CalledBy& operator=(const CalledBy&) = delete;

  // Null if the user has called the operation itself.
  static const char* name() { return outermost; }

 private:
  static inline thread_local const char* outermost = nullptr;
  const bool is_outermost_;
};

}  // namespace weft::trace
