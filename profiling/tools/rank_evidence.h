// SPDX-License-Identifier: Apache-2.0
// Facts about the ranks of a job, from its dumps. Each dump was made at a time of its own, and
// operations that were open then may have ended since.
#pragma once

#include <chrono>
#include <cstdint>
#include <string>
#include <vector>

#include <weft/profiling/tools/dumps.h>
#include <weft/profiling/tools/participants.h>

namespace weft::tools {

// At most so many findings of one kind are reported singly.
constexpr std::size_t kMostOfAKind = 20;

bool gave_up(const Record& record);
// Whether the operation waits or waited for others: it is open, or gave up.
bool waits(const Record& record);
// Converts a rank of a group to a rank of the job.
int job_rank(const Group& group, int rank);

// Keeps a reference to the dumps.
class Evidence {
 public:
  Evidence(const Dumps& dumps, std::chrono::nanoseconds older_than)
      : dumps_(dumps), participants_(dumps), older_than_(older_than.count()) {}

  const Participants& participants() const { return participants_; }

  // All times are in nanoseconds.
  std::int64_t now_of(const View& view) const { return dumps_.dumps[view.dump].time; }
  // How long before the dump the operation had begun.
  std::int64_t age(const Record& record, const View& view) const {
    return now_of(view) - record.begun;
  }
  bool is_old(std::int64_t nanoseconds) const { return nanoseconds >= older_than_; }
  bool waits_long_or_in_vain(const Record& record, const View& view) const;
  // Whether both dumps were made long enough after the operation began. (A rank whose dump was made
  // earlier may have joined a moment later.)
  bool is_old_to_both(const Record& record, const View& view, const View& other) const;
  // Whether records of operations that ended and began at or before that time may have been
  // overwritten.
  bool has_forgotten(const View& view, std::int64_t time) const {
    return dumps_.dumps[view.dump].knows_since > time;
  }

  // Descriptions of the operations that a participant has begun and not ended.
  std::vector<std::string> doings(int who) const;
  // "it is in …", or its last operation.
  std::string whereabouts(int who) const;
  // "it is process 4711", for those who look into it, and the ranges in which its program is.
  std::string program_of(const Group& group, const View& view) const;
  bool on_several_hosts(const Group& group) const;
  // Why the group has no view of a rank: "there is no dump of it".
  std::string without_view(const Group& group, int rank) const;

 private:
  const Dumps& dumps_;
  const Participants participants_;
  const std::int64_t older_than_;
};

}  // namespace weft::tools
