// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cstdint>
#include <sstream>

#include <c10/util/SmallVector.h>

#include <weft/engine/group/arguments.h>
#include <weft/engine/tensor/tensor.h>

namespace weft::group {

namespace {

[[noreturn]] void refuse(const std::string& operation, const std::string& why) {
  throw Error(Blame::Caller, operation + ": " + why);
}

std::string shape(const at::Tensor& tensor) {
  std::ostringstream text;
  text << tensor.sizes();
  return text.str();
}

// The advice for a tensor that must be replaced by the result of `call` (".contiguous()"). If the
// operation writes the tensor, the program must keep that result itself: written into a temporary,
// the data would be lost.
std::string remedy(const std::string& what, const std::string& call, Use use) {
  if (use == Use::Reads) return "pass " + call;
  return what + " before (t = t" + call + ") and read the result there";
}

}  // namespace

void check_device(const c10::Device& device, int gpus) {
  if (device.is_cpu()) return;
  const std::string what = "ProcessGroupOptions::device is " + device.str();
  if (!device.is_cuda())
    throw Error(Blame::Caller, what + "; a rank's device is a CPU or a CUDA device");
  if (gpus == 0)
    throw Error(Blame::Caller,
                what + ", but this process sees no GPU; leave it out, or give at::kCPU");
  if (device.index() < gpus) return;  // also without an index: the rank chooses its own GPU
  throw Error(
      Blame::Caller,
      what + ", but this process sees GPUs 0 to " + std::to_string(gpus - 1) +
          " only; if CUDA_VISIBLE_DEVICES shows one GPU to each rank, it is cuda:0 on all ranks");
}

void check_tensor(const Core& core, const std::string& operation, const char* name,
                  const at::Tensor& tensor, Use use) {
  if (!tensor.defined()) refuse(operation, std::string(name) + " is an undefined tensor");
  if (tensor.layout() != at::kStrided) {
    refuse(operation, std::string(name) +
                          " is sparse; only dense tensors are carried (all_reduce adds up sparse "
                          "COO ones); send its indices and values");
  }
  if (!tensor.is_contiguous()) {
    refuse(operation, std::string(name) + " (" + tensor::describe(tensor) +
                          ") is not contiguous; " +
                          remedy("make it contiguous", ".contiguous()", use));
  }
  if (tensor.is_conj() || tensor.is_neg()) {
    refuse(operation, std::string(name) +
                          " is a view that has not been conjugated or negated yet; " +
                          remedy("resolve it", ".resolve_conj().resolve_neg()", use));
  }
  if (tensor.numel() > 0 && tensor.is_cpu() && tensor.storage().data() == nullptr) {
    refuse(operation, std::string(name) + " (" + tensor::describe(tensor) + ") has no memory; " +
                          remedy("give it some", ".clone()", use));
  }
  static_cast<void>(tensor::dtype_of(tensor.scalar_type()));
  static_cast<void>(core.carriers.of(tensor.device()));
  if (tensor.is_cuda() && core.options.device.is_cuda() && tensor.device() != core.options.device) {
    refuse(operation, std::string(name) + " is on " + tensor.device().str() +
                          ", but this rank's device is " + core.options.device.str());
  }
}

void check_same_kind(const std::string& operation, const char* name, const at::Tensor& tensor,
                     const at::Tensor& like) {
  if (tensor.scalar_type() != like.scalar_type() || tensor.device() != like.device()) {
    refuse(operation, std::string(name) + " is " + tensor::describe(tensor) +
                          ", but the other is " + tensor::describe(like) +
                          "; dtype and device must agree");
  }
}

void check_list(const Core& core, const std::string& operation, const char* name,
                const std::vector<at::Tensor>& list, const at::Tensor& like, bool same_shape,
                Use use) {
  if (static_cast<int>(list.size()) != core.options.size) {
    refuse(operation, std::string(name) + " holds " + std::to_string(list.size()) +
                          (list.size() == 1 ? " tensor" : " tensors") +
                          "; it takes one for each of the " + std::to_string(core.options.size) +
                          " ranks");
  }
  for (std::size_t i = 0; i < list.size(); ++i) {
    const std::string item = std::string(name) + "[" + std::to_string(i) + "]";
    check_tensor(core, operation, item.c_str(), list[i], use);
    check_same_kind(operation, item.c_str(), list[i], like);
    const bool own = static_cast<int>(i) == core.options.rank;
    if ((same_shape || own) && list[i].sizes() != like.sizes()) {
      refuse(operation, item + " has shape " + shape(list[i]) + "; it must have " + shape(like));
    }
  }
}

void check_reduction(Core& core, const std::string& operation, const at::Tensor& tensor,
                     ReduceOp op) {
  if (op > ReduceOp::BitXor)
    refuse(operation, "there is no ReduceOp " + std::to_string(static_cast<int>(op)));
  const Dtype dtype = tensor::dtype_of(tensor.scalar_type());
  transport::Communicator& carrier = core.joining.communicator(tensor.device());
  if (!carrier.can_reduce(dtype, op)) {
    throw Error(Blame::Unsupported,
                operation + ": backend '" + std::string(carrier.backend()) + "' cannot reduce " +
                    std::string(name(dtype)) + " with " + std::string(name(op)) +
                    "; convert the tensor or choose another operator or backend");
  }
  check_aligned(operation, tensor);
}

void check_apart(const std::string& operation, std::initializer_list<Operand> operands) {
  struct Range {
    std::uintptr_t begin = 0;
    std::uintptr_t end = 0;
    const Operand* of = nullptr;
    int part = 0;
    bool is_same_as(const Range& other) const { return begin == other.begin && end == other.end; }
    bool is_own() const { return part == of->own; }
    std::string text() const {
      return of->parts.size() == 1 || of->own < 0
                 ? of->name
                 : std::string(of->name) + "[" + std::to_string(part) + "]";
    }
  };
  c10::SmallVector<Range, 4> ranges;  // room for operands that are one tensor each
  for (const Operand& operand : operands) {
    int part = 0;
    for (const Slice& slice : operand.parts) {
      const auto begin = reinterpret_cast<std::uintptr_t>(slice.data);
      if (slice.bytes > 0) ranges.push_back({begin, begin + slice.bytes, &operand, part});
      ++part;
    }
  }
  std::sort(ranges.begin(), ranges.end(),
            [](const Range& a, const Range& b) { return a.begin < b.begin; });
  const Range* last = nullptr;          // of the earlier ranges, the one with the greatest end
  const Range* last_written = nullptr;  // the same among those that are written
  const auto compare = [&](const Range* before, const Range& range) {
    if (before == nullptr || before->end <= range.begin) return;
    if (before->of != range.of && before->is_own() && range.is_own() && before->is_same_as(range))
      return;
    refuse(operation, before->text() + " and " + range.text() +
                          " share memory, which the operation writes; give each tensor memory of "
                          "its own (only this rank's own part may be input and output at once)");
  };
  for (const Range& range : ranges) {
    compare(range.of->is_written ? last : last_written, range);
    if (last == nullptr || range.end > last->end) last = &range;
    if (range.of->is_written && (last_written == nullptr || range.end > last_written->end))
      last_written = &range;
  }
}

void check_aligned(const std::string& operation, const at::Tensor& tensor) {
  if (tensor.numel() == 0) return;
  if (reinterpret_cast<std::uintptr_t>(tensor.const_data_ptr()) % tensor.element_size() == 0)
    return;
  refuse(operation, tensor::describe(tensor) +
                        " begins at an address that is not a multiple of its element size of " +
                        std::to_string(tensor.element_size()) + " bytes; pass .clone()");
}

}  // namespace weft::group
