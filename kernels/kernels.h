// SPDX-License-Identifier: Apache-2.0
// The data path's arithmetic on the CPU: packing gradients into a bucket and unpacking them,
// reducing, casting. CudaKernels (cuda_kernels.h) has the same operations for a stream; both run
// the element functions of elements.h and give the same bits.
//
// Every function takes host memory, runs on the calling thread, allocates nothing and keeps
// nothing. Slices hold whole elements at addresses aligned to an element; 16-byte alignment is
// fastest, above all on a GPU. An output may be an input; any other overlap is undefined. Wrong
// arguments throw Caller errors before the first byte is written.
#pragma once

#include <span>

#include <weft/base/dtype.h>
#include <weft/base/slice.h>
#include <weft/kernels/optimizer.h>
#include <weft/kernels/reduce_op.h>

namespace weft::kernels {

// Sets to[i] = cast(from[i] * scale), slice by slice. Converts between any of fp16, bf16, fp32 and
// fp64; complex to complex; and, with scale 1, copies any type to itself. The product is computed
// in fp32, or in fp64 if either side is fp64; 16-bit results are rounded once, from fp32.
void cast(std::span<const Slice> from, Dtype from_dtype, std::span<const Slice> to, Dtype to_dtype,
          double scale = 1);

// Casts scattered slices into one flat buffer, back to back in their order. If the buffer is
// larger, its rest is unchanged. For slots with gaps between them (aligned slots), call cast with
// the slots.
void pack(std::span<const Slice> from, Dtype from_dtype, Slice to, Dtype to_dtype,
          double scale = 1);

// The reverse: casts one flat buffer into scattered slices.
void unpack(Slice from, Dtype from_dtype, std::span<const Slice> to, Dtype to_dtype,
            double scale = 1);

// Multiplies floating-point or complex elements in place.
void scale(Slice slice, Dtype dtype, double factor);

// Sets out = a op b, for the combinations that supports() allows. fp16 and bf16 are computed in
// fp32. Avg adds, as Sum does; the caller, which knows the number of ranks, scales by 1 / ranks:
// fp16 before the sum (which overflows at 65504), other types before or after it.
void reduce(Slice out, Slice a, Slice b, Dtype dtype, ReduceOp op);

// Sets into = into op with.
void reduce(Slice into, Slice with, Dtype dtype, ReduceOp op);

// Runs one optimizer step over any number of tensors; see optimizer.h.
void sgd_step(std::span<const SgdTensor> tensors, Dtype dtype, Dtype gradient_dtype,
              const SgdOptions& options);
void adamw_step(std::span<const AdamWTensor> tensors, Dtype dtype, Dtype gradient_dtype,
                const AdamWOptions& options);

}  // namespace weft::kernels
