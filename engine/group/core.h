// SPDX-License-Identifier: Apache-2.0
// The implementation behind a ProcessGroup: the parts of a group, each with a header of its own,
// and the state that they share. Internal.
//
// Handles and Works own the Core together, and leave the group when the last of them is dropped
// (make()). Callbacks of the job's loop hold it weakly. The parts are thread-safe.
#pragma once

#include <memory>

#include <weft/base/inheritance.h>
#include <weft/engine/group/carriers.h>
#include <weft/engine/group/failure.h>
#include <weft/engine/group/job.h>
#include <weft/engine/group/joining.h>
#include <weft/engine/group/ledger.h>
#include <weft/engine/group/monitored_barrier.h>
#include <weft/engine/group/numbers.h>
#include <weft/engine/group/object_turns.h>
#include <weft/engine/group/operations.h>
#include <weft/engine/group/process_group.h>
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

  // Makes a Core and joins. On failure, tells the other ranks why.
  static ProcessGroup make(const CoreOptions& options, Core* parent = nullptr);
  static Core& of(const ProcessGroup& group) { return group.core(); }

  // Throws Caller in a child that was forked after the group was made.
  void require_own() const {
    if (made_in.is_inherited()) made_in.throw_inherited(options.self());
  }

  const MadeIn made_in;
  // Does not change after join().
  CoreOptions options;
  const trace::Member member;
  const std::shared_ptr<StoreBootstrap> bootstrap;
  const std::shared_ptr<Ledger> ledger;
  Failure failure;
  Carriers carriers;
  Joining joining;
  CallNumbers numbers;
  std::weak_ptr<Core> handle;  // the Core as handles hold it, with its LeaveOnDrop
  Operations operations;
  MonitoredBarrier monitored_barrier;
  ObjectTurns object_turns;
};

// init_process_group() with the given GPUs.
ProcessGroup init(ProcessGroupOptions options, std::shared_ptr<tensor::CudaDevices> devices);

}  // namespace weft::group
