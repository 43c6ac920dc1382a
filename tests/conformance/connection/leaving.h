// SPDX-License-Identifier: Apache-2.0
// Whether connections of a backend reach other processes. This asks the backend, so that no test
// needs a list of names and a new backend is tested like the others.
#pragma once

#include <optional>
#include <string>

namespace weft::conformance {

// The reason why other processes cannot reach a listener of the backend; nothing if they can. Forks
// once per backend: call it before the test makes threads.
std::optional<std::string> why_within_the_process(const std::string& backend);

}  // namespace weft::conformance
