// SPDX-License-Identifier: Apache-2.0
// Decides which part of a group goes on when its parts have lost sight of each other, for example
// because a cable was cut. Both parts live; if both went on as the group, each would train a model
// of its own.
#pragma once

#include <vector>

namespace weft::group {

enum class Sight {
  Here,   // this rank's part reaches it
  Ended,  // its machine has reported that it ended, or it has left
  Cut,    // its machine does not answer
};

// `ranks`: the members of the group. Members that have ended do not count. True if this part has
// more than half of the rest, or half of it and the lowest rank.
inline bool has_majority(const std::vector<Sight>& ranks) {
  int here = 0, rest = 0;
  bool has_lowest = false;
  for (const Sight one : ranks) {
    if (one == Sight::Ended) continue;
    if (rest == 0) has_lowest = one == Sight::Here;
    ++rest;
    here += one == Sight::Here ? 1 : 0;
  }
  return 2 * here > rest || (2 * here == rest && has_lowest);
}

}  // namespace weft::group
