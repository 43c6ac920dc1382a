// One rank's ncclComm_t and the stream it works on. A non-blocking communicator takes one call at a
// time: a call may go on behind the caller's back (ncclInProgress) and must have ended before the
// next one, and before anything else is enqueued on the stream. So a call is start()ed and then
// asked for with settled().
//
// Usable from every thread; who starts a call is also who asks for it.
#pragma once

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
  Handle(std::shared_ptr<const Library> library, std::shared_ptr<cuda::Device> device,
         const ncclUniqueId& id, int rank, int size, Deadline deadline);
  // Retires the communicator: closing one waits for the device, so whoever reclaims does it
  // (cuda/retire.h). What is enqueued still runs.
  ~Handle();
  Handle(const Handle&) = delete;
  Handle& operator=(const Handle&) = delete;

  // Of high priority: what waits for gradients goes before what makes more of them.
  const cuda::Stream& stream() const { return stream_; }

  // Makes an NCCL call, or a group of calls. The one before has settled. Throws Cancelled after
  // abort(), or NCCL's error; then the communicator can only be aborted.
  using Call = std::function<ncclResult_t(const Library&, ncclComm_t, cudaStream_t)>;
  void start(const Call& call);
  // Whether the last call has ended and its work is on the stream: tens of microseconds after
  // start(), but where a peer must be connected first, not before that peer has come too. Throws as
  // start() does.
  bool settled();
  // The same, asked until it is so or the deadline comes.
  bool settle(Deadline deadline);

  // What went wrong behind the scenes since.
  std::optional<Error> async_error() noexcept;

  // Ends what runs on the device and frees the communicator. Blocks until the device's part of it
  // has stopped.
  void abort() noexcept;

 private:
  std::shared_ptr<const Library> library_;
  std::shared_ptr<cuda::Device> device_;
  cuda::Stream stream_;
  std::mutex mutex_;           // NCCL takes one thread at a time
  ncclComm_t comm_ = nullptr;  // null: aborted
  bool in_progress_ = false;
};

}  // namespace weft::transport::nccl
