// What the dumps of a job tell of its ranks: each was asked at a moment of its own, and what was
// under way then may have ended since.
#pragma once

#include <chrono>
#include <cstdint>
#include <string>
#include <vector>

#include <weft/profiling/tools/dumps.h>
#include <weft/profiling/tools/participants.h>

namespace weft::tools {

// Of findings of one kind so many are told one by one.
constexpr std::size_t kMostOfAKind = 20;

bool gave_up(const Record& record);
// Whether others are or were waited for: it goes on, or gave up.
bool waits(const Record& record);
// A rank of a group as one of the job.
int job_rank(const Group& group, int rank);

// Refers to the dumps.
class Evidence {
 public:
  Evidence(const Dumps& dumps, std::chrono::nanoseconds older_than)
      : dumps_(dumps), participants_(dumps), older_than_(older_than.count()) {}

  const Participants& participants() const { return participants_; }

  // All in nanoseconds.
  std::int64_t now_of(const View& view) const { return dumps_.dumps[view.dump].time; }
  // How long a record was under way when the dump was made.
  std::int64_t age(const Record& record, const View& view) const {
    return now_of(view) - record.begun;
  }
  bool is_old(std::int64_t nanoseconds) const { return nanoseconds >= older_than_; }
  bool waits_long_or_in_vain(const Record& record, const View& view) const;
  // Both were asked long enough after it had begun. (Whoever was asked earlier may have come a
  // moment later.)
  bool is_old_to_both(const Record& record, const View& view, const View& other) const;
  // What the process did at that time, and ended, may have been overwritten in its recorder.
  bool has_forgotten(const View& view, std::int64_t time) const {
    return dumps_.dumps[view.dump].knows_since > time;
  }

  // What a participant has begun and not ended.
  std::vector<std::string> doings(int who) const;
  // "it is in …", or what it did last.
  std::string whereabouts(int who) const;
  bool on_several_hosts(const Group& group) const;
  // Why a rank that the group has no view of is missing: "there is no dump of it".
  std::string without_view(const Group& group, int rank) const;

 private:
  const Dumps& dumps_;
  const Participants participants_;
  const std::int64_t older_than_;
};

}  // namespace weft::tools
