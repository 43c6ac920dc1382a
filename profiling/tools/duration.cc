// SPDX-License-Identifier: Apache-2.0
#include <cmath>
#include <cstdlib>

#include <weft/base/error.h>
#include <weft/profiling/tools/duration.h>

namespace weft::tools {

std::chrono::nanoseconds parse_duration(const std::string& option, const std::string& text) {
  constexpr double kMostSeconds = 1e9;  // 30 years
  char* end = nullptr;
  const double number = std::strtod(text.c_str(), &end);
  const std::string unit = end;
  const double seconds = unit == "ms" ? number * 1e-3 : unit == "min" ? number * 60 : number;
  const bool is_unit =
      unit == "ms" || unit == "s" || unit == "min" || (unit.empty() && number == 0);
  if (end == text.c_str() || !is_unit || !std::isfinite(seconds) || seconds < 0 ||
      seconds > kMostSeconds)
    throw Error(Blame::Caller,
                option + " is '" + text + "'; it takes a time such as 500ms, 1s, 2min, or 0");
  return std::chrono::nanoseconds(static_cast<std::int64_t>(seconds * 1e9));
}

}  // namespace weft::tools
