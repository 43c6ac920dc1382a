// SPDX-License-Identifier: Apache-2.0
// Durations on a command line.
#pragma once

#include <chrono>
#include <string>

namespace weft::tools {

// Parses "500ms", "1s", "2.5min" or "0". Throws Caller, naming the option, for anything else.
std::chrono::nanoseconds parse_duration(const std::string& option, const std::string& text);

}  // namespace weft::tools
