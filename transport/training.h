// The part of a training that an operation belongs to: ranks compare it with the rest of a call,
// where their communicator compares_calls().
#pragma once

#include <cstdint>
#include <string>

namespace weft::transport {

struct Training {
  std::uint32_t model =
      0;  // which DistributedDataParallel of the group, counted from 1 as they are made; 0: of none
  std::uint32_t step =
      0;  // of which the operation adds up the gradients, counted from 1; 0: it carries buffers
  friend bool operator==(const Training&, const Training&) = default;
};

// ", of the gradients of step 4 of DistributedDataParallel 1", behind the text of an operation; ""
// for no model.
inline std::string training_text(const Training& training) {
  if (training.model == 0) return {};
  const std::string what = training.step == 0
                               ? "of the buffers"
                               : "of the gradients of step " + std::to_string(training.step);
  return ", " + what + " of DistributedDataParallel " + std::to_string(training.model);
}

}  // namespace weft::transport
