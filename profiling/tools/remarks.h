// SPDX-License-Identifier: Apache-2.0
// Remarks that weft-debug prints beside its findings. They name no errors, but without them the
// dumps of a running job, or of only some of its ranks, would look empty.
#pragma once

#include <chrono>
#include <string>
#include <vector>

#include <weft/profiling/tools/dumps.h>

namespace weft::tools {

struct Remarks {
  // Operations too young for a finding, and ranks that have called shutdown().
  std::vector<std::string> running;
  std::vector<int> without_dump;  // members of groups, as ranks of the job
};

Remarks remarks(const Dumps& dumps, std::chrono::nanoseconds older_than);

}  // namespace weft::tools
