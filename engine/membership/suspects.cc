// SPDX-License-Identifier: Apache-2.0
#include <chrono>
#include <utility>

#include <weft/engine/membership/suspects.h>

namespace weft::group {

namespace {

// How long a goodbye may take if no neighbour is leaving: a child of that rank tells it to its next
// parent.
constexpr auto kGoodbyesCome = std::chrono::milliseconds(50);

}  // namespace

void Suspects::add(int rank, const LinkEnd& end) {
  if (ranks_.empty()) until_ = Deadline::in(kLeavingPatience);
  ranks_.emplace(rank, end);
  if (!judging_ && !has_stopped_) judge_later();
}

void Suspects::stop() {
  has_stopped_ = true;
  judging_.reset();
}

void Suspects::judge_later() {
  judging_ = loop_->at(Deadline::in(kGoodbyesCome), [weak = weak_from_this()] {
    if (const auto self = weak.lock()) self->judge();
  });
}

void Suspects::judge() {
  if (has_stopped_) return;
  if (may_hear_() && !until_.passed()) return judge_later();
  for (const auto& [rank, end] : std::exchange(ranks_, {})) lost_(rank, end);
}

}  // namespace weft::group
