// SPDX-License-Identifier: Apache-2.0
// The wait report that a rank of the job has logged last, so that the others stay silent. For one
// thread: the job's loop.
#pragma once

#include <cstddef>

#include <weft/base/patience.h>

namespace weft::group {

class LastReport {
 public:
  // The level (frame.h) that this rank or another has reported since then; 0 if none has.
  std::size_t level_since(Patience::Clock::time_point since) const {
    return at_ >= since ? level_ : 0;
  }
  void note(std::size_t level) {
    level_ = level;
    at_ = Patience::Clock::now();
  }

 private:
  std::size_t level_ = 0;
  Patience::Clock::time_point at_{};
};

}  // namespace weft::group
