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
// Thread-safe. The functions of a Source are called on the job's loop and on threads that call
// ask(), and do not block.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <weft/base/error.h>
#include <weft/base/event_loop.h>
#include <weft/base/mutex.h>
#include <weft/base/patience.h>
#include <weft/engine/membership/frame.h>

namespace weft::group {

class Membership;

// The name of a collective, after the user's call that it belongs to, if there is one:
// "all_reduce", "checkpoint::save: all_gather_into".
std::string called_as(const char* name, const char* called_by);

class Waits : public std::enable_shared_from_this<Waits> {
 public:
  using Clock = Patience::Clock;

  // An operation that this rank has begun and that has not ended.
  struct Wait {
    const char* name = nullptr;       // a literal: "all_reduce", "recv from"
    const char* called_by = nullptr;  // CalledBy::name()
    Clock::time_point since;
    std::uint64_t collective = 0;  // its number, if all ranks of the group take part; else 0
    int peer = -1;                 // the other rank of a message, in the group; -1: any

    std::string operation() const;  // called_as(), or "recv from rank 2"
    std::string what() const;       // operation() with a collective's number: "all_reduce #7"
  };
  // How far a rank has come in a group.
  struct Progress {
    std::uint64_t collectives = 0;  // begun
    std::string last;               // the operation that it began last: "#6 (all_reduce, 12 s ago)"
  };
  struct Source {
    std::vector<int> members;                    // as ranks of the job, in the group's order
    int rank = 0;                                // this rank, in the group
    std::function<std::vector<Wait>()> pending;  // oldest first
    std::function<Progress()> progress;
    // This rank's call as the collective of that number; nullopt if it has not made it yet or has
    // forgotten it.
    std::function<std::optional<std::string>(std::uint64_t number)> call;
    // Breaks the group on all ranks because their calls differ.
    std::function<void(const std::string& how)> differ;
    // The last collective for which this rank has told the others its call.
    std::uint64_t told = 0;
  };
  // The answers of a group's members, by rank of the group.
  struct Answers {
    std::map<int, Progress> progress;
    std::vector<int> silent;   // did not answer
    std::vector<int> unasked;  // run no Weft (Python's), or the ranks are not connected
    int lowest_waiting = -1;   // of those that wait too, as a rank of the job; -1: none
  };

  // `rank` is this rank, in the job.
  static std::shared_ptr<Waits> make(int rank, const std::shared_ptr<Membership>& membership,
                                     const std::shared_ptr<EventLoop>& loop, WaitReports reports);

  // From now on the other ranks can be asked.
  void on_connected() { connected_ = true; }
  void add(const std::string& group, Source source);
  void remove(const std::string& group);

  // Asks the members of a group. Blocks until all have answered: for 1 s, and 2 s if the loop is
  // held up. On the loop it asks nobody.
  Answers ask(const std::string& group);
  // One line for each operation and meeting of the group in which this rank waits, and each rank
  // that it waits for there. Blocks like ask().
  std::vector<std::string> waiting_for(const std::string& group);
  // The ranks of the group that have not come to an operation that has run out of time, and a text
  // about them. Empty if all have come, or nothing is known. Blocks like ask().
  struct Absent {
    std::vector<int> ranks;
    std::string text;
  };
  Absent who_kept(const std::string& group, const Wait& wait);
  const WaitReports& reports() const { return reports_; }

  // A thread that waits for other ranks to come to a meeting over the store, which it polls.
  class Meeting {
   public:
    // The group's ranks that have not come. Called by look() and, on other threads, by
    // waiting_for().
    using Missing = std::function<std::vector<int>()>;
    // `hint`: the remedy, as a sentence without its end.
    Meeting(std::shared_ptr<Waits> waits, std::string group, std::string what, int rank,
            std::string hint, Missing missing);
    ~Meeting();
    Meeting(const Meeting&) = delete;
    Meeting& operator=(const Meeting&) = delete;
    // Reports the wait on stderr at the report times, unless a lower rank has come, which reports
    // it.
    void look();

   private:
    friend class Waits;
    const std::shared_ptr<Waits> waits_;
    const std::string group_, what_, hint_;
    const int rank_;
    const Missing missing_;
    Patience patience_;
  };

  // A thread that waits for something of its own rank that other ranks may hold up, such as a
  // user's future. While this rank waits in an operation of the group, that operation is reported
  // and this wait is not.
  class LocalWait {
   public:
    // `what`: "the comm hook of bucket 0". `hint`: the remedy, as a sentence without its end.
    // `rank`: in the group.
    LocalWait(std::shared_ptr<Waits> waits, std::string group, std::string what, int rank,
              std::string hint);
    ~LocalWait();
    LocalWait(const LocalWait&) = delete;
    LocalWait& operator=(const LocalWait&) = delete;
    // Reports the wait on stderr at the report times, unless a rank of the job has reported since
    // this began.
    void look();

   private:
    friend class Waits;
    const std::shared_ptr<Waits> waits_;
    const std::string group_, what_, hint_;
    const int rank_;
    const Clock::time_point since_ = Clock::now();
    Patience patience_;
  };

 private:
  struct Round;
  Waits(int rank, const std::shared_ptr<Membership>& membership,
        const std::shared_ptr<EventLoop>& loop, WaitReports reports);

  std::optional<Source> source_of(const std::string& group) const;
  // The oldest operation of this rank in any group other than `but`, with its group.
  std::optional<std::pair<std::string, Wait>> oldest(const std::string& but = {}) const;
  // The functions below run on the loop.
  void tick_later();
  void tick();
  // Tells the others this rank's call, in each group whose oldest collective has taken long enough.
  void tell_calls();
  void tell_call(const std::string& group, const Source& source, std::uint64_t number);
  void begin_round(const std::string& group, std::function<void(const Answers&)> done);
  void end_round(std::uint64_t number);
  void begin_report(const std::string& group, const Wait& wait, std::size_t level, bool is_told_to);
  void report(const std::string& group, const Wait& wait, std::size_t level,
              const Answers& answers);
  void on_frame(const Frame& frame);
  void on_asked(const Frame& frame);
  void on_answered(const Frame& frame);
  void on_told_to_speak(const Frame& frame);
  void on_called(const Frame& frame);
  bool is_long(const Wait& wait) const;
  // The report level (frame.h) that this rank or another has reported since that wait began.
  std::size_t said_of(const Wait& wait) const;
  void note_said(std::size_t level);
  void tell_said(std::size_t level);
  // How long a rank lets lower ones report first.
  std::chrono::milliseconds turn() const;
  void begin_meeting(const std::string& name);
  void end_meeting(const std::string& name);
  std::chrono::milliseconds tick_length() const;
  // How long a collective takes before this rank tells the others its call.
  std::chrono::milliseconds calls_differ_after() const;

  const int rank_;
  const std::weak_ptr<Membership> membership_;
  const std::weak_ptr<EventLoop> loop_;
  const WaitReports reports_;
  std::atomic<bool> connected_{false};

  mutable Mutex mutex_;
  std::map<std::string, Source> sources_ WEFT_GUARDED_BY(mutex_);
  // The meetings in which threads of this rank wait, for ranks that ask.
  std::vector<std::string> meeting_ WEFT_GUARDED_BY(mutex_);
  Mutex meetings_mutex_;  // held while meetings query the store: never taken on the loop
  std::vector<const Meeting*> meetings_ WEFT_GUARDED_BY(meetings_mutex_);
  std::vector<const LocalWait*> local_waits_ WEFT_GUARDED_BY(meetings_mutex_);

  // Used on the loop only.
  EventLoop::Registration ticking_;
  std::map<std::uint64_t, std::shared_ptr<Round>> rounds_;
  std::uint64_t last_round_ = 0;
  bool is_reporting_ = false;
  // The report level that this rank or another has reported last, and when.
  std::size_t said_level_ = 0;
  Clock::time_point said_at_{};
  Clock::time_point next_tick_{};
};

// A rank's answer: the number of the round, whether it waits itself, and its progress. A peer's
// bytes are not trusted.
struct WaitAnswer {
  std::uint64_t round = 0;
  bool waits = false;
  Waits::Progress progress;
};
std::string encode(const WaitAnswer& answer);
std::optional<WaitAnswer> decode_wait_answer(std::string_view text);

}  // namespace weft::group
