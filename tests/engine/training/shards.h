// SPDX-License-Identifier: Apache-2.0
// Makes every parameter of this thread's rank a shard of one group, while it lives.
#pragma once

#include <weft/engine/group/shard_groups.h>

namespace weft::testing {

class AllAreShards {
 public:
  explicit AllAreShards(const ProcessGroup& group) {
    of_this_thread() = group;
    group::set_shard_groups([](const at::Tensor&) { return of_this_thread(); });
  }
  ~AllAreShards() { of_this_thread() = ProcessGroup(); }
  AllAreShards(const AllAreShards&) = delete;
  AllAreShards& operator=(const AllAreShards&) = delete;

 private:
  static ProcessGroup& of_this_thread() {
    static thread_local ProcessGroup group;
    return group;
  }
};

}  // namespace weft::testing
