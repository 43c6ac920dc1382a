#include <algorithm>
#include <set>

#include <weft/profiling/tools/claims.h>

namespace weft::tools {

namespace {

const char* const kFix = "; give the dumps of one job (with a WEFT_DUMP_DIR of its own for each)";

std::string process(const Dump& dump) { return "process " + std::to_string(dump.pid) + " ('" + dump.file + "')"; }

bool has(const std::map<int, View>& views, std::size_t dump) {
  return std::any_of(views.begin(), views.end(), [&](const auto& one) { return one.second.dump == dump; });
}

bool belong_together(const Dumps& dumps, std::size_t one, std::size_t other) {
  if (has(dumps.agents, one) && has(dumps.agents, other)) return true;
  return std::any_of(dumps.groups.begin(), dumps.groups.end(),
                     [&](const Group& group) { return has(group.views, one) && has(group.views, other); });
}

bool is_known_otherwise(const Dump& one, const Dump& other) {
  const auto has_it = [&](const std::string& job) { return std::ranges::find(other.jobs, job) != other.jobs.end(); };
  return !one.jobs.empty() && !other.jobs.empty() && std::ranges::none_of(one.jobs, has_it);
}

}  // namespace

Error two_jobs(const Dump& one, const Dump& other, const std::string& what) {
  return {Blame::Caller,
          "these dumps are of two jobs: " + process(one) + " and " + process(other) + " both are " + what + kFix};
}

void require_one_job(const Dumps& dumps) {
  // Who are different ranks of groups that look alike.
  for (const Group& group : dumps.groups) {
    for (const auto& [rank, view] : group.views) {
      const View& first = group.views.begin()->second;
      const Dump& one = dumps.dumps[first.dump];
      const Dump& other = dumps.dumps[view.dump];
      if (!is_known_otherwise(one, other)) continue;
      throw Error(Blame::Caller, "these dumps are of two jobs: " + process(one) + " and " + process(other) + " are rank " +
                                     std::to_string(first.rank) + " and rank " + std::to_string(rank) + " of two groups '" +
                                     group.name + "'" + kFix);
    }
  }
  std::map<int, std::set<std::size_t>> claims;  // rank of the job: dumps
  for (const Group& group : dumps.groups) {
    for (const auto& [rank, view] : group.views) claims[view.job_rank].insert(view.dump);
  }
  for (const auto& [rank, who] : claims) {
    const std::size_t first = *who.begin();
    for (const std::size_t other : who) {
      if (other != first && !belong_together(dumps, first, other))
        throw two_jobs(dumps.dumps[first], dumps.dumps[other], "rank " + std::to_string(rank));
    }
  }
}

}  // namespace weft::tools
