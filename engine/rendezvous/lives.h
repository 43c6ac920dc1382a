// SPDX-License-Identifier: Apache-2.0
// A life is one use of the store by a rank and name. A store outlives groups: the second group of a
// rank at one address must not find the keys of the first. Each rank counts its own lives in the
// store, so all ranks count alike. The first has no prefix, as in Python's torch.distributed.
#pragma once

#include <cstdint>
#include <string>

#include <torch/csrc/distributed/c10d/Store.hpp>

namespace weft::group {

// Keys in a store that a Weft rank 0 hosts. kHosted: this rank 0 announces, by begun(), which lives
// (see next_life()) at this address it has begun.
inline constexpr const char* kHosted = "weft/hosted";
inline std::string begun(std::int64_t life) { return "weft/begun/" + std::to_string(life); }
// Counts how often `who` has joined at the store.
inline std::string lives(const std::string& who) { return "weft/lives/" + who; }

struct NextLife {
  c10::intrusive_ptr<c10d::Store> store;
  c10::intrusive_ptr<c10d::Store> before;  // of the previous life; null in the first
};

// Counts the next life of `who` ("0" for rank 0) and returns the parts of the store for it and for
// the one before.
NextLife next_life(const c10::intrusive_ptr<c10d::Store>& store, const std::string& who);

}  // namespace weft::group
