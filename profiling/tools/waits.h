// SPDX-License-Identifier: Apache-2.0
// Which participants (participants.h) wait for which others.
#pragma once

#include <map>
#include <string>
#include <utility>
#include <vector>

namespace weft::tools {

class Waits {
 public:
  // Records that `who` waits for `whom` in the operation `in`; keeps the first for each pair.
  // Ignores a wait for itself.
  void add(int who, int whom, std::string in) {
    if (who != whom) waits_[who].emplace(whom, std::move(in));
  }
  const std::string& in(int who, int whom) const { return waits_.at(who).at(whom); }
  // Returns the shortest circle of waits: each waits for the next, the last for the first. Empty if
  // there is none.
  std::vector<int> shortest_circle() const;

 private:
  std::map<int, std::map<int, std::string>> waits_;
};

}  // namespace weft::tools
