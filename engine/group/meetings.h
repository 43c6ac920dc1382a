// SPDX-License-Identifier: Apache-2.0
// The places where threads of this rank wait outside of operations: in meetings over the store, and
// for something of their own rank. Ranks and users that ask are told of them.
//
// Owned by Waits. Thread-safe. lines() blocks on the store, and holds up nobody else meanwhile.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include <weft/base/mutex.h>

namespace weft::group {

class Meetings {
 public:
  struct Place {
    std::string name;  // for ranks that ask: "the wait for … on group 'default'"
    std::string group;
    bool is_meeting = false;  // otherwise a wait of this rank alone
    // Says for whom it waits, and may query the store. It owns what it uses: another thread may be
    // in it when the wait ends.
    std::function<std::vector<std::string>()> lines;
  };
  using Held = std::shared_ptr<const Place>;
  // A thread waits there until end().
  void begin(Held place);
  void end(const Held& place);
  // The name of the place where a thread began to wait last; "" if there is none.
  std::string newest() const;
  // Says for whom the threads of that group wait, meetings first. Leaves out waits that have ended
  // while the store was queried.
  std::vector<std::string> lines(const std::string& group) const;

 private:
  std::vector<Held> places(const std::string& group) const;
  bool goes_on(const Held& place) const;

  mutable Mutex mutex_;
  std::vector<Held> places_ WEFT_GUARDED_BY(mutex_);
};

}  // namespace weft::group
