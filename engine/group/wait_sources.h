// SPDX-License-Identifier: Apache-2.0
// The groups of a job whose operations waits.h looks at. Thread-safe; the functions of a source are
// called without the mutex.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <utility>

#include <weft/base/mutex.h>
#include <weft/engine/group/wait.h>

namespace weft::group {

class WaitSources {
 public:
  void add(const std::string& group, WaitSource source);
  void remove(const std::string& group);
  std::optional<WaitSource> of(const std::string& group) const;
  // Returns a copy, since a source may hold the last reference to its group, whose destructor takes
  // the mutex.
  std::map<std::string, WaitSource> all() const;
  // The oldest operation of this rank in any group other than `but`, with its group.
  std::optional<std::pair<std::string, Wait>> oldest(const std::string& but = {}) const;
  // Notes that this rank has told the others its call as that collective (WaitSource::told).
  void note_told(const std::string& group, std::uint64_t collective);

 private:
  mutable Mutex mutex_;
  std::map<std::string, WaitSource> sources_ WEFT_GUARDED_BY(mutex_);
};

}  // namespace weft::group
