// SPDX-License-Identifier: Apache-2.0
// Finds out which ranks keep operations of a job's groups waiting, and reports them. A rank whose
// operation has not ended after 10 s (30 s, 2 min, 10 min; ProcessGroupOptions::wait_reports) asks
// the other members of that group over the membership's connections for their last operation, and
// logs on stderr which of them have not come. The job logs one line: a rank that learns of a lower
// rank that waits too leaves the report to that rank, and a rank that has reported tells all
// others.
//
// Some mismatches leave no rank with anything to send, and some backends compare no calls, so that
// all ranks come and no operation ever ends. Therefore a rank whose collective has not ended after
// 1 s (a tenth of the first report time) tells its call to the lowest rank of the group, once and
// silently, and that rank tells its own to all others. The receiver compares the call with its own
// of the same number, and breaks the group if they differ.
//
// The job's loop looks at all groups from time to time; operations themselves cost nothing more. A
// peer that computes or sleeps still answers from its loop. A peer that does not answer is stopped
// or cut off.
//
// The job owns it. Thread-safe. The functions of a WaitSource are called on the job's loop and on
// threads that call waiting_for() or who_kept(), and do not block. Its parts are the groups
// (WaitSources), the questions to other ranks (WaitRounds), and the places where threads wait
// outside of operations (Meetings).
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include <weft/base/event_loop.h>
#include <weft/base/patience.h>
#include <weft/engine/group/last_report.h>
#include <weft/engine/group/meetings.h>
#include <weft/engine/group/wait.h>
#include <weft/engine/group/wait_rounds.h>
#include <weft/engine/group/wait_sources.h>
#include <weft/engine/membership/frame.h>

namespace weft::group {

class Membership;

class Waits : public std::enable_shared_from_this<Waits> {
 public:
  using Clock = Patience::Clock;

  // `rank` is this rank, in the job.
  static std::shared_ptr<Waits> make(int rank, const std::shared_ptr<Membership>& membership,
                                     const std::shared_ptr<EventLoop>& loop, WaitReports reports);

  WaitSources& sources() { return *sources_; }
  WaitRounds& rounds() { return *rounds_; }
  Meetings& meetings() { return meetings_; }
  const WaitReports& reports() const { return reports_; }
  // How long a rank lets lower ones report first.
  std::chrono::milliseconds turn() const;

  // One line for each operation and meeting of the group in which this rank waits, and each rank
  // that it waits for there. Blocks like WaitRounds::ask().
  std::vector<std::string> waiting_for(const std::string& group);
  // The ranks of the group that have not come to an operation that has run out of time, and a text
  // about them. Empty if all have come, or nothing is known. Blocks like WaitRounds::ask().
  struct Absent {
    std::vector<int> ranks;
    std::string text;
  };
  Absent who_kept(const std::string& group, const Wait& wait);
  // Logs the line, unless a rank of the job has reported that level since then.
  void report_unless_said(Clock::time_point since, std::size_t level, const std::string& line);

 private:
  Waits(int rank, const std::shared_ptr<Membership>& membership,
        const std::shared_ptr<EventLoop>& loop, WaitReports reports);

  // The functions below run on the loop.
  void tick_later();
  void tick();
  // Tells the others this rank's call, in each group whose oldest collective has taken long enough.
  void tell_calls();
  void tell_call(const std::string& group, const WaitSource& source, std::uint64_t number);
  void begin_report(const std::string& group, const Wait& wait, std::size_t level, bool is_told_to);
  void end_report(const std::string& group, const Wait& wait, std::size_t level, bool is_told_to,
                  const WaitAnswers& answers);
  void report(const std::string& group, const Wait& wait, std::size_t level,
              const WaitAnswers& answers);
  void on_frame(const Frame& frame);
  void on_asked(const Frame& frame);
  void on_told_to_speak(const Frame& frame);
  void on_called(const Frame& frame);
  bool is_long(const Wait& wait) const;
  void tell_said(std::size_t level);
  // How long a collective takes before this rank tells the others its call; also the longest time
  // between two looks at pending operations.
  std::chrono::milliseconds calls_differ_after() const;

  const int rank_;
  const std::weak_ptr<Membership> membership_;
  const std::weak_ptr<EventLoop> loop_;
  const WaitReports reports_;
  const std::shared_ptr<WaitSources> sources_ = std::make_shared<WaitSources>();
  const std::shared_ptr<WaitRounds> rounds_;
  Meetings meetings_;

  // Used on the loop only.
  EventLoop::Registration ticking_;
  bool is_reporting_ = false;
  LastReport said_;
  Clock::time_point next_tick_{};
};

}  // namespace weft::group
