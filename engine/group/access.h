// SPDX-License-Identifier: Apache-2.0
// Functions by which the folders above group/ use a group beyond its public handle. They reach
// nothing else of its core. Internal.
//
// Every function may be called on any thread, and throws like the handle's own functions if the
// group is empty or was made before a fork. Functions that block say so.
#pragma once

#include <chrono>
#include <memory>
#include <string>

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>

#include <weft/base/error.h>
#include <weft/base/fence.h>
#include <weft/engine/group/continuations.h>
#include <weft/engine/group/meeting.h>
#include <weft/engine/group/process_group.h>
#include <weft/engine/store/store.h>
#include <weft/kernels/reduce_op.h>
#include <weft/transport/transport.h>

namespace weft::group {

// --- Properties of the group ---

bool are_same(const ProcessGroup& one, const ProcessGroup& other);
std::string place_of(const ProcessGroup& group);  // "on group 'x' (rank 0 of 2)"
std::chrono::milliseconds timeout_of(const ProcessGroup& group);
// Throws Caller, naming `what`, unless the group has such a rank.
void check_rank(const ProcessGroup& group, int rank, const char* what);
// The device on which host values travel: see Carriers.
c10::Device host_values_device(const ProcessGroup& group);
// The device of barriers: see Carriers.
c10::Device barrier_device(const ProcessGroup& group);

// --- Whether it works ---

// True if that rank of the group has left it, and said so.
bool has_left(const ProcessGroup& group, int rank);
// Throws if an operation would be refused: see Operations. May block like Failure::explain().
void throw_if_refused(const ProcessGroup& group);
// Throws Caller if the device's current stream is being captured into a CUDA graph: see
// CudaDevices.
void refuse_capture(const ProcessGroup& group, const c10::Device& device, const char* what,
                    const char* why);
// Fails all pending and later operations of this rank.
void fail(const ProcessGroup& group, const Error& why);

// A group that must not be kept from leaving. Its functions do nothing if the group has left, or
// has no other rank.
class WeakGroup {
 public:
  explicit WeakGroup(const ProcessGroup& group);
  void fail(const Error& why) const;            // as above
  void abort(const std::string& reason) const;  // as ProcessGroup::abort()

 private:
  std::shared_ptr<Core> in_company() const;
  const std::weak_ptr<Core> core_;
};

// --- Operations ---

// As the handle's functions, without its limit (ProcessGroup::with_timeout). The ranks compare
// `training`.
Work all_reduce(const ProcessGroup& group, const at::Tensor& tensor, ReduceOp op,
                transport::Training training = {});
// `begins_after`: see Operation. It may depend on earlier operations, never on later ones.
Work broadcast(const ProcessGroup& group, const at::Tensor& tensor, int root,
               Fence begins_after = {}, transport::Training training = {});
// Counts the calls of one kind that all ranks make in the same order: 1, 2, …
int next_number(const ProcessGroup& group, const std::string& kind);

// --- Meeting and waiting ---

// The group's store, over a connection on which no user blocks. Waits on it end when the group
// breaks.
StoreBootstrap& store_of(const ProcessGroup& group);
// The same for a group that is broken: its waits end at their deadlines only.
StoreBootstrap uninterrupted_store_of(const ProcessGroup& group);
// Runs continuations on threads that belong to no backend.
const std::shared_ptr<Continuations>& continuations_of(const ProcessGroup& group);
// See LocalWait.
LocalWait local_wait(const ProcessGroup& group, std::string what, std::string hint);

}  // namespace weft::group
