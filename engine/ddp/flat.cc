// SPDX-License-Identifier: Apache-2.0
#include <ATen/MemoryOverlap.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <c10/core/GradMode.h>

#include <weft/base/error.h>
#include <weft/engine/ddp/bucket_plan.h>
#include <weft/engine/ddp/flat.h>

namespace weft::parallel {

std::vector<std::vector<at::Tensor>> pieces_of(const std::vector<at::Tensor>& tensors,
                                               std::size_t bytes) {
  std::vector<PlannedGradient> planned;
  std::vector<std::size_t> order;
  for (const at::Tensor& tensor : tensors) {
    order.push_back(order.size());
    planned.push_back({tensor.nbytes(), tensor.scalar_type(), tensor.device(), false});
  }
  const std::size_t limits[] = {bytes};
  std::vector<std::vector<at::Tensor>> pieces;
  for (const PlannedBucket& bucket : plan_buckets(planned, order, limits)) {
    pieces.emplace_back();
    for (const std::size_t index : bucket.gradients) pieces.back().push_back(tensors[index]);
  }
  return pieces;
}

void require_flat(const at::Tensor& tensor, const std::string& what) {
  if (!tensor.defined()) throw Error(Blame::Caller, what + " is an undefined tensor");
  if (tensor.layout() != at::kStrided) {
    throw Error(Blame::Caller, what + " has the layout " + c10::str(tensor.layout()) +
                                   ", but only dense tensors can be sent together; make it dense "
                                   "(to_dense()), or leave it out");
  }
  if (at::has_internal_overlap(tensor) == at::MemOverlap::Yes) {
    throw Error(Blame::Caller,
                what + ", " + c10::str(tensor.sizes()) + " with strides " +
                    c10::str(tensor.strides()) +
                    ", is an expanded tensor: its elements share memory and cannot be written "
                    "separately; give it memory of its own (contiguous())");
  }
}

at::Tensor flatten(const std::vector<at::Tensor>& tensors) {
  at::Tensor flat = empty_flat(tensors);
  flatten_into(flat, tensors);
  return flat;
}

void flatten_into(at::Tensor flat, const std::vector<at::Tensor>& tensors) {
  const c10::AutoGradMode no_grad(false);
  std::vector<at::Tensor> parts;
  for (const at::Tensor& tensor : tensors) parts.push_back(tensor.detach().reshape({-1}));
  at::cat_out(flat, parts);
}

at::Tensor empty_flat(const std::vector<at::Tensor>& tensors) {
  std::int64_t elements = 0;
  for (const at::Tensor& tensor : tensors) elements += tensor.numel();
  return at::empty({elements}, tensors.front().options().requires_grad(false));
}

void unflatten(const at::Tensor& flat, const std::vector<at::Tensor>& tensors) {
  const c10::AutoGradMode no_grad(false);
  std::int64_t offset = 0;
  for (const at::Tensor& tensor : tensors) {
    tensor.detach().copy_(flat.narrow(0, offset, tensor.numel()).view(tensor.sizes()));
    offset += tensor.numel();
  }
}

at::Tensor view_like(const at::Tensor& flat, std::int64_t offset, const at::Tensor& tensor) {
  const at::AutoDispatchBelowADInplaceOrView untracked;
  if (tensor.is_non_overlapping_and_dense())
    return flat.as_strided(tensor.sizes(), tensor.strides(), offset);
  return flat.narrow(0, offset, tensor.numel()).view(tensor.sizes());
}

}  // namespace weft::parallel
