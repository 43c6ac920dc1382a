// SPDX-License-Identifier: Apache-2.0
// Refuses collectives whose order could differ between the ranks of a group: those that a callback
// of a future issues while the program itself goes on with the same group. All ranks must issue the
// collectives of a group in one order, and nothing orders a callback's among the program's.
#pragma once

#include <atomic>
#include <cstdint>

#include <weft/python/backend/completions.h>
#include <weft/python/backend/work.h>

namespace weft::python {

class CallOrder {
 public:
  // Notes the next operation of the group, on the thread that issues it. Throws Caller if it is a
  // callback's, and the program has issued a collective since the operation that the callback
  // follows.
  void next(const CallName& name, const Cause& operation);

 private:
  std::atomic<std::uint64_t> last_of_program_{0};
};

}  // namespace weft::python
