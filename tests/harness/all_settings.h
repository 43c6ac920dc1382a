// SPDX-License-Identifier: Apache-2.0
// The everyday run checks each claim on every backend, but not in every setting; ./dev test --all
// checks every setting.
#pragma once

#include <cstdlib>

namespace weft::harness {

inline bool runs_all_settings() { return std::getenv("WEFT_ALL_SETTINGS") != nullptr; }

}  // namespace weft::harness
