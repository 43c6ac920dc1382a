// SPDX-License-Identifier: Apache-2.0
#include <tuple>

#include <weft/profiling/tools/participants.h>
#include <weft/profiling/tools/wording.h>

namespace weft::tools {

namespace {

// The identity of a participant: the dump; if the dump has several ranks, the rank; and if that is
// ambiguous, whether the rank is one of a group or of an agent.
using Key = std::tuple<std::size_t, int, bool>;

// The ranks that have views in one dump.
struct Ranks {
  std::set<int> of_groups;
  std::set<int> of_agents;
  bool are_several = false;
};

std::map<std::size_t, Ranks> ranks_by_dump(const Dumps& dumps) {
  std::map<std::size_t, Ranks> all;
  for (const Group& group : dumps.groups) {
    std::set<std::size_t> seen;
    for (const auto& [rank, view] : group.views) {
      Ranks& ranks = all[view.dump];
      ranks.of_groups.insert(view.job_rank);
      ranks.are_several |= !seen.insert(view.dump).second;
    }
  }
  for (const auto& [rank, view] : dumps.agents) all[view.dump].of_agents.insert(rank);
  for (auto& [dump, ranks] : all) ranks.are_several |= ranks.of_agents.size() > 1;
  return all;
}

}  // namespace

Participants::Participants(const Dumps& dumps) : agents_(dumps.agents) {
  const auto ranks = ranks_by_dump(dumps);
  std::map<Key, int> known;
  const auto one = [&](const View& view, bool is_agent) -> One& {
    const Ranks& there = ranks.at(view.dump);
    const bool by_kind = there.are_several && there.of_groups != there.of_agents;
    const Key key{view.dump, there.are_several ? view.job_rank : 0, by_kind && is_agent};
    const auto [found, is_new] = known.try_emplace(key, static_cast<int>(all_.size()));
    if (is_new) all_.emplace_back();
    numbers_[&view] = found->second;
    One& made = all_[static_cast<std::size_t>(found->second)];
    made.ranks.insert(view.job_rank);
    return made;
  };
  for (const Group& group : dumps.groups) {
    for (const auto& [rank, view] : group.views) {
      One& member = one(view, /*is_agent=*/false);
      if (member.member == nullptr)
        std::tie(member.group, member.member) = std::pair(&group, &view);
    }
  }
  for (const auto& [rank, view] : dumps.agents) one(view, /*is_agent=*/true).agent = &view;
  std::set<int> seen;
  for (const One& each : all_)
    alike_ = alike_ && each.ranks.size() == 1 && seen.insert(*each.ranks.begin()).second;
}

int Participants::rank(int who) const {
  const One& one = all_.at(static_cast<std::size_t>(who));
  return one.member != nullptr ? one.member->job_rank : one.agent->rank;
}

std::string Participants::name(int who) const {
  const One& one = all_.at(static_cast<std::size_t>(who));
  if (alike_) return "rank " + std::to_string(rank(who));
  if (one.member == nullptr) return agent(one.agent->rank);
  const std::string as_agent =
      one.agent == nullptr ? "" : " (agent " + std::to_string(one.agent->rank) + ")";
  return "rank " + std::to_string(one.member->rank) + " of " + title(*one.group) + as_agent;
}

std::string Participants::agent(int rank) const {
  const std::string number = agents() + (" " + std::to_string(rank));
  const auto found = agents_.find(rank);
  if (alike_ || found == agents_.end() || found->second.name.empty()) return number;
  return number + " ('" + found->second.name + "')";
}

}  // namespace weft::tools
