// The checks of arguments that are done before anything is sent. All throw Caller with what was
// given and what is needed.
#pragma once

#include <cstdint>
#include <initializer_list>
#include <span>
#include <string>
#include <vector>

#include <weft/engine/group/core.h>

namespace weft::group {

// What a program gives as its device: the CPU, or one of the GPUs that this process sees.
void check_device(const c10::Device& device, int gpus);
// Whether an operation reads or writes a tensor on this rank.
enum class Use : std::uint8_t { Reads, Writes };
// Defined, dense, contiguous, on a device that the group carries (on CUDA: the group's own device).
void check_tensor(const Core& core, const std::string& operation, const char* name,
                  const at::Tensor& tensor, Use use);
// As check_tensor, and size() of them, all of one dtype, device and shape as `like`.
void check_list(const Core& core, const std::string& operation, const char* name,
                const std::vector<at::Tensor>& list, const at::Tensor& like, bool same_shape,
                Use use);
void check_same_kind(const std::string& operation, const char* name, const at::Tensor& tensor,
                     const at::Tensor& like);
// The backend can reduce such elements with the operator: throws Unsupported, naming them, else.
// And each lies at a multiple of its size, as arithmetic wants it.
void check_reduction(Core& core, const std::string& operation, const at::Tensor& tensor,
                     ReduceOp op);
// The memory of one argument: of one tensor, or of one for each rank.
struct Operand {
  const char* name = "";
  std::span<const Slice> parts;
  int own = -1;  // that part may be the very memory of another operand's own one
  bool is_written = false;
};
// Refuses a call that writes memory which another of its operands uses too. This rank's own part
// may be both input and output.
void check_apart(const std::string& operation, std::initializer_list<Operand> operands);
// The second part of check_reduction, of further tensors of the call.
void check_aligned(const std::string& operation, const at::Tensor& tensor);

}  // namespace weft::group
