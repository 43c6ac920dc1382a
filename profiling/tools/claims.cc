#include <algorithm>
#include <set>

#include <weft/profiling/tools/claims.h>

namespace weft::tools {

namespace {

std::string process(const Dump& dump) { return "process " + std::to_string(dump.pid) + " ('" + dump.file + "')"; }

bool has(const std::map<int, View>& views, std::size_t dump) {
  return std::any_of(views.begin(), views.end(), [&](const auto& one) { return one.second.dump == dump; });
}

bool belong_together(const Dumps& dumps, std::size_t one, std::size_t other) {
  if (has(dumps.agents, one) && has(dumps.agents, other)) return true;
  return std::any_of(dumps.groups.begin(), dumps.groups.end(),
                     [&](const Group& group) { return has(group.views, one) && has(group.views, other); });
}

}  // namespace

Error two_jobs(const Dump& one, const Dump& other, const std::string& what) {
  return {Blame::Caller, "these dumps are of two jobs: " + process(one) + " and " + process(other) + " both are " + what +
                             "; give the dumps of one job (with a WEFT_DUMP_DIR of its own for each)"};
}

void require_one_job(const Dumps& dumps) {
  std::map<int, std::set<std::size_t>> claims;  // rank of the job: dumps
  for (const Group& group : dumps.groups) {
    for (const auto& [rank, view] : group.views) claims[view.job_rank].insert(view.dump);
  }
  for (const auto& [rank, view] : dumps.agents) claims[rank].insert(view.dump);
  for (const auto& [rank, who] : claims) {
    const std::size_t first = *who.begin();
    for (const std::size_t other : who) {
      if (other != first && !belong_together(dumps, first, other))
        throw two_jobs(dumps.dumps[first], dumps.dumps[other], "rank " + std::to_string(rank));
    }
  }
}

}  // namespace weft::tools
