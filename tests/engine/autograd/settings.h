// SPDX-License-Identifier: Apache-2.0
// Shared by the tests of autograd: the settings they run in, and ways to call another worker.
#pragma once

#include <algorithm>
#include <chrono>
#include <functional>
#include <string>
#include <thread>
#include <vector>

#include <gtest/gtest.h>

#include <weft/autograd.h>
#include <weft/tests/engine/rpc/workers.h>

namespace weft::harness {

inline std::vector<Setting> autograd_settings() { return settings({2, 4}); }
inline auto setting_name = [](const auto& info) { return name(info.param); };

inline at::Tensor leaf(at::IntArrayRef sizes) {
  return at::rand(sizes, at::TensorOptions().dtype(at::kDouble)).requires_grad_();
}

// Ways to call a function on another worker and get its result.
enum class Way { Sync, Async, Remote };
inline constexpr Way kWays[] = {Way::Sync, Way::Async, Way::Remote};
inline const char* name(Way way) {
  return way == Way::Sync ? "sync" : way == Way::Async ? "async" : "remote";
}
// `who` is an agent, with the worker to call as first argument, or a reference, for a method of its
// value.
template <auto F, class Who, class... A>
auto called(Way way, Who& who, A&&... arguments) {
  if (way == Way::Sync) return who.template sync<F>(std::forward<A>(arguments)...);
  if (way == Way::Async) return who.template async<F>(std::forward<A>(arguments)...).get();
  return who.template remote<F>(std::forward<A>(arguments)...).to_here();
}

}  // namespace weft::harness
