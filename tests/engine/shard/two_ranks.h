// SPDX-License-Identifier: Apache-2.0
// The beginning that tests of a sharded model on two ranks of one process share.
#pragma once

#include <cstdint>
#include <functional>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <weft/tests/harness/ranks.h>

#include "sharded_models.h"

namespace weft::testing {

using harness::error_of;
using ::testing::HasSubstr;
namespace nn = torch::nn;

inline void on_two_ranks(const std::function<void(ProcessGroup& group)>& body) {
  harness::run_ranks(harness::As::Threads, 2, body);
}

// Blocks with the same values at every call.
inline nn::Sequential filled_blocks(int count, std::uint64_t seed = 1) {
  auto made = blocks(count);
  fill_values(*made, seed);
  return made;
}

// A batch of this rank.
inline torch::Tensor batch_of(const ProcessGroup& group, int which) {
  return numbers({4, 8}, static_cast<std::uint64_t>(100 * which + group.rank()));
}

// Copies of the parameters' gradients; zeros for those that are undefined.
inline std::vector<torch::Tensor> gradients(const nn::Module& module) {
  std::vector<torch::Tensor> all;
  for (const auto& shard : module.parameters()) {
    const auto gradient = shard.grad();
    all.push_back(gradient.defined() ? gradient.clone() : torch::zeros_like(shard));
  }
  return all;
}

}  // namespace weft::testing
