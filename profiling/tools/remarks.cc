// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <set>

#include <weft/profiling/tools/participants.h>
#include <weft/profiling/tools/remarks.h>
#include <weft/profiling/tools/wording.h>

namespace weft::tools {

namespace {

constexpr std::size_t kMostOperations = 20;

std::vector<int> ranks_without_dump(const Dumps& dumps, bool alike) {
  std::set<int> members;
  std::set<int> seen;
  for (const Group& group : dumps.groups) {
    members.insert(group.ranks.begin(), group.ranks.end());
    for (const auto& [rank, view] : group.views) seen.insert(view.job_rank);
  }
  if (alike) {
    for (const auto& [rank, view] : dumps.agents) seen.insert(rank);
  }
  std::vector<int> without;
  std::set_difference(members.begin(), members.end(), seen.begin(), seen.end(),
                      std::back_inserter(without));
  return without;
}

}  // namespace

Remarks remarks(const Dumps& dumps, std::chrono::nanoseconds older_than) {
  Remarks made;
  const Participants who(dumps);
  made.without_dump = ranks_without_dump(dumps, who.are_numbered_alike());
  std::size_t more = 0;
  const auto look = [&](const View& view, const std::string& where) {
    const std::string name = who.name(who.of(view));
    for (const Record& record : view.records) {
      const std::int64_t age = dumps.dumps[view.dump].time - record.begun;
      const bool shuts_down = is_of_shutdown(record);
      if (record.state != "open" || (!shuts_down && age >= older_than.count())) continue;
      if (shuts_down && record.kind != "call") continue;  // the agent's own record tells it
      if (made.running.size() >= kMostOperations) {
        ++more;
      } else {
        made.running.push_back(shuts_down
                                   ? name + " has called shutdown(), " + duration_text(age) + " ago"
                                   : name + " is in " + describe(record, who.agents()) + where +
                                         " for " + duration_text(age));
      }
    }
  };
  for (const Group& group : dumps.groups) {
    for (const auto& [rank, view] : group.views) look(view, " in " + title(group));
  }
  for (const auto& [rank, view] : dumps.agents) look(view, "");
  if (more > 0) made.running.push_back("and " + std::to_string(more) + " more operations");
  return made;
}

}  // namespace weft::tools
