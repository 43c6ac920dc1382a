// SPDX-License-Identifier: Apache-2.0
#include <charconv>

#include <weft/base/error.h>
#include <weft/engine/instruments/metrics.h>

namespace weft::instruments {

std::string metrics_address(const std::string& text, int local_rank) {
  const auto colon = text.rfind(':');
  int port = -1;
  if (colon != std::string::npos) {
    const char* const end = text.data() + text.size();
    const auto [stopped, failure] = std::from_chars(text.data() + colon + 1, end, port);
    if (failure != std::errc() || stopped != end) port = -1;
  }
  if (port < 1 || port > 65535) {
    throw Error(Blame::Caller, "WEFT_METRICS is '" + text +
                                   "'; it takes :port or address:port, to which each rank of a "
                                   "machine adds its LOCAL_RANK");
  }
  port += local_rank;
  if (port > 65535) {
    throw Error(Blame::Caller, "WEFT_METRICS is '" + text + "': there is no port " +
                                   std::to_string(port) + " for local rank " +
                                   std::to_string(local_rank));
  }
  return (colon == 0 ? "0.0.0.0" : text.substr(0, colon)) + ":" + std::to_string(port);
}

}  // namespace weft::instruments
