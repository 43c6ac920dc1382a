// SPDX-License-Identifier: Apache-2.0
#include <ATen/ops/view_as_real.h>

#include <weft/engine/ddp/comm_hooks.h>

namespace weft::comm_hooks {

namespace {

Future<at::Tensor> average(const ProcessGroup& given, const GradBucket& bucket) {
  at::Tensor buffer = bucket.buffer();
  const bool elsewhere =
      buffer.is_cuda() && given.device().is_cuda() && buffer.device() != given.device();
  ProcessGroup group = elsewhere && bucket.group() ? bucket.group() : given;
  buffer.div_(group.size());
  return group.all_reduce(buffer).future().then([buffer] { return buffer; });
}

CommHook compress(at::ScalarType dtype, CommHook inner) {
  return [dtype, inner = std::move(inner)](GradBucket& bucket) {
    at::Tensor full = bucket.buffer();
    // A cast to a real type would drop the imaginary parts. Sparse complex tensors cannot be viewed
    // as real ones, so they are sent uncompressed.
    if (full.is_complex() && full.layout() != at::kStrided) return inner(bucket);
    const at::Tensor whole = full;
    if (full.is_complex()) full = at::view_as_real(full).view({-1});
    bucket.set_buffer(full.to(dtype));
    return inner(bucket).then([full, whole](const at::Tensor& small) {
      // copy_() would broadcast a result of one element.
      if (!small.defined() || small.sizes() != full.sizes()) {
        throw Error(Blame::Caller, "a comm hook returned " +
                                       (small.defined() ? c10::str(small.sizes()) : "nothing") +
                                       " for a compressed bucket of " + c10::str(full.sizes()) +
                                       "; return a tensor of buffer()'s shape");
      }
      full.copy_(small);
      return whole;
    });
  };
}

}  // namespace

CommHook all_reduce(ProcessGroup group) {
  return [group](GradBucket& bucket) { return average(group, bucket); };
}

CommHook fp16_compress(ProcessGroup group) {
  return compress(at::kHalf, all_reduce(std::move(group)));
}
CommHook bf16_compress(ProcessGroup group) {
  return compress(at::kBFloat16, all_reduce(std::move(group)));
}
CommHook fp16_compress(CommHook inner) { return compress(at::kHalf, std::move(inner)); }
CommHook bf16_compress(CommHook inner) { return compress(at::kBFloat16, std::move(inner)); }

}  // namespace weft::comm_hooks
