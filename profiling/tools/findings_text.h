// What weft-debug says beside its findings: nothing of it is wrong, but without it a dump of a job
// that runs, or of some of its ranks only, would look as if it were empty.
#pragma once

#include <chrono>
#include <string>
#include <vector>

#include <weft/profiling/tools/dumps.h>

namespace weft::tools {

struct Remarks {
  std::vector<std::string>
      running;  // operations too young for a finding, and who has called shutdown()
  std::vector<int> without_dump;  // ranks of the job that groups have as members
};

Remarks remarks(const Dumps& dumps, std::chrono::nanoseconds older_than);

}  // namespace weft::tools
