// SPDX-License-Identifier: Apache-2.0
// The plans of one autograd context's passes in BackwardMode::Exact. A plan says which messages
// lead to a pass's roots; it has the number of the pass that made it, and later passes from the
// same roots use it again. Not thread-safe: Passes locks.
#pragma once

#include <cstddef>
#include <map>
#include <optional>
#include <set>
#include <unordered_map>
#include <vector>

#include <torch/csrc/autograd/edge.h>

#include <weft/engine/autograd/ids.h>
#include <weft/engine/autograd/recording.h>

namespace weft::autograd {

using Edges = std::vector<torch::autograd::Edge>;

class Plans {
 public:
  struct Plan {
    std::set<MessageId> messages;  // the messages that count
    Edges roots;  // the roots it is or will be kept under; they keep their graph alive
  };
  // Adds messages to the plan, which is made if it is new; returns those that were not in it.
  Recording::Sends add(PassId plan, const Recording::Sends& sends);
  // Null if there is no such plan.
  const std::set<MessageId>* messages_of(PassId plan) const;
  // At the root, when the plan is complete. If the pass that made it succeeds, it is kept under
  // these roots until a pass without retain_graph ends.
  void complete(PassId plan, const Edges& roots);
  // The plan of an earlier pass from the same roots that has succeeded.
  std::optional<PassId> planned_for(const Edges& roots) const;
  // Called when a pass has ended. Returns a plan that no other pass will use, or its roots; the
  // caller destroys that without a lock.
  [[nodiscard]] Plan ended(const PassName& pass, bool has_failed);
  std::size_t size() const { return plans_.size(); }

 private:
  struct HashOfEdges {
    std::size_t operator()(const Edges& edges) const noexcept;
  };
  std::map<PassId, Plan> plans_;
  std::unordered_map<Edges, PassId, HashOfEdges> planned_;
};

}  // namespace weft::autograd
