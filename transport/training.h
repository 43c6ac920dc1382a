// SPDX-License-Identifier: Apache-2.0
// The training step to which an operation belongs. Ranks compare it with the rest of a call if
// their communicator compares_calls().
#pragma once

#include <cstdint>
#include <string>

namespace weft::transport {

struct Training {
  // Which DistributedDataParallel of the group, counted from 1 in the order of their construction;
  // 0: none.
  std::uint32_t model = 0;
  // The step whose gradients the operation sums, counted from 1; 0: it carries buffers.
  std::uint32_t step = 0;
  friend bool operator==(const Training&, const Training&) = default;
};

// Returns ", of the gradients of step 4 of DistributedDataParallel 1", which follows the text of an
// operation; "" for no model.
inline std::string training_text(const Training& training) {
  if (training.model == 0) return {};
  const std::string what = training.step == 0
                               ? "of the buffers"
                               : "of the gradients of step " + std::to_string(training.step);
  return ", " + what + " of DistributedDataParallel " + std::to_string(training.model);
}

}  // namespace weft::transport
