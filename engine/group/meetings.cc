// SPDX-License-Identifier: Apache-2.0
#include <algorithm>

#include <weft/engine/group/meetings.h>

namespace weft::group {

void Meetings::begin(const Place& place) {
  {
    MutexLock lock(places_mutex_);
    places_.push_back(&place);
  }
  MutexLock lock(names_mutex_);
  names_.push_back(place.name);
}

void Meetings::end(const Place& place) {
  {
    MutexLock lock(places_mutex_);
    std::erase(places_, &place);
  }
  MutexLock lock(names_mutex_);
  const auto own = std::find(names_.begin(), names_.end(), place.name);
  if (own != names_.end()) names_.erase(own);
}

std::string Meetings::newest() const {
  MutexLock lock(names_mutex_);
  return names_.empty() ? "" : names_.back();
}

std::vector<std::string> Meetings::lines(const std::string& group) {
  std::vector<std::string> lines;
  MutexLock lock(places_mutex_);
  for (const bool is_meeting : {true, false}) {
    for (const Place* place : places_) {
      if (place->group != group || place->is_meeting != is_meeting) continue;
      for (std::string& line : place->lines()) lines.push_back(std::move(line));
    }
  }
  return lines;
}

}  // namespace weft::group
