// Meetings of all ranks of a group over its store, to which each rank comes by setting a key.
// Internal.
#pragma once

#include <string>
#include <vector>

#include <weft/engine/store/store.h>

namespace weft::group {

// The remedy if a rank does not come to a call.
constexpr const char* kAllCall = "all ranks of the group must call it, in the same order of calls";

// The ranks of a group of that size that have not set the key base + their rank.
std::vector<int> absent_from(StoreBootstrap& store, const std::string& base, int size);

}  // namespace weft::group
