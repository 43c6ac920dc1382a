// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <set>
#include <vector>

#include <weft/profiling/tools/job_check.h>

namespace weft::tools {

namespace {

const char* const kFix =
    "; give the dumps of one job: remove the older files, or set a WEFT_DUMP_DIR of its own for "
    "each";

std::string process(const Dump& dump) {
  return "process " + std::to_string(dump.pid) + " ('" + dump.file + "')";
}

bool has(const std::map<int, View>& views, std::size_t dump) {
  return std::any_of(views.begin(), views.end(),
                     [&](const auto& one) { return one.second.dump == dump; });
}

bool belong_together(const Dumps& dumps, std::size_t one, std::size_t other) {
  if (has(dumps.agents, one) && has(dumps.agents, other)) return true;
  return std::any_of(dumps.groups.begin(), dumps.groups.end(), [&](const Group& group) {
    return has(group.views, one) && has(group.views, other);
  });
}

bool have_joined_one(const Dump& one, const Dump& other) {
  return std::ranges::find_first_of(one.jobs, other.jobs) != one.jobs.end();
}

bool is_known_otherwise(const Dump& one, const Dump& other) {
  return !one.jobs.empty() && !other.jobs.empty() && !have_joined_one(one, other);
}

// Whether a chain of dumps links the two, each of which shares a job with the next: a process that
// replaced a lost rank knows the others, which knew the lost one.
bool are_linked(const Dumps& dumps, std::size_t one, std::size_t other) {
  std::vector<std::size_t> known{one};
  for (std::size_t i = 0; i < known.size(); ++i) {
    for (std::size_t next = 0; next < dumps.dumps.size(); ++next) {
      if (have_joined_one(dumps.dumps[known[i]], dumps.dumps[next]) &&
          std::ranges::find(known, next) == known.end())
        known.push_back(next);
    }
  }
  return std::ranges::find(known, other) != known.end();
}

}  // namespace

Error two_jobs(const Dump& one, const Dump& other, const std::string& what) {
  return {Blame::Caller, "these dumps are of two jobs: " + process(one) + " and " + process(other) +
                             " both are " + what + kFix};
}

void require_one_job(const Dumps& dumps) {
  // Finds processes that are different ranks of two groups which look alike.
  for (const Group& group : dumps.groups) {
    for (const auto& [rank, view] : group.views) {
      const View& first = group.views.begin()->second;
      const Dump& one = dumps.dumps[first.dump];
      const Dump& other = dumps.dumps[view.dump];
      if (!is_known_otherwise(one, other)) continue;
      throw Error(Blame::Caller, "these dumps are of two jobs: " + process(one) + " and " +
                                     process(other) + " are rank " + std::to_string(first.rank) +
                                     " and rank " + std::to_string(rank) + " of two groups '" +
                                     group.name + "'" + kFix);
    }
  }
  std::map<int, std::set<std::size_t>> claims;  // dumps by rank of the job
  for (const Group& group : dumps.groups) {
    for (const auto& [rank, view] : group.views) claims[view.job_rank].insert(view.dump);
  }
  for (const auto& [rank, who] : claims) {
    const std::size_t first = *who.begin();
    for (const std::size_t other : who) {
      if (other != first && !belong_together(dumps, first, other) &&
          !are_linked(dumps, first, other))
        throw two_jobs(dumps.dumps[first], dumps.dumps[other], "rank " + std::to_string(rank));
    }
  }
}

}  // namespace weft::tools
