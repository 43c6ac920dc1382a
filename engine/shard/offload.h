// SPDX-License-Identifier: Apache-2.0
// Shards in host memory of a model that computes on a GPU (FullyShardOptions::offload).
//
// Each GPU has two streams for it. One brings shards in: a gather follows the copies on that
// stream, beside the kernels of other units. The other takes averaged gradients out behind their
// reduction. The host waits for neither, except in the functions that say so: at the end of a
// backward, whose gradients the optimizer reads on the host, and at the end of a forward without
// gradients, after which the program may write to the shards.
//
// Thread-safe.
#pragma once

#include <functional>
#include <memory>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>
#include <c10/core/Event.h>
#include <c10/core/Stream.h>

#include <weft/base/mutex.h>
#include <weft/engine/group/work.h>

namespace weft::shard {

// A copy to pinned host memory that is under way.
class HostCopy {
 public:
  // Enqueues the copy of `from`, in that dtype, on `stream`, behind the operation that writes it.
  HostCopy(const at::Tensor& from, at::ScalarType dtype, Work operation, const c10::Stream& stream);
  // The part of the copy that lies there as `part` lies in `from`. Readable after wait().
  at::Tensor part(const at::Tensor& part) const;
  const at::Tensor& values() const { return values_; }
  // Makes the current stream wait for it. Then `from` may be freed.
  void order() const;
  // Blocks until it is complete. Throws the operation's error.
  void wait();

 private:
  Work operation_;
  at::Tensor values_;
  c10::Event end_;
};

class Offload {
 public:
  // A tensor in pinned host memory, not cleared.
  static at::Tensor pinned(at::IntArrayRef sizes, at::IntArrayRef strides, at::ScalarType dtype);

  // Calls `read`, which copies shards to the GPU, with a stream current that follows the current
  // one.
  void bring_in(c10::Device gpu, const std::function<void()>& read);
  // Blocks until the shards have been read that bring_in() has begun to read.
  void wait_until_read();

  // Begins to copy what the operation gives. wait() waits for it. Makes the current stream wait for
  // the copy before, and frees the source of that.
  std::shared_ptr<HostCopy> take_out(at::Tensor from, at::ScalarType dtype, const Work& operation);
  // Blocks until shards have been read and gradients are in host memory. Throws an operation's
  // error.
  void wait();
  // Drops what a failed backward has begun.
  void forget();

 private:
  struct Streams {
    c10::Stream in, out;
    std::shared_ptr<c10::Event> read;  // on `in`
  };
  Streams& streams_of(c10::Device gpu) WEFT_REQUIRES(mutex_);
  std::pair<c10::Stream, c10::Stream> streams_for(c10::Device gpu);  // in, out

  Mutex mutex_;
  std::vector<Streams> streams_ WEFT_GUARDED_BY(mutex_);  // by GPU
  std::vector<std::shared_ptr<HostCopy>> copies_ WEFT_GUARDED_BY(mutex_);
  at::Tensor leaving_ WEFT_GUARDED_BY(mutex_);  // the source of the last copy
};

}  // namespace weft::shard
