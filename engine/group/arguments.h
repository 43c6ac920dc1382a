// SPDX-License-Identifier: Apache-2.0
// Checks of arguments, done before anything is sent. All throw Caller with the given value and the
// requirement. Checks that only one operation needs are in process_group.cc.
#pragma once

#include <cstdint>
#include <initializer_list>
#include <span>
#include <string>
#include <vector>

#include <weft/engine/group/core.h>

namespace weft::group {

// Checks the device that a program gives: the CPU, or one of the GPUs that this process sees.
void check_device(const c10::Device& device, int gpus);
// Says whether an operation reads or writes a tensor on this rank.
enum class Use : std::uint8_t { Reads, Writes };
// Requires a defined, dense, contiguous tensor on a device that the group carries (on CUDA: on the
// group's own device).
void check_tensor(const Core& core, const std::string& operation, const char* name,
                  const at::Tensor& tensor, Use use);
// As check_tensor for each of size() tensors, all of the dtype and device of `like`, and with
// `same_shape` of its shape.
void check_list(const Core& core, const std::string& operation, const char* name,
                const std::vector<at::Tensor>& list, const at::Tensor& like, bool same_shape,
                Use use);
void check_same_kind(const std::string& operation, const char* name, const at::Tensor& tensor,
                     const at::Tensor& like);
// Throws Unsupported, naming dtype and operator, if the backend cannot reduce such elements with
// the operator. Throws Caller unless each element lies at a multiple of its size, as arithmetic
// needs.
void check_reduction(Core& core, const std::string& operation, const at::Tensor& tensor,
                     ReduceOp op);
// The memory of one argument: of one tensor, or of one for each rank.
struct Operand {
  const char* name = "";
  std::span<const Slice> parts;
  int own = -1;  // part that may be the same memory as another operand's own part
  bool is_written = false;
};
// Refuses a call that writes memory which another of its operands uses too. This rank's own part
// may be both input and output.
void check_apart(const std::string& operation, std::initializer_list<Operand> operands);
// The alignment check of check_reduction, for further tensors of the call.
void check_aligned(const std::string& operation, const at::Tensor& tensor);

}  // namespace weft::group
