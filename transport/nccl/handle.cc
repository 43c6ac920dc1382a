#include <utility>

#include <weft/base/log.h>
#include <weft/cuda/poll.h>
#include <weft/cuda/retire.h>
#include <weft/transport/nccl/handle.h>

namespace weft::transport::nccl {

namespace {

// How long the others may take to close their ends before this rank breaks its own off.
constexpr auto kClosing = std::chrono::seconds(10);

// Waits while the communicator is busy. `result` is what the last call returned, and afterwards how it ended.
template <class Stop>
void wait_while_busy(const Library& library, ncclComm_t comm, ncclResult_t& result, Deadline deadline, const Stop& stop) {
  if (result != ncclInProgress) return;
  const auto ended = [&] {
    const ncclResult_t asked = library.comm_get_async_error(comm, &result);
    if (asked != ncclSuccess) result = asked;
    return result != ncclInProgress || stop();
  };
  cuda::poll_until(ended, deadline);
}

// The orderly end: waits for what is under way, then frees.
void close(const Library& library, cuda::Device& device, ncclComm_t comm) {
  if (device.is_lost()) return;  // nothing of it can be freed
  cuda::DeviceGuard guard(device);
  ncclResult_t result = library.comm_finalize(comm);
  wait_while_busy(library, comm, result, Deadline::in(kClosing), [] { return false; });
  const bool orderly = result == ncclSuccess;
  if (!orderly) log::warn(error_of(library, result, "closing an NCCL communicator, which is aborted instead").text());
  result = orderly ? library.comm_destroy(comm) : library.comm_abort(comm);
  if (result != ncclSuccess) log::warn(error_of(library, result, "freeing an NCCL communicator").text());
}

}  // namespace

Handle::Handle(std::shared_ptr<const Library> library, std::shared_ptr<cuda::Device> device, const ncclUniqueId& id, int rank,
               int size, Deadline deadline)
    : library_(std::move(library)), device_(std::move(device)), stream_(*device_, cuda::Priority::High) {
  cuda::DeviceGuard guard(*device_);
  ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
  config.blocking = 0;
  const ncclResult_t started = library_->comm_init_rank_config(&comm_, size, id, rank, &config);
  try {
    settle(started, "ncclCommInitRankConfig", deadline);
  } catch (...) {
    abort();
    throw;
  }
}

Handle::~Handle() {
  if (comm_ == nullptr) return;
  // The retirement belongs to the device, so the device is there when the task runs.
  device_->retirement().retire(Fence(), [library = library_, &device = *device_, comm = comm_] {
    close(*library, device, comm);
  });
}

void Handle::settle(ncclResult_t result, std::string_view what, Deadline deadline) {
  wait_while_busy(*library_, comm_, result, deadline, [this] { return cancelled_.load(); });
  if (result == ncclSuccess) return;
  if (result != ncclInProgress) throw error_of(*library_, result, what);
  if (cancelled_) throw Error(Blame::Cancelled, std::string(what) + " was withdrawn");
  throw Error(Blame::Timeout, std::string(what) + " was still waiting for other ranks");
}

void Handle::enqueue(const Call& call, Deadline deadline) {
  std::lock_guard lock(mutex_);
  if (cancelled_ || comm_ == nullptr) throw Error(Blame::Cancelled, "the NCCL communicator was aborted");
  cuda::DeviceGuard guard(*device_);
  settle(call(*library_, comm_, stream_.native()), "NCCL", deadline);
}

std::optional<Error> Handle::async_error() noexcept {
  std::unique_lock lock(mutex_, std::try_to_lock);
  if (!lock || comm_ == nullptr) return std::nullopt;
  ncclResult_t result = ncclSuccess;
  const ncclResult_t asked = library_->comm_get_async_error(comm_, &result);
  if (asked != ncclSuccess) result = asked;
  if (result == ncclSuccess || result == ncclInProgress) return std::nullopt;
  return error_of(*library_, result, "NCCL");
}

void Handle::abort() noexcept {
  cancelled_ = true;
  std::lock_guard lock(mutex_);
  if (comm_ == nullptr) return;
  try {
    cuda::DeviceGuard guard(*device_);
    const ncclResult_t result = library_->comm_abort(std::exchange(comm_, nullptr));
    if (result != ncclSuccess) log::warn(error_of(*library_, result, "aborting an NCCL communicator").text());
  } catch (const std::exception& error) {
    if (!device_->is_lost()) log::error(std::string("aborting an NCCL communicator: ") + error.what());
  }
}

}  // namespace weft::transport::nccl
