// SPDX-License-Identifier: Apache-2.0
// How one group fails. Keeps the first error that breaks it and the errors that nobody has seen.
// Explains errors before it reports them, since one rank's lost connection is another rank's death.
//
// The group's Core owns it. Thread-safe. Nothing blocks except where a function says so; loss of a
// rank is told within kLossIsTold, or on a busy machine within kLossIsTrue.
#pragma once

#include <chrono>
#include <condition_variable>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <weft/base/error.h>
#include <weft/base/event_loop.h>
#include <weft/base/fence.h>
#include <weft/base/mutex.h>
#include <weft/engine/group/job.h>
#include <weft/engine/group/ledger.h>
#include <weft/engine/group/waits.h>
#include <weft/profiling/trace/description.h>
#include <weft/transport/transport.h>

namespace weft::group {

struct Core;

class Failure {
 public:
  // `options`, `member` and `ledger` are the group's. `owner` keeps this object alive: callbacks,
  // which may outlive it, hold the owner weakly.
  Failure(const CoreOptions& options, const trace::Member& member, const Ledger& ledger,
          const std::enable_shared_from_this<Core>& owner);
  // Logs an error that nobody has seen.
  ~Failure();
  Failure(const Failure&) = delete;
  Failure& operator=(const Failure&) = delete;

  // Fails all pending and later operations. The first reason stays.
  //
  // Also calls `tell`, for every failure and not only for the first: after this rank has stored its
  // reason and before connections break. So nothing that the others do upon it, such as leaving the
  // job, becomes the reason here.
  void fail(const Error& why, const std::function<void()>& tell = {});
  // Implements ProcessGroup::abort().
  void abort(const std::string& reason);
  // Breaks the group on all ranks because their calls differ.
  void differ(const std::string& how);
  // Fails as rank `from` of the group has, which has left it for that reason: a lost rank, or a
  // time-out. The reason names the ranks to blame, and nobody is asked for them.
  void fail_as_told(int from, const Error& why);
  // Tells the others that this rank leaves the broken group, and why it is broken: they may not
  // know yet.
  void tell_leaving();

  // The first failure also aborts these, and raises the flag that was given last. A communicator is
  // aborted at once if the group is broken already.
  void abort_on_failure(const std::shared_ptr<transport::Communicator>& communicator);
  void raise_on_failure(std::shared_ptr<HostFlag> flag);

  // True if the group is broken, now or within that time. Blocks that long.
  bool is_broken(std::chrono::milliseconds within = {});
  void throw_if_broken();
  void throw_if_aborted();
  // Throws like throw_if_broken(), and the error of an earlier operation that nobody has seen; may
  // then block like explain().
  void throw_if_failed();
  // True if operations have failed for lack of a rank, and it is not yet known which and why.
  bool waits_for_news();
  // The loss of a rank, if that has broken the group.
  std::optional<Error> loss();
  // Implements ProcessGroup::error().
  std::optional<Error> error();
  // Keeps the error of an operation whose Work nobody holds any more.
  void note_unseen(const Error& error);
  // Calls `meet`, which uses the store. If the store fails, waits a moment for the news of a loss
  // that explains it.
  void by_the_store(const std::function<void()>& meet);

  // Turns a backend's error into the group's. If a connection broke, names the rank that was lost,
  // if that is known or becomes known; may block that long.
  Error explain(const Error& error);
  // The same for threads that must not block: calls `done` with the error, at once on this thread,
  // or later on another.
  using Explained = std::function<void(const Error& why)>;
  void explain_later(const Error& error, Explained done);
  // Adds to a time-out the ranks that did not come to the operation. Asks them, and may then block
  // for a second.
  Error with_absent(const Error& timeout, const Wait& wait);
  // True if this error of an operation breaks the group.
  bool breaks_group(const Wait& operation, const Error& error);

 private:
  Error explained(const Error& error) const WEFT_REQUIRES(mutex_);  // by the present knowledge
  // True if a rank that the error names no longer listens. Blocks for a second at most.
  bool has_lost_listener(const Error& error) const;
  // explain_waiting() when the news of a loss has had the time to come.
  void explain_after_news();
  void explain_waiting();

  const CoreOptions& options_;
  const trace::Member member_;
  const Ledger& ledger_;
  const std::enable_shared_from_this<Core>& owner_;

  Mutex mutex_;
  std::condition_variable broken_changed_;
  std::optional<Error> broken_ WEFT_GUARDED_BY(mutex_);  // the first failure, with self()
  std::string reason_ WEFT_GUARDED_BY(mutex_);           // its text without self()
  std::optional<Error> unseen_ WEFT_GUARDED_BY(mutex_);
  // Ranks that did not come to the operation whose time-out broke the group.
  std::optional<Waits::Absent> absent_ WEFT_GUARDED_BY(mutex_);
  std::vector<std::pair<Error, Explained>> unexplained_ WEFT_GUARDED_BY(mutex_);
  int asking_ WEFT_GUARDED_BY(mutex_) = 0;                      // threads in explain() that wait
  EventLoop::Registration explaining_ WEFT_GUARDED_BY(mutex_);  // the timer for these
  // Communicators that the first failure aborts.
  std::vector<std::shared_ptr<transport::Communicator>> communicators_ WEFT_GUARDED_BY(mutex_);
  std::shared_ptr<HostFlag> flag_ WEFT_GUARDED_BY(mutex_);  // to be raised
};

}  // namespace weft::group
