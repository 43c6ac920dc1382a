// SPDX-License-Identifier: Apache-2.0
// Collects the operations that a program issues between start and end of c10d's coalescing, which
// then gets one Work for all of them. Thread-safe.
#pragma once

#include <mutex>
#include <optional>
#include <vector>

#include <ATen/core/Tensor.h>

#include <weft/group.h>
#include <weft/python/backend/work.h>

namespace weft::python {

class Coalescing {
 public:
  struct Coalesced {
    std::vector<weft::Work> operations;
    Copies copies;
    std::vector<at::Tensor> outputs;
  };

  void begin();
  // Does nothing outside of coalescing.
  void add(const IssuedWork& work, const std::vector<at::Tensor>& outputs);
  // Returns what was collected, or nullopt if coalescing has not begun.
  std::optional<Coalesced> end();

 private:
  std::mutex mutex_;
  std::optional<Coalesced> collected_;  // from begin() to end(); guarded by mutex_
};

}  // namespace weft::python
