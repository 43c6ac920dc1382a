// SPDX-License-Identifier: Apache-2.0
// A move-only callable without arguments, for loops to run and fences to call.
// (std::move_only_function is C++23.)
#pragma once

#include <memory>
#include <type_traits>
#include <utility>

namespace weft {

class Task {
 public:
  Task() = default;
  template <class F>
  requires(!std::is_same_v<std::remove_cvref_t<F>, Task> &&
           std::is_invocable_v<std::remove_cvref_t<F>&>) Task(F&& function)
      // Not make_unique: it would instantiate one more function for each type, which is slow to
      // compile where one call makes several tasks.
      : body_(new Body<std::remove_cvref_t<F>>(std::forward<F>(function))) {}

  explicit operator bool() const { return body_ != nullptr; }
  void operator()() { body_->run(); }

 private:
  struct Callable {
    virtual ~Callable() = default;
    virtual void run() = 0;
  };
  template <class F>
  struct Body final : Callable {
    template <class G>
    explicit Body(G&& g) : function(std::forward<G>(g)) {}
    void run() override { function(); }
    F function;
  };
  std::unique_ptr<Callable> body_;
};

}  // namespace weft
