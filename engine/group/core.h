// The implementation behind a ProcessGroup: communicators by device, the order of operations, and
// failures. Internal.
#pragma once

#include <functional>
#include <mutex>
#include <set>

#include <weft/base/inheritance.h>
#include <weft/engine/group/carriers.h>
#include <weft/engine/group/failure.h>
#include <weft/engine/group/job.h>
#include <weft/engine/group/joining.h>
#include <weft/engine/group/ledger.h>
#include <weft/engine/group/numbers.h>
#include <weft/engine/group/operations.h>
#include <weft/engine/group/process_group.h>
#include <weft/engine/group/waits.h>
#include <weft/engine/store/store.h>
#include <weft/engine/tensor/cuda_devices.h>
#include <weft/profiling/trace/operation.h>
#include <weft/transport/transport.h>

namespace weft::group {

struct Core : std::enable_shared_from_this<Core> {
  // Opens the backends. Call join() next, which meets the other ranks. The operations are recorded
  // as those of `as`.
  Core(CoreOptions options, trace::Member as);
  ~Core();

  // Begins to listen to the other ranks, and meets them: see Joining::join().
  void join(Core* parent);

  // The ranks compare `training`.
  Work all_reduce(const at::Tensor& tensor, ReduceOp op, transport::Training training = {});
  // `begins_after`: see Operation. It may depend on earlier operations, never on later ones.
  Work broadcast(const at::Tensor& tensor, int root, Fence begins_after = {},
                 transport::Training training = {});
  void monitored_barrier(std::chrono::milliseconds timeout);
  ProcessGroup new_group(const std::vector<int>& ranks, const ProcessGroupOptions& wanted);
  ProcessGroup split(int color, int key);
  std::vector<int> living_ranks() const { return ledger->living(); }
  std::vector<std::string> waiting_for() { return options.job->waits->waiting_for(options.name); }
  // Implements ProcessGroup::leave().
  void leave(std::chrono::milliseconds limit);
  // True if that rank of the group has left it, and said so.
  bool has_left(int rank) const;
  // Makes a Core and joins. On failure, tells the other ranks why.
  static ProcessGroup make(const CoreOptions& options, Core* parent = nullptr);
  static Core& of(const ProcessGroup& group) { return group.core(); }

  // Throws Caller in a child that was forked after the group was made.
  void require_own() const {
    if (made_in_.is_inherited()) made_in_.throw_inherited(options.self());
  }

  const MadeIn made_in_;
  const CoreOptions options;
  const trace::Member member;
  const std::shared_ptr<StoreBootstrap> bootstrap;
  const std::shared_ptr<Ledger> ledger;
  Failure failure;
  Carriers carriers;
  Joining joining;
  CallNumbers numbers;
  std::weak_ptr<Core> handle;  // the Core as handles hold it, with its LeaveOnDrop
  Operations operations;

 private:
  struct LeaveOnDrop;
  StoreBootstrap meeting(const std::string& base, Waits::Meeting& wait);
  std::set<int> everybody_else() const;
  std::set<int> count_in(const std::string& base, Deadline deadline);
  void lead_monitored_barrier(const std::string& base, std::chrono::milliseconds timeout);
  void follow_monitored_barrier(const std::string& base, std::chrono::milliseconds timeout);
  void listen();
  // Leaves within the group's timeout, unless leave() was called. Logs the operations that did not
  // end in time.
  void leave_at_last();
  // Waits for this rank's operations, and until the others have completed them too. Returns an
  // error for those that were not done within `limit`.
  std::optional<Error> part(std::chrono::milliseconds limit);
  // Warns of messages from other ranks that this rank has not received.
  void warn_of_unreceived();
  // Makes the group of this rank's color in the `count`-th split() of this group.
  ProcessGroup divide(int count, int color, int key);
  ProcessGroup make_subgroup(const std::vector<int>& ranks, const std::string& prefix,
                             CoreOptions made);

  std::mutex monitored_mutex_;  // held through a monitored barrier: threads of this rank take turns
  // This rank's keys in the store: those of the monitored round that passed last and of later ones,
  // and those of earlier rounds. Guarded by monitored_mutex_.
  std::vector<std::string> monitored_keys_, monitored_stale_;
};

// init_process_group() with the given GPUs.
ProcessGroup init(ProcessGroupOptions options, std::shared_ptr<tensor::CudaDevices> devices);

}  // namespace weft::group
