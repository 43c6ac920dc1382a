// SPDX-License-Identifier: Apache-2.0
// The places where threads of this rank wait outside of operations: in meetings over the store, and
// for something of their own rank. Ranks and users that ask are told of them.
//
// Owned by Waits. Thread-safe. lines() blocks on the store; newest() does not.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include <weft/base/mutex.h>

namespace weft::group {

class Meetings {
 public:
  struct Place {
    std::string name;  // for ranks that ask: "the wait for … on group 'default'"
    std::string group;
    bool is_meeting = false;                          // otherwise a wait of this rank alone
    std::function<std::vector<std::string>()> lines;  // what it waits for; may query the store
  };
  // A thread waits there until end(); the place outlives that.
  void begin(const Place& place);
  void end(const Place& place);
  // The name of the place where a thread began to wait last; "" if there is none.
  std::string newest() const;
  // What the threads wait for in that group: meetings first.
  std::vector<std::string> lines(const std::string& group);

 private:
  Mutex places_mutex_;  // held while meetings query the store: never taken on the loop
  std::vector<const Place*> places_ WEFT_GUARDED_BY(places_mutex_);
  mutable Mutex names_mutex_;
  std::vector<std::string> names_ WEFT_GUARDED_BY(names_mutex_);
};

}  // namespace weft::group
