// SPDX-License-Identifier: Apache-2.0
// Tells the part of a c10d store that a group or job uses.
#pragma once

#include <string>

#include <c10/util/intrusive_ptr.h>
#include <torch/csrc/distributed/c10d/Store.hpp>

namespace weft::group {

// The text that PrefixStores put before each key in the innermost store.
std::string prefix_of(const c10::intrusive_ptr<c10d::Store>& store);

}  // namespace weft::group
