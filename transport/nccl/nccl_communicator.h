// SPDX-License-Identifier: Apache-2.0
// Collectives over NCCL, on device memory, all on one stream of high priority. The caller's thread
// enqueues an operation: the stream waits for its `ready` fence, NCCL adds its kernels, and an
// event after them is its done(). An operation that NCCL cannot enqueue at once (a first use that
// must connect to a peer) waits in a queue, together with all later ones; the event loop enqueues
// them when NCCL can take them. A thread that makes a stream wait for such an operation blocks
// until the operation is enqueued.
//
// Messages have no tags: the n-th send to a rank meets its n-th recv. A recv occupies the stream
// until its send has arrived, so ranks that send and receive at the same time must use all_to_all,
// or messages smaller than NCCL's buffers (about 1 MiB).
//
// Operations on a stream that is captured into a CUDA graph become part of the graph: they are
// enqueued before the call returns and run whenever the graph is launched. Their Ops end when the
// capture does. The host does not observe the launches, so an operation that hangs or fails there
// has no deadline. All ranks must capture and launch in the same way; meanwhile nothing else may
// use the communicator.
//
// The first error aborts the whole communicator: its operations fail, its kernels stop, and then
// every fence passes.
#pragma once

#include <deque>
#include <mutex>

#include <weft/base/mutex.h>
#include <weft/cuda/memory.h>
#include <weft/cuda/span.h>
#include <weft/profiling/trace/trace.h>
#include <weft/transport/in_flight.h>
#include <weft/transport/nccl/calls.h>
#include <weft/transport/nccl/handle.h>
#include <weft/transport/transport.h>

namespace weft::transport::nccl {

class NcclCommunicator final : public Communicator,
                               public PointToPoint,
                               public std::enable_shared_from_this<NcclCommunicator> {
 public:
  // Collective: connects to every other rank and runs a first operation with them, so that kernels
  // are loaded and connections made before any stream waits for them. Blocks for at most the
  // group's timeout. Throws Timeout, PeerLost, Caller (two ranks on one GPU).
  NcclCommunicator(const JoinOptions& options, std::shared_ptr<const Library> library);
  ~NcclCommunicator() override;

  std::string_view backend() const override { return "nccl"; }
  int rank() const override { return rank_; }
  int size() const override { return size_; }
  bool can_reduce(Dtype dtype, ReduceOp op) const override;
  PointToPoint* point_to_point() override { return this; }

  Op run(const Collective& collective, Pin pin, Fence ready) noexcept override;
  void abort(const Error& why) noexcept override;

  bool has_tags() const override { return false; }
  bool has_any_source() const override { return false; }
  Op send(const Elements& data, int to, int tag, Pin pin, Fence ready) noexcept override;
  Op recv(const Elements& data, int from, int tag, Pin pin, Fence ready) noexcept override;

 private:
  class Launch;  // the done() of an operation that waits in line_
  struct Request {
    std::string name;
    Handle::Call call;
    Fence ready;
    std::shared_ptr<Launch> launch;
    // For the timeline.
    std::size_t bytes = 0;
    trace::Arrow issued = {};  // from the issuing thread, even if another one starts it later
    cuda::Span span = {};
    bool started = false;
  };

  void warm_up(Deadline deadline);
  std::optional<Reduction> reduction_for(Dtype dtype, ReduceOp op) const;
  // Issues an operation. `bytes` counts all data that it reads and writes.
  Op issue(std::string name, std::size_t bytes, Pin pin, Fence ready, Handle::Call call,
           std::optional<ReduceOp> reduction = std::nullopt) noexcept;
  void see_through_capture(const Launch& launch, const std::string& name) noexcept;
  // A failed Op, for a reduction that can_reduce() refuses or a message that NCCL cannot send.
  Op refuse(Blame blame, const std::string& text) const noexcept;
  void start(Request& request) WEFT_REQUIRES(mutex_);
  // Records a fence after the work that NCCL has enqueued for the request.
  Fence end_of(Request& request) WEFT_REQUIRES(mutex_);
  // Starts the operations in line_ as far as NCCL takes them.
  void advance() noexcept;
  // Checks for errors and the timeout. Runs on the loop while an operation is pending.
  void watch(const InFlight::Oldest& oldest) noexcept;
  // The body of abort(). Takes over the caller's lock, so that line_ cannot advance between the
  // error and the abort.
  void fail(std::unique_lock<std::mutex> lock, const Error& why) noexcept WEFT_REQUIRES(mutex_);
  // Starts a thread that aborts the handle. NCCL may or may not have enqueued `begun`.
  void break_off(std::shared_ptr<Launch> begun) noexcept;

  const int rank_;
  const int size_;
  const std::string place_;  // "on group 'x' (nccl, rank 0 of 2)"
  const std::chrono::milliseconds timeout_;
  std::shared_ptr<cuda::Device> device_;
  std::shared_ptr<Handle> handle_;
  cuda::DeviceMemory scratch_;  // data of barriers and of the warm-up
  Mutex mutex_;                 // also held while work is put on the stream, so that it is in order
  std::deque<Request> line_ WEFT_GUARDED_BY(mutex_);
  std::optional<Error> broken_ WEFT_GUARDED_BY(mutex_);
  InFlight in_flight_;
};

}  // namespace weft::transport::nccl
