// SPDX-License-Identifier: Apache-2.0
// The last collectives of this rank, in the terms in which other ranks compare theirs of the same
// number. Operations owns it. Thread-safe; nothing blocks.
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <string>

#include <c10/core/DeviceType.h>
#include <c10/core/ScalarType.h>

#include <weft/base/mutex.h>
#include <weft/engine/group/operation.h>

namespace weft::group {

class RecentCalls {
 public:
  void remember(const Operation& operation, std::uint64_t number);
  // This rank's call as the collective of that number; nullopt if it has not made it yet, or has
  // forgotten it.
  std::optional<std::string> text(std::uint64_t number) const;

 private:
  struct Called {
    std::uint64_t number = 0;
    const char* name = "";
    std::optional<c10::ScalarType> dtype;  // of its first tensor
    c10::DeviceType device = c10::kCPU;
    std::optional<std::uint64_t> bytes;  // of its first tensor, if that has one size on all ranks
    std::optional<ReduceOp> reduction;
    int root = -1;
    transport::Training training = {};
    std::string text() const;
  };
  mutable Mutex mutex_;  // held for moments only
  // The call of a number is at number % size.
  std::array<Called, 128> called_ WEFT_GUARDED_BY(mutex_) = {};
};

}  // namespace weft::group
