// The data path's arithmetic on the CPU: gathering gradients into a bucket and back, reducing,
// casting. CudaKernels (cuda_kernels.h) has the same operations for a stream; both run the element
// functions of elements.h and give the same bits.
//
// Every function takes host memory, runs on the calling thread, allocates nothing and keeps
// nothing. Slices hold whole elements at addresses aligned to an element; 16-byte alignment is what
// runs fastest, above all on a GPU. An output may be an input; any other overlap is undefined.
// Wrong arguments throw Caller errors before the first byte is written.
#pragma once

#include <span>

#include <weft/base/dtype.h>
#include <weft/base/slice.h>
#include <weft/kernels/optimizer.h>
#include <weft/kernels/reduce_op.h>

namespace weft::kernels {

// to[i] = cast(from[i] * scale), slice by slice. Any of fp16, bf16, fp32 and fp64 to any; complex
// to complex; every type to itself with scale 1, as bytes. The product is taken in fp32, in fp64 if
// either side is; 16-bit results are rounded once, from fp32.
void cast(std::span<const Slice> from, Dtype from_dtype, std::span<const Slice> to, Dtype to_dtype,
          double scale = 1);

// The same from scattered slices to one flat buffer, back to back in their order. The buffer may be
// larger; the rest of it stays as it is. For slots with gaps between them (aligned ones), call cast
// with the slots.
void pack(std::span<const Slice> from, Dtype from_dtype, Slice to, Dtype to_dtype,
          double scale = 1);

// The reverse: from one flat buffer to scattered slices.
void unpack(Slice from, Dtype from_dtype, std::span<const Slice> to, Dtype to_dtype,
            double scale = 1);

// Multiplies floating-point or complex elements in place.
void scale(Slice slice, Dtype dtype, double factor);

// out = a op b, for what supports() says. fp16 and bf16 are computed in fp32. Avg adds, as Sum
// does: whoever knows the number of ranks scales by 1 / ranks, fp16 before the sum (it overflows at
// 65504), other types before or after.
void reduce(Slice out, Slice a, Slice b, Dtype dtype, ReduceOp op);

// into = into op with.
void reduce(Slice into, Slice with, Dtype dtype, ReduceOp op);

// One optimizer step over any number of tensors; see optimizer.h.
void sgd_step(std::span<const SgdTensor> tensors, Dtype dtype, Dtype gradient_dtype,
              const SgdOptions& options);
void adamw_step(std::span<const AdamWTensor> tensors, Dtype dtype, Dtype gradient_dtype,
                const AdamWOptions& options);

}  // namespace weft::kernels
