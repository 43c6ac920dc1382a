// SPDX-License-Identifier: Apache-2.0
// How the workers of a job whose size is known join it: each publishes its record and waits for
// all others' records. A worker that finds the job wrong (two world sizes, two workers of one rank)
// refuses it, and then no worker joins. Lives on the stack of the thread that joins; functions
// block on the store.
#pragma once

#include <chrono>
#include <optional>
#include <string>
#include <utility>

#include <weft/base/deadline.h>
#include <weft/base/error.h>
#include <weft/base/patience.h>
#include <weft/engine/call/known_workers.h>
#include <weft/engine/call/records.h>
#include <weft/engine/call/types.h>
#include <weft/transport/bootstrap.h>

namespace weft::call {

// How long a worker that has read a forged value waits for the others, which may have other
// secrets, and read that in the values that it writes.
constexpr auto kOthersCome = std::chrono::seconds(5);

class FixedJob {
 public:
  // `self` has its rank.
  FixedJob(transport::Bootstrap& store, WorkerInfo self, int size)
      : store_(store), self_(std::move(self)), size_(size) {}

  // Publishes this worker's record and returns all workers, once all have come; on rank 0, which
  // may host the store, once all have read the records. Throws Caller if the rank is taken, if
  // names do not differ, if workers give different sizes, if another worker has refused the job, or
  // if the store refuses a value; Timeout, naming the missing workers.
  WorkerTable join(const WorkerRecord& record, Deadline deadline, const WaitReports& reports);
  // Tells the store that this worker does not join. Call it after every error.
  void give_up() noexcept;

 private:
  // Throws Caller if the worker that came first gave another world size, and makes the workers that
  // wait throw too.
  void check_size();
  // Calls read(), and notes the error if the store refuses a value. This worker throws it when the
  // others have read the values too, since it may host the store.
  template <class Read>
  void note_forged(const Read& read);
  [[noreturn]] void refuse(const std::string& why);
  // Throws the reason if another worker has refused the job.
  void throw_if_refused();
  [[noreturn]] void throw_refused(const std::string& why);
  // Waits for the record that the worker of that rank publishes. When a report is due, logs which
  // ranks are missing, if this is the lowest rank that has come.
  transport::Bootstrap::Bytes published_by(int rank, Deadline deadline, Patience& patience);
  void wait_until_all_have_read(Deadline deadline, Patience& patience);
  std::string has_waited(std::chrono::milliseconds waited) const;

  transport::Bootstrap& store_;
  const WorkerInfo self_;
  const int size_;
  bool is_refused_ = false;  // refused, and its rank given up
  // Names a value that no worker with this one's secret has written. This worker then waits for
  // the others until that time only.
  std::optional<Error> forged_;
  Deadline until_ = Deadline::never();
};

// Throws Caller if another worker that is still joining has that rank, and makes that worker throw
// too. `before` is the store that an earlier worker of the same rank used. Blocks for at most two
// seconds.
void check_rank_is_free(transport::Bootstrap& before, const WorkerInfo& self);
// Tells the store that the worker of that rank, which it has counted, does not join, so that the
// next one need not look for it.
void give_up_rank(transport::Bootstrap& store, int rank) noexcept;

}  // namespace weft::call
