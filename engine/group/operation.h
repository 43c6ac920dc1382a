// SPDX-License-Identifier: Apache-2.0
// The description of a collective that a rank wants to issue. Internal.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>

#include <weft/base/fence.h>
#include <weft/kernels/reduce_op.h>
#include <weft/transport/transport.h>

namespace weft::group {

struct Operation {
  const char* name = "";  // "all_reduce"
  // Describes the arguments that must agree between ranks. Called only with WEFT_DEBUG=detail.
  std::function<std::string()> fingerprint;
  c10::Device device;
  // Pinned until the operation has passed. The first has one shape on all ranks, except in
  // all_to_all.
  std::vector<at::Tensor> tensors;
  // The tensors that change on this rank, as the user gave them. Read by issue() only.
  std::span<const at::Tensor> writes;
  std::optional<ReduceOp> reduction;
  int root = -1;
  transport::Training training = {};
  // Numbers of elements by rank, if the parts differ: a rank must take as many elements as the
  // other sends. Called only with WEFT_DEBUG=detail.
  struct Parts {
    std::vector<std::int64_t> sends, takes;
  };
  std::function<Parts()> parts;
  // Called when all checks have passed. Enqueues on the current stream, after which the operation
  // starts.
  std::function<void()> prepare;
  bool host_waits = false;  // Work::wait() blocks the host, on any device
  bool on_all = false;      // adds a barrier on every other communicator that exists
  // If all tensors are empty here, they are empty on all ranks, so backends that do not compare
  // calls send nothing.
  bool may_skip = true;
  // Host memory only: the operation begins when this fence has passed. Later operations queue
  // behind it.
  Fence begins_after;
};

}  // namespace weft::group
