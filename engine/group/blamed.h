// SPDX-License-Identifier: Apache-2.0
// The ranks that keep an operation waiting, in the words of the report.
#pragma once

#include <cstddef>
#include <string>
#include <vector>

#include <weft/engine/group/wait.h>

namespace weft::group {

constexpr std::size_t kMostBlamed = 8;  // ranks in one line

struct Blamed {
  int rank = 0;
  std::string text;
};

// The ranks that keep a wait waiting, and their last operations. `self`: this rank, in a group of
// `size` ranks.
std::vector<Blamed> blame(const Wait& wait, int self, int size, const WaitAnswers& answers);
// One line. Names at most kMostBlamed ranks and counts the others.
std::string joined(const std::vector<Blamed>& blamed);

}  // namespace weft::group
