// SPDX-License-Identifier: Apache-2.0
// Communication hooks: functions that reduce a bucket of gradients in place of the built-in
// all-reduce. A hook gets the bucket's local, undivided sum and returns a future of the average; it
// divides by the number of ranks itself.
#pragma once

#include <functional>
#include <vector>

#include <ATen/core/Tensor.h>

#include <weft/base/export.h>
#include <weft/engine/future/future.h>
#include <weft/engine/group/process_group.h>

namespace weft {

// One bucket, as a hook sees it. Valid only during the call of the hook; its tensors may be kept.
class GradBucket {
 public:
  // Makes the bucket `index` of `count` buckets. DistributedDataParallel does so; programs do it to
  // test a hook.
  GradBucket(std::size_t index, std::size_t count, at::Tensor buffer,
             std::vector<at::Tensor> gradients, std::vector<at::Tensor> parameters,
             ProcessGroup group = {})
      : index_(index),
        count_(count),
        buffer_(std::move(buffer)),
        gradients_(std::move(gradients)),
        parameters_(std::move(parameters)),
        group_(std::move(group)) {}

  // Buckets are launched in this order, from 0; the index is the same on all ranks.
  std::size_t index() const { return index_; }
  // Flat, of one dtype; for a sparse gradient the sparse tensor itself.
  const at::Tensor& buffer() const { return buffer_; }
  // Replaces the flat tensor, for a hook that calls another one with a smaller buffer.
  void set_buffer(at::Tensor buffer) { buffer_ = std::move(buffer); }
  // Views of the bucket, shaped as the parameters.
  const std::vector<at::Tensor>& gradients() const { return gradients_; }
  // The parameters of the bucket, in the order of gradients().
  const std::vector<at::Tensor>& parameters() const { return parameters_; }
  // True for the last bucket of the pass.
  bool is_last() const { return index_ + 1 == count_; }
  // A group of the model's ranks that can carry the buffer's device: the model's own group, or, for
  // a model on several GPUs, the group of the bucket's GPU.
  const ProcessGroup& group() const { return group_; }

 private:
  std::size_t index_;
  std::size_t count_;
  at::Tensor buffer_;
  std::vector<at::Tensor> gradients_;
  std::vector<at::Tensor> parameters_;
  ProcessGroup group_;
};

// A function that reduces a bucket and returns a future of the averages.
using CommHook = std::function<Future<at::Tensor>(GradBucket&)>;

namespace comm_hooks {

// Averages as DDP does without a hook. `group` carries the buckets. If the model lies on several
// GPUs, the buckets of the other GPUs use their own group (GradBucket::group()).
WEFT_API CommHook all_reduce(ProcessGroup group);
// Sends the gradients as float16, which halves the bytes of float32. Divides before the sum, so
// that float16 does not overflow. Complex gradients are sent as their real and imaginary parts,
// twice as many elements; sparse complex ones are sent uncompressed.
WEFT_API CommHook fp16_compress(ProcessGroup group);
// Sends the gradients as bfloat16; otherwise like fp16_compress().
WEFT_API CommHook bf16_compress(ProcessGroup group);
// Compresses for another hook, which then sees the smaller buffer.
WEFT_API CommHook fp16_compress(CommHook inner);
// Compresses to bfloat16 for another hook, which then sees the smaller buffer.
WEFT_API CommHook bf16_compress(CommHook inner);

}  // namespace comm_hooks
}  // namespace weft
