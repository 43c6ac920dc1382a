// The call of a user that the operations of this thread belong to. Errors and reports of waits name
// it in front of the operation ("checkpoint::save: all_gather_into #1"), which the user has never
// called.
#pragma once

namespace weft::group {

class CalledBy {
 public:
  // `name`: a literal. Inside of another one this does nothing: the user has called the outermost.
  explicit CalledBy(const char* name) : is_outermost_(name_ == nullptr) {
    if (is_outermost_) name_ = name;
  }
  ~CalledBy() {
    if (is_outermost_) name_ = nullptr;
  }
  CalledBy(const CalledBy&) = delete;
  CalledBy& operator=(const CalledBy&) = delete;

  // Null where the user has called the operation.
  static const char* name() { return name_; }

 private:
  static inline thread_local const char* name_ = nullptr;
  const bool is_outermost_;
};

}  // namespace weft::group
