// SPDX-License-Identifier: Apache-2.0
// Plans which gradients travel together. Touches no tensors.
#pragma once

#include <cstddef>
#include <span>
#include <vector>

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>

namespace weft::parallel {

struct PlannedGradient {
  std::size_t bytes = 0;
  at::ScalarType dtype = at::kFloat;
  c10::Device device = c10::Device(c10::kCPU);
  bool sparse = false;  // travels alone
};

struct PlannedBucket {
  std::vector<std::size_t> gradients;  // indices into `gradients`, in the order of `order`
  std::size_t limit = 0;               // bytes at which it closes; 0 for a sparse gradient
};

// Walks the gradients in `order`, which names each index once. The gradients of one dtype and
// device fill one bucket at a time. A bucket closes when it has reached its limit; the next bucket
// then uses the next limit of the list, or the last one again. Buckets are sorted by the position
// of their last gradient. Throws Caller if `order` is not a permutation or a limit is 0.
std::vector<PlannedBucket> plan_buckets(std::span<const PlannedGradient> gradients,
                                        std::span<const std::size_t> order,
                                        std::span<const std::size_t> limits);

}  // namespace weft::parallel
