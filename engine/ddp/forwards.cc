// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <utility>

#include <weft/engine/ddp/forwards.h>

namespace weft::parallel {

void Forwards::add(const std::shared_ptr<Forward>& forward) {
  forget_former();
  forwards_.push_back(forward);
}

void Forwards::add_hidden() {
  forget_former();
  hidden_ = hidden_.value_or(false) || synchronizing_;
}

void Forwards::forget_former() {
  std::erase_if(forwards_, [](const auto& weak) { return weak.expired(); });
  if (std::exchange(hidden_had_pass_, false)) hidden_.reset();
}

bool Forwards::await_backward() const {
  return std::any_of(forwards_.begin(), forwards_.end(), [](const auto& weak) {
    const auto forward = weak.lock();
    return forward && forward->synchronizes && !forward->had_backward;
  });
}

std::vector<std::size_t> Forwards::unused(std::size_t parameters) const {
  if (hidden_) return {};
  std::vector<std::size_t> uses(parameters);
  bool any = false;
  for (const auto& weak : forwards_) {
    const auto forward = weak.lock();
    if (!forward) continue;
    any = true;
    std::vector<bool> unused(parameters);
    for (const std::size_t parameter : forward->unused) unused[parameter] = true;
    for (std::size_t i = 0; i < uses.size(); ++i) uses[i] += unused[i] ? 0 : 1;
  }
  std::vector<std::size_t> result;
  for (std::size_t i = 0; any && i < uses.size(); ++i) {
    if (uses[i] == 0) result.push_back(i);
  }
  return result;
}

void Forwards::count(Forward& forward, bool counts) {
  if (std::exchange(forward.counts, counts) == counts) return;
  steps_ += counts ? 1 : -1;
}

}  // namespace weft::parallel
