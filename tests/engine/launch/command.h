// SPDX-License-Identifier: Apache-2.0
// Runs a program to its end, for tests of launchers.
#pragma once

#include <string>
#include <vector>

namespace weft::launch {

struct Outcome {
  int code = 0;  // as in a shell: 128 + the number of a signal
  std::string out;
  std::string err;
  // The lines of `out`, sorted: ranks print in any order.
  std::vector<std::string> lines() const;
};

// Runs `command` in a shell, without RANK and its like in the environment. Kills it after a minute.
Outcome run(const std::string& command);

// Returns a path that tests/engine/launch/CMakeLists.txt defines. Names: "weft-run", "weft-agent",
// "weft-info", "join_and_reduce", "crashing", "python", "torchrun", "sources".
std::string path_of(const std::string& name);

}  // namespace weft::launch
