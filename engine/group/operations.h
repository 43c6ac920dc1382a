// SPDX-License-Identifier: Apache-2.0
// Issues the operations of one group: orders and numbers them, and keeps those that have not
// ended and the calls that other ranks can compare.
//
// The group's Core owns it. Thread-safe: one operation is issued at a time, and the calls of
// several threads are ordered as they arrive. Nothing blocks for other ranks, except that the first
// operation on a device connects them (Joining::communicator()), and WEFT_DEBUG=detail.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>

#include <weft/base/deadline.h>
#include <weft/base/mutex.h>
#include <weft/base/op.h>
#include <weft/engine/group/carriers.h>
#include <weft/engine/group/detail_comparison.h>
#include <weft/engine/group/failure.h>
#include <weft/engine/group/job.h>
#include <weft/engine/group/joining.h>
#include <weft/engine/group/ledger.h>
#include <weft/engine/group/numbers.h>
#include <weft/engine/group/operation.h>
#include <weft/engine/group/recent_calls.h>
#include <weft/engine/group/unfinished.h>
#include <weft/engine/group/work.h>
#include <weft/profiling/trace/operation.h>
#include <weft/transport/transport.h>

namespace weft::group {

struct Core;
struct WorkState;

class Operations {
 public:
  // `core` owns this object. The parts of it that this class uses are constructed before.
  explicit Operations(Core& core);

  // Orders and issues one collective whose arguments have been checked. `call` runs with the mutex
  // held and may append several Ops: the Work is done when all are.
  using Call = std::function<void(transport::Communicator&, const Pin&, const Fence& ready,
                                  std::vector<Op>&)>;
  Work issue(Operation operation, const Call& call);
  using MessageCall = std::function<Op(transport::PointToPoint&, const Pin&, const Fence& ready)>;
  // Issues one send to `peer`, or a recv from it (kAnySource: from any).
  Work issue_message(const at::Tensor& tensor, int peer, bool is_send, int tag,
                     const MessageCall& call);
  // Breaks the group unless the operation ends within that time.
  Work limited(Work work, std::chrono::milliseconds limit);

  // Throws if an operation would be refused: if this rank has left the group, or like
  // Failure::throw_if_failed().
  void throw_if_refused();
  // Refuses later operations, because this rank leaves. Returns false if it has left before.
  bool refuse_later() { return !has_left_.exchange(true); }
  void throw_if_left() const;
  // Blocks until this rank's operations have ended, except for receives: nobody is left who could
  // want their bytes. Returns the name of one that has not ended by the deadline; "" if all have.
  std::string wait_for_all(Deadline deadline);

  // For the job's Waits (WaitSource). pending() leaves out an operation that is just being
  // issued.
  std::vector<Wait> pending();
  Progress progress();
  std::optional<std::string> call(std::uint64_t number) const { return recent_calls_.text(number); }

 private:
  struct Message;
  std::shared_ptr<WorkState> new_state(const c10::Device& device, bool host_waits) const;
  // The phases of issuing an operation.
  std::uint64_t begin_collective(const Operation& operation) WEFT_REQUIRES(mutex_);
  trace::Operation record(const Operation& operation, std::uint64_t number) const
      WEFT_REQUIRES(mutex_);
  void start(Operation& operation, std::uint64_t number, const Call& call,
             transport::Communicator& communicator, WorkState& state) WEFT_REQUIRES(mutex_);
  void follow_collective(const WorkState& state, std::uint64_t number, trace::Operation traced)
      WEFT_REQUIRES(mutex_);
  transport::PointToPoint& messages_of(transport::Communicator& communicator, int peer,
                                       int tag) const WEFT_REQUIRES(mutex_);
  void begin_message(const Message& message, const at::Tensor& tensor) WEFT_REQUIRES(mutex_);
  void follow_message(const Wait& wait, const Op& op, const Message& message,
                      trace::Operation traced) WEFT_REQUIRES(mutex_);
  void follow(const Wait& wait, const Op& op, std::function<void(const std::optional<Error>&)> done)
      WEFT_REQUIRES(mutex_);

  Core& core_;  // for handles and callbacks, which keep it alive or hold it weakly
  const CoreOptions& options_;
  const trace::Member member_;
  const std::shared_ptr<Ledger> ledger_;
  Failure& failure_;
  Carriers& carriers_;
  Joining& joining_;
  std::atomic<bool> has_left_{false};
  Mutex mutex_;  // held while an operation is issued: the order of operations
  Unfinished unfinished_ WEFT_GUARDED_BY(mutex_);
  RecentCalls recent_calls_;
  MessageNumbers message_numbers_;
  DetailComparison comparison_;
};

}  // namespace weft::group
