// Who waits for whom, of those who take part (participants.h).
#pragma once

#include <map>
#include <string>
#include <utility>
#include <vector>

namespace weft::tools {

class Waits {
 public:
  // The first thing that one waits in for another is kept. Nobody waits for itself.
  void add(int who, int whom, std::string in) {
    if (who != whom) waits_[who].emplace(whom, std::move(in));
  }
  const std::string& in(int who, int whom) const { return waits_.at(who).at(whom); }
  // Each waits for the next, the last for the first; empty where there is none.
  std::vector<int> shortest_circle() const;

 private:
  std::map<int, std::map<int, std::string>> waits_;
};

}  // namespace weft::tools
