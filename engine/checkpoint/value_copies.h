// SPDX-License-Identifier: Apache-2.0
// The copies of a share's values in host memory, which GPUs make while the host goes on.
//
// By default they are enqueued on the current streams, so that no later kernel of these streams can
// write a value before it is copied, whichever program, optimizer or library enqueues it: libtorch
// has no hook before a write. The next kernels wait for them as long as the bytes take to the host.
// `stages`: the current streams copy the values within the GPU only, and side streams copy these
// copies to the host beside the next kernels. That takes as much memory of the GPU as the values,
// which the next step may need, so the program chooses it.
//
// One thread at a time. Internal.
#pragma once

#include <vector>

#include <ATen/core/Tensor.h>
#include <c10/core/Event.h>

#include <weft/engine/checkpoint/shares.h>

namespace weft::checkpoint {

class ValueCopies {
 public:
  // Copies values on the host, and enqueues the copies of the others. Without room for staging
  // these go by the current streams.
  void start(const Share& share, const at::Tensor& memory, bool stages);
  // Blocks until all copies have been made.
  void wait();

 private:
  std::vector<at::Tensor> staged(const std::vector<at::Tensor>& tensors) const;
  void copy_beside(const std::vector<at::Tensor>& from, const std::vector<at::Tensor>& to);

  std::vector<at::Tensor> read_;  // until the copies have been made
  std::vector<c10::Event> made_;
};

// Blocks until the GPUs that have these tensors have run what is enqueued on any of their streams.
// Throws what libtorch throws while one of the streams is being captured.
void wait_for_gpus(const std::vector<at::Tensor>& tensors);
// The same for all GPUs that this process uses.
void wait_for_all_gpus();

}  // namespace weft::checkpoint
