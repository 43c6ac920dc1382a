// SPDX-License-Identifier: Apache-2.0
#include <utility>
#include <vector>

#include <weft/engine/call/wait_all.h>

namespace weft::call {

namespace {

thread_local std::vector<Future<void>>* tracking = nullptr;

class Tracking {
 public:
  explicit Tracking(std::vector<Future<void>>& calls) : before_(std::exchange(tracking, &calls)) {}
  ~Tracking() { tracking = before_; }
  Tracking(const Tracking&) = delete;
  Tracking& operator=(const Tracking&) = delete;

 private:
  std::vector<Future<void>>* before_;
};

}  // namespace

namespace detail {

Untracked::Untracked() : before_(std::exchange(tracking, nullptr)) {}
Untracked::~Untracked() { tracking = before_; }

bool is_tracking() { return tracking != nullptr; }
void track(Future<void> end) { tracking->push_back(std::move(end)); }

}  // namespace detail

}  // namespace weft::call

namespace weft::rpc {

std::size_t wait_all(const std::function<void()>& function) {
  std::vector<Future<void>> calls;
  std::exception_ptr error;
  try {
    const call::Tracking scope(calls);
    function();
  } catch (...) {
    error = std::current_exception();
  }
  for (const auto& call : calls) {
    try {
      call.get();
    } catch (...) {
      if (!error) error = std::current_exception();
    }
  }
  if (error) std::rethrow_exception(error);
  return calls.size();
}

}  // namespace weft::rpc
