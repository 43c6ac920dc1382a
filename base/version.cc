// SPDX-License-Identifier: Apache-2.0
#include <weft/base/version.h>

namespace weft {

std::string version() { return WEFT_VERSION; }

}  // namespace weft
