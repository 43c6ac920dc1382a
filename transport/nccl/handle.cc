// SPDX-License-Identifier: Apache-2.0
#include <exception>
#include <utility>

#include <weft/base/log.h>
#include <weft/base/mutex.h>
#include <weft/cuda/poll.h>
#include <weft/cuda/retire.h>
#include <weft/transport/nccl/handle.h>

namespace weft::transport::nccl {

namespace {

// How long the other ranks may take to close their communicators before this rank aborts its own.
constexpr auto kClosing = std::chrono::seconds(10);

// The result of the last call on the communicator; ncclInProgress until it has ended.
ncclResult_t state_of(const Library& library, ncclComm_t comm) {
  ncclResult_t state = ncclSuccess;
  const ncclResult_t asked = library.comm_get_async_error(comm, &state);
  return asked == ncclSuccess ? state : asked;
}

// Closes a communicator: waits for its pending work, then frees it.
void close(const Library& library, cuda::Device& device, ncclComm_t comm) {
  if (device.is_lost()) return;  // nothing on a lost device can be freed
  cuda::DeviceGuard guard(device);
  ncclResult_t result = library.comm_finalize(comm);
  if (result == ncclInProgress) {
    cuda::poll_until([&] { return (result = state_of(library, comm)) != ncclInProgress; },
                     Deadline::in(kClosing));
  }
  const bool orderly = result == ncclSuccess;
  if (!orderly)
    log::warn(
        error_of(library, result, "closing an NCCL communicator, which is aborted instead").text());
  result = orderly ? library.comm_destroy(comm) : library.comm_abort(comm);
  if (result != ncclSuccess)
    log::warn(error_of(library, result, "freeing an NCCL communicator").text());
}

}  // namespace

Handle::Handle(std::shared_ptr<const Library> library, std::shared_ptr<cuda::Device> device,
               const ncclUniqueId& id, int rank, int size, Deadline deadline)
    : library_(std::move(library)),
      device_(std::move(device)),
      stream_(*device_, cuda::Priority::High) {
  // The initializer stores nccl.h's size and version of the struct. The library reads the fields
  // that both know and uses defaults for newer ones, so it may be older or newer than nccl.h.
  ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
  config.blocking = 0;
  try {
    {
      cuda::DeviceGuard guard(*device_);
      const ncclResult_t started = library_->comm_init_rank_config(&comm_, size, id, rank, &config);
      in_progress_ = started == ncclInProgress;
      if (started != ncclSuccess && !in_progress_)
        throw error_of(*library_, started, "ncclCommInitRankConfig");
    }
    if (!settle(deadline)) throw Error(Blame::Timeout, "NCCL: not all ranks joined");
  } catch (...) {
    abort();
    throw;
  }
}

Handle::~Handle() {
  if (comm_ == nullptr) return;
  // The device owns its retirement, so it still exists when the task runs.
  device_->retirement().retire(Fence(), [library = library_, &device = *device_, comm = comm_] {
    close(*library, device, comm);
  });
}

void Handle::start(const Call& call) {
  MutexLock lock(mutex_);
  if (comm_ == nullptr) throw Error(Blame::Cancelled, "the NCCL communicator was aborted");
  cuda::DeviceGuard guard(*device_);
  const ncclResult_t result = call(*library_, comm_, stream_.native());
  in_progress_ = result == ncclInProgress;
  if (result != ncclSuccess && !in_progress_) throw error_of(*library_, result, "NCCL");
}

bool Handle::settled() {
  MutexLock lock(mutex_);
  if (comm_ == nullptr) throw Error(Blame::Cancelled, "the NCCL communicator was aborted");
  if (!in_progress_) return true;
  const ncclResult_t result = state_of(*library_, comm_);
  if (result == ncclInProgress) return false;
  in_progress_ = false;
  if (result != ncclSuccess) throw error_of(*library_, result, "NCCL");
  return true;
}

bool Handle::settle(Deadline deadline) {
  std::exception_ptr failure;
  const auto ended = [&] {
    try {
      return settled();
    } catch (...) {
      failure = std::current_exception();
      return true;
    }
  };
  const bool in_time = cuda::poll_until(ended, deadline);
  if (failure) std::rethrow_exception(failure);
  return in_time;
}

std::optional<Error> Handle::async_error() noexcept {
  MutexLock lock(mutex_);
  if (comm_ == nullptr) return std::nullopt;
  const ncclResult_t result = state_of(*library_, comm_);
  if (result == ncclSuccess || result == ncclInProgress) return std::nullopt;
  return error_of(*library_, result, "NCCL");
}

void Handle::abort() noexcept {
  ncclComm_t comm = nullptr;
  {
    MutexLock lock(mutex_);
    comm = std::exchange(comm_, nullptr);
  }
  if (comm == nullptr || device_->is_lost()) return;
  try {
    cuda::DeviceGuard guard(*device_);
    const ncclResult_t result = library_->comm_abort(comm);
    if (result != ncclSuccess)
      log::warn(error_of(*library_, result, "aborting an NCCL communicator").text());
  } catch (const std::exception& error) {
    if (!device_->is_lost())
      log::error(std::string("aborting an NCCL communicator: ") + error.what());
  }
}

}  // namespace weft::transport::nccl
