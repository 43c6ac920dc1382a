// Which gradients travel together. Pure planning: no tensors are touched.
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
  std::vector<std::size_t> gradients;  // indices into what was given, in the order of `order`
  std::size_t limit = 0;               // bytes at which it closed; 0 for a sparse one
};

// Walks the gradients in `order` (indices; all of them, once each). Each (dtype, device) fills a
// bucket of its own; a bucket closes when it has reached its limit, and the next limit of the list
// applies (the last one for good). Buckets come in the order in which their last gradient does.
// Throws Caller when `order` is not a permutation or a limit is 0.
std::vector<PlannedBucket> plan_buckets(std::span<const PlannedGradient> gradients,
                                        std::span<const std::size_t> order,
                                        std::span<const std::size_t> limits);

}  // namespace weft::parallel
