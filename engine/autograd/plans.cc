// SPDX-License-Identifier: Apache-2.0
#include <utility>

#include <c10/util/hash.h>

#include <weft/engine/autograd/plans.h>

namespace weft::autograd {

Recording::Sends Plans::add(PassId plan, const Recording::Sends& sends) {
  Recording::Sends fresh;
  auto& planned = plans_[plan].messages;
  for (const auto& send : sends) {
    if (planned.insert(send->message()).second) fresh.push_back(send);
  }
  return fresh;
}

const std::set<MessageId>* Plans::messages_of(PassId plan) const {
  const auto found = plans_.find(plan);
  return found == plans_.end() ? nullptr : &found->second.messages;
}

void Plans::complete(PassId plan, const Edges& roots) { plans_[plan].roots = roots; }

std::size_t Plans::HashOfEdges::operator()(const Edges& edges) const noexcept {
  std::size_t hash = edges.size();
  for (const auto& edge : edges)
    hash = c10::hash_combine(hash, std::hash<torch::autograd::Edge>()(edge));
  return hash;
}

std::optional<PassId> Plans::planned_for(const Edges& roots) const {
  const auto found = planned_.find(roots);
  return found == planned_.end() ? std::nullopt : std::optional(found->second);
}

Plans::Plan Plans::ended(const PassName& pass, bool has_failed) {
  const auto found = plans_.find(pass.plan);
  if (found == plans_.end()) return {};
  Plan& plan = found->second;
  const auto kept = planned_.find(plan.roots);
  // Other passes use a plan only after the pass that made it has succeeded.
  if (!pass.retain_graph || (has_failed && pass.plan == pass.pass)) {
    if (kept != planned_.end() && kept->second == found->first) planned_.erase(kept);
    Plan dropped = std::move(plan);
    plans_.erase(found);
    return dropped;
  }
  if (plan.roots.empty()) return {};
  if (kept == planned_.end()) {
    planned_.emplace(plan.roots, found->first);
  } else if (kept->second != found->first) {
    // A pass that ran at the same time has kept a plan for these roots first.
    return {.messages = {}, .roots = std::exchange(plan.roots, {})};
  }
  return {};
}

}  // namespace weft::autograd
