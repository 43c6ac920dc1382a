// A program run to its end, for tests of launchers.
#pragma once

#include <string>
#include <vector>

namespace weft::launch {

struct Outcome {
  int code = 0;  // as shells count: 128 + the signal's number
  std::string out;
  std::string err;
  // The lines of `out`, sorted: ranks print in any order.
  std::vector<std::string> lines() const;
};

// By the shell, with neither RANK nor its like in the environment. Ends it with SIGKILL after a
// minute.
Outcome run(const std::string& command);

// Names that tests/engine/launch/CMakeLists.txt gives programs: "weft-run", "weft-agent",
// "weft-info", "join_and_reduce", "crashing", "python", "torchrun", "sources".
std::string path_of(const std::string& name);

}  // namespace weft::launch
