// Collectives over NCCL, on device memory, all on one stream of high priority. An operation is
// enqueued by the caller's thread: the stream waits for its `ready` fence, NCCL adds its kernels,
// an event behind them is its done(). What NCCL cannot enqueue at once (a first use that must
// connect to a peer) waits in line, together with everything behind it; the event loop moves the
// line on. Only who makes a stream wait for such an operation waits on the host, until it is
// enqueued.
//
// Messages have no tags: the n-th send to a rank meets its n-th recv. A recv occupies the stream
// until its send has come, so ranks that send and receive at the same time use all_to_all, or
// messages below NCCL's buffers (about 1 MiB).
//
// A stream that is captured into a CUDA graph takes its operations with it: they are enqueued
// before the call returns, and run whenever the graph is launched. Their Ops end when the capture
// does, and nobody on the host hears of the launches: what hangs or fails there has no deadline.
// All ranks capture and launch alike; meanwhile nothing else may use the communicator.
//
// After the first error the communicator is aborted as a whole: its operations fail, what runs on
// the device stops, and with it every fence passes.
#pragma once

#include <deque>
#include <mutex>

#include <weft/cuda/memory.h>
#include <weft/cuda/span.h>
#include <weft/transport/in_flight.h>
#include <weft/transport/nccl/calls.h>
#include <weft/transport/nccl/handle.h>
#include <weft/transport/transport.h>

namespace weft::transport::nccl {

class NcclCommunicator final : public Communicator,
                               public PointToPoint,
                               public std::enable_shared_from_this<NcclCommunicator> {
 public:
  // Collective: connects to every other rank and runs one operation with them, so that kernels are
  // loaded and connections made before any stream waits for them. Blocks; throws Timeout, PeerLost,
  // Caller (two ranks on one GPU).
  NcclCommunicator(const JoinOptions& options, std::shared_ptr<const Library> library);
  ~NcclCommunicator() override;

  std::string_view backend() const override { return "nccl"; }
  int rank() const override { return rank_; }
  int size() const override { return size_; }
  bool can_reduce(Dtype dtype, ReduceOp op) const override;
  PointToPoint* point_to_point() override { return this; }

  Op broadcast(const Elements& data, int root, Pin pin, Fence ready) noexcept override;
  Op all_reduce(const Elements& data, ReduceOp op, Pin pin, Fence ready) noexcept override;
  Op reduce(const Elements& data, int root, ReduceOp op, Pin pin, Fence ready) noexcept override;
  Op all_gather(std::span<const Slice> outputs, const Elements& input, Pin pin,
                Fence ready) noexcept override;
  Op gather(std::span<const Slice> outputs, const Elements& input, int root, Pin pin,
            Fence ready) noexcept override;
  Op scatter(const Elements& output, std::span<const Slice> inputs, int root, Pin pin,
             Fence ready) noexcept override;
  Op reduce_scatter(const Elements& output, std::span<const Slice> inputs, ReduceOp op, Pin pin,
                    Fence ready) noexcept override;
  Op all_to_all(std::span<const Slice> outputs, std::span<const Slice> inputs, Dtype dtype, Pin pin,
                Fence ready) noexcept override;
  Op barrier(Fence ready) noexcept override;
  void abort(const Error& why) noexcept override;

  bool has_tags() const override { return false; }
  bool has_any_source() const override { return false; }
  Op send(const Elements& data, int to, int tag, Pin pin, Fence ready) noexcept override;
  Op recv(const Elements& data, int from, int tag, Pin pin, Fence ready) noexcept override;

 private:
  class Launch;  // the done() of an operation that waits in line
  struct Request {
    std::string name;
    Handle::Call call;
    Fence ready;
    std::shared_ptr<Launch> launch;
    // For the timeline.
    std::size_t bytes = 0;
    trace::Arrow issued = {};  // from there, also where another thread starts it later
    cuda::Span span = {};
    bool started = false;
  };

  void warm_up(Deadline deadline);
  std::optional<Reduction> reduction_for(Dtype dtype, ReduceOp op) const;
  // `bytes` of all that it reads and writes.
  Op issue(std::string name, std::size_t bytes, Pin pin, Fence ready, Handle::Call call,
           std::optional<ReduceOp> reduction = std::nullopt) noexcept;
  void see_through_capture(const Launch& launch, const std::string& name) noexcept;
  // Of a reduction that can_reduce() refuses, or a message that NCCL does not know.
  Op refuse(Blame blame, const std::string& text) const noexcept;
  void start(Request& request);
  // Behind what NCCL has enqueued of it.
  Fence end_of(Request& request);
  // Moves the line on as far as NCCL lets it.
  void advance() noexcept;
  // On the loop, while an operation is under way.
  void watch(const InFlight::Oldest& oldest) noexcept;
  // What abort() does, under the lock of who saw the error: nothing may move the line on in
  // between.
  void fail(std::unique_lock<std::mutex> lock, const Error& why) noexcept;
  // Has a thread of its own stop what runs on the device; `begun` is what NCCL may or may not have
  // enqueued.
  void break_off(std::shared_ptr<Launch> begun) noexcept;

  const int rank_;
  const int size_;
  const std::string place_;  // "on group 'x' (nccl, rank 0 of 2)"
  const std::chrono::milliseconds timeout_;
  std::shared_ptr<cuda::Device> device_;
  std::shared_ptr<Handle> handle_;
  cuda::DeviceMemory scratch_;  // what a barrier reduces, and the warm-up sends
  std::mutex mutex_;            // of the order on the stream, and of what follows
  std::deque<Request> line_;
  std::optional<Error> broken_;
  InFlight in_flight_;
};

}  // namespace weft::transport::nccl
