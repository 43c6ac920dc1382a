// The operations of one communicator that MPI has been asked for and has not ended. MPI moves only
// while it is called, so the loop asks it in every turn while there are any: a caller that blocks
// on an Op drives the loop, and so MPI, itself.
//
// Usable from every thread.
#pragma once

#include <chrono>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include <weft/base/event_loop.h>
#include <weft/base/op.h>
#include <weft/transport/mpi/world.h>

namespace weft::transport::mpi {

class Requests : public std::enable_shared_from_this<Requests> {
 public:
  struct Call {
    std::string name;                        // "all_reduce", for messages
    std::function<int(MPI_Request*)> start;  // one non-blocking call of MPI
    std::function<void()> finish;            // then: results to where they belong
    Pin pin;                                 // of all that MPI reads and writes, until it has ended
    bool is_barrier = false;                 // done only when all before it are
    std::optional<std::size_t> receives;     // bytes, of a message; its Op is told from whom
  };

  // `place` and `timeout` are those of the group, for messages and as the limit of each operation.
  Requests(std::shared_ptr<World> world, const std::shared_ptr<EventLoop>& loop, std::string place,
           std::chrono::milliseconds timeout);
  ~Requests();
  Requests(const Requests&) = delete;
  Requests& operator=(const Requests&) = delete;

  // An operation that start() will follow; failed at once after an abort.
  std::uint64_t expect(const Completion& completion);
  // Makes the call, unless the operation has been aborted meanwhile.
  void start(std::uint64_t key, Call call) noexcept;
  // Fails all that is expected and started, and what comes. Memory that MPI may still touch is kept
  // for ever.
  void abort(const Error& why) noexcept;
  // Nothing is left with MPI: its communicator may be freed.
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
  // Under the mutex. Entries that are done, in their order.
  std::vector<Entry> take_ended();
  std::optional<Error> why_late() const;
  void settle(Entry& entry, const MPI_Status& status);

  const std::shared_ptr<World> world_;
  const std::weak_ptr<EventLoop> loop_;
  EventLoop* const loop_address_;  // callers hold it; a turn must not
  const std::string place_;
  const std::chrono::milliseconds timeout_;

  mutable std::mutex mutex_;  // of what follows
  std::optional<Error> aborted_;
  bool is_clean_ = true;
  std::uint64_t next_key_ = 0;
  std::map<std::uint64_t, Completion> expected_;
  std::vector<Entry> entries_;
  std::vector<MPI_Request> natives_;  // of the same places
  std::vector<int> indices_;          // scratch
  std::vector<MPI_Status> statuses_;
  EventLoop::Registration watch_;  // while there are entries
};

}  // namespace weft::transport::mpi
