// SPDX-License-Identifier: Apache-2.0
// Waits of one thread outside of operations, which report themselves: for other ranks, in a meeting
// over the store (Meeting), and for something of its own rank (LocalWait).
//
// Owned by the thread that waits; for that thread alone. look() of a Meeting may ask the other
// ranks, and then blocks as WaitRounds::ask().
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include <weft/base/patience.h>
#include <weft/engine/group/meetings.h>

namespace weft::group {

class Waits;

// A thread that waits for other ranks to come to a meeting over the store, which it polls.
class Meeting {
 public:
  // The group's ranks that have not come. Called by look() and, on other threads, by
  // Waits::waiting_for(), perhaps until after this object has ended: it owns what it uses. Throws
  // Error if that cannot be found out now.
  using Missing = std::function<std::vector<int>()>;
  // `hint`: the remedy, as a sentence without its end.
  Meeting(std::shared_ptr<Waits> waits, std::string group, std::string what, int rank,
          std::string hint, Missing missing);
  ~Meeting();
  Meeting(const Meeting&) = delete;
  Meeting& operator=(const Meeting&) = delete;
  // Reports the wait on stderr at the report times, unless a lower rank has come, which reports it.
  void look();

 private:
  const std::shared_ptr<Waits> waits_;
  const std::string group_, what_, hint_;
  const int rank_;
  const Missing missing_;
  const Meetings::Held place_;
  Patience patience_;
};

// A thread that waits for something of its own rank that other ranks may hold up, such as a user's
// future. While this rank waits in an operation of the group, that operation is reported and this
// wait is not.
class LocalWait {
 public:
  // `what`: "the comm hook of bucket 0". `hint`: the remedy, as a sentence without its end. `rank`:
  // in the group.
  LocalWait(std::shared_ptr<Waits> waits, std::string group, std::string what, int rank,
            std::string hint);
  ~LocalWait();
  LocalWait(const LocalWait&) = delete;
  LocalWait& operator=(const LocalWait&) = delete;
  // Reports the wait on stderr at the report times, unless a rank of the job has reported since
  // this began.
  void look();

 private:
  const std::shared_ptr<Waits> waits_;
  const std::string group_, what_, hint_;
  const int rank_;
  const Meetings::Held place_;
  const Patience::Clock::time_point since_ = Patience::Clock::now();
  Patience patience_;
};

}  // namespace weft::group
