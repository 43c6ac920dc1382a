// SPDX-License-Identifier: Apache-2.0
// Ranks that this one cannot reach any more: they have died or have left. A goodbye may still be on
// its way, so a rank is taken for lost only after a moment. Used on the job's loop only; nothing
// blocks.
#pragma once

#include <chrono>
#include <functional>
#include <map>
#include <memory>

#include <weft/base/event_loop.h>
#include <weft/engine/membership/link.h>

namespace weft::group {

// A rank that leaves waits at most so long for its neighbours, so its goodbye is not on its way any
// longer.
constexpr auto kLeavingPatience = std::chrono::seconds(1);

class Suspects : public std::enable_shared_from_this<Suspects> {
 public:
  // `may_hear` returns true while a neighbour is leaving, from which the goodbye may come. `lost`
  // is called for a rank that is no suspect then.
  Suspects(std::shared_ptr<EventLoop> loop, std::function<bool()> may_hear,
           std::function<void(int rank, const LinkEnd& end)> lost)
      : loop_(std::move(loop)), may_hear_(std::move(may_hear)), lost_(std::move(lost)) {}

  void add(int rank, const LinkEnd& end);
  // The rank is known to have left, or to be lost.
  void remove(int rank) { ranks_.erase(rank); }
  bool contains(int rank) const { return ranks_.contains(rank); }
  // From now on nobody is taken for lost: this rank leaves, and the others judge better.
  void stop();

 private:
  void judge_later();
  void judge();

  const std::shared_ptr<EventLoop> loop_;
  const std::function<bool()> may_hear_;
  const std::function<void(int, const LinkEnd&)> lost_;
  std::map<int, LinkEnd> ranks_;
  Deadline until_ = Deadline::never();
  EventLoop::Registration judging_;
  bool has_stopped_ = false;
};

}  // namespace weft::group
