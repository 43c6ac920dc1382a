// What this rank waits for in the groups of a job, and who keeps it waiting. A rank whose operation
// has not ended after 10 s (30 s, 2 min, 10 min; ProcessGroupOptions::wait_reports) asks the other
// members of that group over the membership's connections what they did last, and says on stderr
// which of them have not come. One line a job: a rank that asks and hears of a lower one that waits
// as well leaves it to that one, and whoever has spoken tells all others.
//
// Some mismatches leave no rank with anything to send, and some backends compare nothing, so that
// all ranks come and no operation ever ends. A rank whose collective has not ended after 1 s (a
// tenth of the first report's time) therefore tells the lowest rank of the group what it called,
// once and silently, and that rank tells all others; who is told compares it with its own call of
// that number, and breaks the group where they differ.
//
// The loop of the job looks at all groups from time to time; operations themselves cost nothing
// more. Where a peer computes or sleeps its loop still answers; one that does not answer is
// stopped, or cut off.
//
// Thread-safe. The functions of a Source are called from the job's loop and from threads that ask,
// and do not block.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <weft/base/error.h>
#include <weft/base/event_loop.h>
#include <weft/base/patience.h>
#include <weft/engine/membership/frame.h>

namespace weft::group {

class Membership;

// A collective with the call of the user that it belongs to: "all_reduce", "checkpoint::save:
// all_gather_into".
std::string called_as(const char* name, const char* called_by);

class Waits : public std::enable_shared_from_this<Waits> {
 public:
  using Clock = Patience::Clock;

  // An operation that this rank has begun and that has not ended.
  struct Wait {
    const char* name = nullptr;       // a literal: "all_reduce", "recv from"
    const char* called_by = nullptr;  // CalledBy::name()
    Clock::time_point since;
    std::uint64_t collective = 0;  // its number, where all ranks of the group take part
    int peer = -1;                 // a message's other rank (of the group); -1: any

    std::string operation() const;  // as called_as(), or "recv from rank 2"
    std::string what() const;       // the same with a collective's number: "all_reduce #7"
  };
  // How far a rank has come in a group.
  struct Progress {
    std::uint64_t collectives = 0;  // begun
    std::string last;  // the operation that it has begun last: "#6 (all_reduce, 12 s ago)"
  };
  struct Source {
    std::vector<int> members;                    // as ranks of the job, in the group's order
    int rank = 0;                                // this one, in the group
    std::function<std::vector<Wait>()> pending;  // oldest first
    std::function<Progress()> progress;
    // What this rank called as the collective of that number; nothing where it has called none, or
    // no longer knows.
    std::function<std::optional<std::string>(std::uint64_t number)> call;
    // Breaks the group on all ranks, whose calls differ.
    std::function<void(const std::string& how)> differ;
    std::uint64_t told =
        0;  // the last collective of which the others were told what this rank called
  };
  // What the members of a group answered, by rank of the group.
  struct Answers {
    std::map<int, Progress> progress;
    std::vector<int> silent;   // were asked, and did not answer
    std::vector<int> unasked;  // run no Weft (Python's), or the ranks are not connected
    int lowest_waiting = -1;   // of those that wait as well, as a rank of the job
  };

  // `rank`: in the job.
  static std::shared_ptr<Waits> make(int rank, const std::shared_ptr<Membership>& membership,
                                     const std::shared_ptr<EventLoop>& loop, WaitReports reports);

  // From here on the others can be asked.
  void on_connected() { connected_ = true; }
  void add(const std::string& group, Source source);
  void remove(const std::string& group);

  // Asks the members of a group, and blocks until all have answered, or a second is over. On the
  // loop it asks nobody.
  Answers ask(const std::string& group);
  // One line for each operation and meeting of the group in which this rank waits, and each rank
  // that it waits for there. Blocks as ask().
  std::vector<std::string> waiting_for(const std::string& group);
  // Which ranks of the group have not come to an operation that has run out of time, and a text
  // that says so; empty where all have, or nobody knows. Blocks as ask().
  struct Absent {
    std::vector<int> ranks;
    std::string text;
  };
  Absent who_kept(const std::string& group, const Wait& wait);
  const WaitReports& reports() const { return reports_; }

  // A thread that waits for other ranks to come to a meeting over the store, and looks there again
  // and again.
  class Meeting {
   public:
    // `missing`: the group's ranks that have not come. Called by look() and, on other threads, by
    // waiting_for().
    using Missing = std::function<std::vector<int>()>;
    // `hint`: what to do about it, as a sentence without its end.
    Meeting(std::shared_ptr<Waits> waits, std::string group, std::string what, int rank,
            std::string hint, Missing missing);
    ~Meeting();
    Meeting(const Meeting&) = delete;
    Meeting& operator=(const Meeting&) = delete;
    // Says so on stderr where it is time, and no lower rank has come that will.
    void look();

   private:
    friend class Waits;
    const std::shared_ptr<Waits> waits_;
    const std::string group_, what_, hint_;
    const int rank_;
    const Missing missing_;
    Patience patience_;
  };

  // A thread that waits for something of its own rank that other ranks may keep waiting, such as a
  // user's future. Operations of the group that this rank waits in meanwhile are reported by
  // themselves, and this is not.
  class LocalWait {
   public:
    // `what`: "the comm hook of bucket 0". `hint`: what to do about it, as a sentence without its
    // end. `rank`: in the group.
    LocalWait(std::shared_ptr<Waits> waits, std::string group, std::string what, int rank,
              std::string hint);
    ~LocalWait();
    LocalWait(const LocalWait&) = delete;
    LocalWait& operator=(const LocalWait&) = delete;
    // Says so on stderr where it is time, and no rank of the job has since this began.
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
  // The oldest operation of this rank in any group but that one, with its group.
  std::optional<std::pair<std::string, Wait>> oldest(const std::string& but = {}) const;
  // What follows runs on the loop.
  void tick_later();
  void tick();
  // Tells the others what this rank called, in each group whose oldest collective has taken long
  // enough.
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
  // Which of the times was reported since that wait began, by this rank or another.
  std::size_t said_of(const Wait& wait) const;
  void note_said(std::size_t level);
  void tell_said(std::size_t level);
  // How long a rank lets lower ones speak first.
  std::chrono::milliseconds turn() const;
  void begin_meeting(const std::string& name);
  void end_meeting(const std::string& name);
  std::chrono::milliseconds tick_length() const;
  // How long a collective takes before the others are told what this rank called.
  std::chrono::milliseconds calls_differ_after() const;

  const int rank_;
  const std::weak_ptr<Membership> membership_;
  const std::weak_ptr<EventLoop> loop_;
  const WaitReports reports_;
  std::atomic<bool> connected_{false};

  mutable std::mutex mutex_;
  std::map<std::string, Source> sources_;
  std::vector<std::string>
      meeting_;  // the meetings in which threads of this rank wait, for others that ask
  std::mutex meetings_mutex_;  // held while they look into the store: never on the loop
  std::vector<const Meeting*> meetings_;
  std::vector<const LocalWait*> local_waits_;  // under meetings_mutex_

  // On the loop.
  EventLoop::Registration ticking_;
  std::map<std::uint64_t, std::shared_ptr<Round>> rounds_;
  std::uint64_t last_round_ = 0;
  bool is_reporting_ = false;
  std::size_t said_level_ =
      0;  // which of the times was reported last, by this rank or another, and when
  Clock::time_point said_at_{};
  Clock::time_point next_tick_{};
};

// What a rank answers: the number of the round, whether it waits itself, and its progress. A peer's
// bytes are not trusted.
struct WaitAnswer {
  std::uint64_t round = 0;
  bool waits = false;
  Waits::Progress progress;
};
std::string encode(const WaitAnswer& answer);
std::optional<WaitAnswer> decode_wait_answer(std::string_view text);

}  // namespace weft::group
