// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <iterator>
#include <utility>

#include <weft/engine/group/meetings.h>

namespace weft::group {

void Meetings::begin(Held place) {
  MutexLock lock(mutex_);
  places_.push_back(std::move(place));
}

void Meetings::end(const Held& place) {
  MutexLock lock(mutex_);
  std::erase(places_, place);
}

std::string Meetings::newest() const {
  MutexLock lock(mutex_);
  return places_.empty() ? "" : places_.back()->name;
}

std::vector<Meetings::Held> Meetings::places(const std::string& group) const {
  std::vector<Held> found;
  MutexLock lock(mutex_);
  for (const bool is_meeting : {true, false}) {
    for (const Held& place : places_) {
      if (place->group == group && place->is_meeting == is_meeting) found.push_back(place);
    }
  }
  return found;
}

bool Meetings::goes_on(const Held& place) const {
  MutexLock lock(mutex_);
  return std::find(places_.begin(), places_.end(), place) != places_.end();
}

std::vector<std::string> Meetings::lines(const std::string& group) const {
  std::vector<std::string> lines;
  for (const Held& place : places(group)) {
    auto more = place->lines();
    if (goes_on(place)) std::move(more.begin(), more.end(), std::back_inserter(lines));
  }
  return lines;
}

}  // namespace weft::group
