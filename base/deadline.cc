// SPDX-License-Identifier: Apache-2.0
#include <cstdio>

#include <weft/base/deadline.h>

namespace weft {

std::string describe(std::chrono::milliseconds duration) {
  const auto count = duration.count();
  char text[48];
  if (duration == std::chrono::milliseconds::max()) return "no limit";
  if (count < 1000) {
    std::snprintf(text, sizeof text, "%lld ms", static_cast<long long>(count));
  } else if (count < 120'000) {
    std::snprintf(text, sizeof text, "%.4g s", static_cast<double>(count) / 1e3);
  } else {
    std::snprintf(text, sizeof text, "%.4g min", static_cast<double>(count) / 60e3);
  }
  return text;
}

}  // namespace weft
