// SPDX-License-Identifier: Apache-2.0
// The pending MPI operations of one communicator. MPI makes progress only while it is called, so
// the loop calls it in every turn while operations are pending. A caller that blocks on an Op
// drives the loop, and so MPI, itself.
//
// Usable from every thread.
#pragma once

#include <chrono>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include <weft/base/event_loop.h>
#include <weft/base/mutex.h>
#include <weft/base/op.h>
#include <weft/transport/mpi/world.h>

namespace weft::transport::mpi {

class Requests : public std::enable_shared_from_this<Requests> {
 public:
  struct Call {
    std::string name;                        // "all_reduce", for messages
    std::function<int(MPI_Request*)> start;  // one non-blocking call of MPI
    std::function<void()> finish;            // then copies results to where they belong
    Pin pin;                  // of all memory that MPI uses; held until the call has ended
    bool is_barrier = false;  // done only when all earlier operations are
    std::optional<std::size_t> receives;  // bytes of a recv; its Op gets the source rank
  };

  // `place` describes the group in error texts; `timeout` limits each operation.
  Requests(std::shared_ptr<World> world, const std::shared_ptr<EventLoop>& loop, std::string place,
           std::chrono::milliseconds timeout);
  ~Requests();
  Requests(const Requests&) = delete;
  Requests& operator=(const Requests&) = delete;

  // Announces an operation that start() will start. After an abort it fails at once.
  std::uint64_t expect(const Completion& completion);
  // Makes the call, unless abort() has failed the operation.
  void start(std::uint64_t key, Call call) noexcept;
  // Fails all announced, started and later operations. Keeps memory that MPI may still use for
  // ever.
  void abort(const Error& why) noexcept;
  // True if MPI has no operation left, so that its communicator may be freed.
  bool is_clean() const;

 private:
  struct Entry {
    Call call;
    std::optional<Completion> completion;
    std::chrono::steady_clock::time_point since;
    bool has_ended = false;
    std::optional<Error> error;
  };

  bool turn();
  // Removes and returns the entries that are done, in order.
  std::vector<Entry> take_ended() WEFT_REQUIRES(mutex_);
  std::optional<Error> why_late() const WEFT_REQUIRES(mutex_);
  void settle(Entry& entry, const MPI_Status& status) WEFT_REQUIRES(mutex_);

  const std::shared_ptr<World> world_;
  const std::weak_ptr<EventLoop> loop_;
  EventLoop* const loop_address_;  // callers own the loop; a turn must not
  const std::string place_;
  const std::chrono::milliseconds timeout_;

  mutable Mutex mutex_;
  std::optional<Error> aborted_ WEFT_GUARDED_BY(mutex_);
  bool is_clean_ WEFT_GUARDED_BY(mutex_) = true;
  std::uint64_t next_key_ WEFT_GUARDED_BY(mutex_) = 0;
  std::map<std::uint64_t, Completion> expected_ WEFT_GUARDED_BY(mutex_);
  std::vector<Entry> entries_ WEFT_GUARDED_BY(mutex_);
  std::vector<MPI_Request> natives_ WEFT_GUARDED_BY(mutex_);  // of entries_, by the same index
  std::vector<int> indices_ WEFT_GUARDED_BY(mutex_);          // scratch
  std::vector<MPI_Status> statuses_ WEFT_GUARDED_BY(mutex_);
  EventLoop::Registration watch_ WEFT_GUARDED_BY(mutex_);  // while there are entries
};

}  // namespace weft::transport::mpi
