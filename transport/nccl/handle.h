// SPDX-License-Identifier: Apache-2.0
// One rank's ncclComm_t and its stream. A non-blocking communicator takes one call at a time: a
// call may continue after it has returned (ncclInProgress) and must have ended before the next
// call, and before anything else is enqueued on the stream. So start() begins a call and settled()
// polls for its end.
//
// Thread-safe, but the caller of start() must itself wait for the call to settle before the next
// start().
#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <string_view>

#include <weft/base/deadline.h>
#include <weft/base/mutex.h>
#include <weft/cuda/stream.h>
#include <weft/transport/nccl/library.h>

namespace weft::transport::nccl {

class Handle {
 public:
  // Collective: blocks until all ranks have joined. Throws Timeout, PeerLost.
  Handle(std::shared_ptr<const Library> library, std::shared_ptr<cuda::Device> device,
         const ncclUniqueId& id, int rank, int size, Deadline deadline);
  // Retires the communicator: the thread that reclaims (cuda/retire.h) closes it, because closing
  // waits for the device. Work that is enqueued still runs.
  ~Handle();
  Handle(const Handle&) = delete;
  Handle& operator=(const Handle&) = delete;

  // Has high priority: operations that wait for gradients run before kernels that compute more of
  // them.
  const cuda::Stream& stream() const { return stream_; }

  // Makes an NCCL call, or a group of calls. Requires that the previous call has settled. Throws
  // Cancelled after abort(), or NCCL's error; then the communicator can only be aborted.
  using Call = std::function<ncclResult_t(const Library&, ncclComm_t, cudaStream_t)>;
  void start(const Call& call);
  // Returns true when the last call has ended and its work is on the stream. That takes tens of
  // microseconds after start(), or, if a peer must be connected first, until the peer has made its
  // call too. Throws the errors of start().
  bool settled();
  // Polls settled() until it returns true or the deadline passes; returns false at the deadline.
  bool settle(Deadline deadline);

  // The communicator's asynchronous error, if any.
  std::optional<Error> async_error() noexcept;

  // Ends the communicator's work on the device and frees the communicator. Blocks until the device
  // has stopped.
  void abort() noexcept;

 private:
  std::shared_ptr<const Library> library_;
  std::shared_ptr<cuda::Device> device_;
  cuda::Stream stream_;
  Mutex mutex_;                                        // NCCL takes one thread at a time
  ncclComm_t comm_ WEFT_GUARDED_BY(mutex_) = nullptr;  // null: aborted
  bool in_progress_ WEFT_GUARDED_BY(mutex_) = false;
};

}  // namespace weft::transport::nccl
