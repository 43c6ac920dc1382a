// Whether the lanes of a backend leave the process. The backend is asked: no test knows one by its
// name, so that a new one is tested like those that are there.
#pragma once

#include <optional>
#include <string>

namespace weft::conformance {

// Why no other process reaches what this one listens on; nothing where it may. Asked once for each
// backend, by a fork: before the test makes threads.
std::optional<std::string> why_within_the_process(const std::string& backend);

}  // namespace weft::conformance
