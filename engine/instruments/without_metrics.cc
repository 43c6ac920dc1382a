// SPDX-License-Identifier: Apache-2.0
#include <weft/base/error.h>
#include <weft/engine/instruments/metrics.h>

namespace weft::instruments {

void serve_metrics(const std::string&, int) {
  throw Error(Blame::Unsupported,
              "WEFT_METRICS is set, but this build has no metrics; install prometheus-cpp-dev and "
              "build again "
              "(CMake says WEFT_METRICS: ON), or unset it");
}

}  // namespace weft::instruments
