// SPDX-License-Identifier: Apache-2.0
// GPU memory that an operation of a group uses for a while.
//
// The operation pins its tensors until the host sees that it has ended. The host runs ahead of the
// GPU, so pins alone would make the memory in use depend on how far ahead it is, and would keep all
// memory of a captured step until the capture ends. A Loan gives memory back to libtorch's
// allocator as soon as the stream that it was allocated for waits for the operation, since the
// allocator gives memory out again in that stream's order.
//
// One thread at a time uses it. Nothing here blocks.
#pragma once

#include <memory>
#include <vector>

#include <ATen/core/Tensor.h>
#include <c10/core/Stream.h>

#include <weft/engine/group/work.h>

namespace weft::shard {

class Loan {
 public:
  Loan() = default;
  // Tensors that are still lent live until their operation ends.
  ~Loan() = default;
  Loan(Loan&&) noexcept = default;
  Loan& operator=(Loan&&) noexcept = default;

  // Lends memory that was allocated for the current stream of its device. Returns what the
  // operation takes in its place. Memory on the host is returned as it is: the operation pins it
  // until it has ended.
  at::Tensor lend(const at::Tensor& memory);
  // Gives the memory back behind the operation: its stream waits for that. `current_waits`: the
  // current stream has been made to wait already. Memory of an operation that has failed is left to
  // it until it has ended.
  void end_behind(Work& work, bool current_waits = false) noexcept;
  // Gives the memory back, because its stream waits for all that uses it.
  void end() noexcept;

 private:
  struct Held;
  std::vector<std::shared_ptr<Held>> held_;
  std::vector<c10::Stream> streams_;  // for which it was allocated
};

}  // namespace weft::shard
