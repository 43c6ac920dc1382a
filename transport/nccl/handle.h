// One rank's ncclComm_t and the stream it works on. NCCL takes one thread at a time, and a non-blocking communicator one call
// at a time: each call may go on behind the caller's back (ncclInProgress) and must have ended before the next one, and before
// anything else is enqueued on the stream.
#pragma once

#include <atomic>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string_view>

#include <weft/base/deadline.h>
#include <weft/cuda/stream.h>
#include <weft/transport/nccl/library.h>

namespace weft::transport::nccl {

class Handle {
 public:
  // Collective: meets the other ranks. Blocks until all have come; throws Timeout, PeerLost.
  Handle(std::shared_ptr<const Library> library, std::shared_ptr<cuda::Device> device, const ncclUniqueId& id, int rank,
         int size, Deadline deadline);
  // Retires the communicator: closing one waits for the device, so whoever reclaims does it (cuda/retire.h). What is
  // enqueued still runs.
  ~Handle();
  Handle(const Handle&) = delete;
  Handle& operator=(const Handle&) = delete;

  const Library& library() const { return *library_; }
  // Of high priority: what waits for gradients goes before what makes more of them.
  const cuda::Stream& stream() const { return stream_; }

  // Makes an NCCL call, or a group of calls, and waits until they are on the stream: tens of microseconds, but at the first
  // use of an algorithm or a peer until that peer has come too. Throws Timeout, Cancelled after cancel(), or NCCL's error;
  // then the communicator can only be aborted.
  using Call = std::function<ncclResult_t(const Library&, ncclComm_t, cudaStream_t)>;
  void enqueue(const Call& call, Deadline deadline);

  // What went wrong behind the scenes since. Nothing as well while another thread is in NCCL.
  std::optional<Error> async_error() noexcept;

  // Lets a thread that is in enqueue() go, and refuses the next ones. Does not block.
  void cancel() noexcept { cancelled_ = true; }
  // Ends what runs on the device and frees the communicator. Blocks until the stream has come so far.
  void abort() noexcept;

 private:
  // Waits for what `result` says is in progress.
  void settle(ncclResult_t result, std::string_view what, Deadline deadline);

  std::shared_ptr<const Library> library_;
  std::shared_ptr<cuda::Device> device_;
  cuda::Stream stream_;
  std::atomic<bool> cancelled_{false};
  std::mutex mutex_;  // of comm_: who holds it is the one thread in NCCL
  ncclComm_t comm_ = nullptr;
};

}  // namespace weft::transport::nccl
