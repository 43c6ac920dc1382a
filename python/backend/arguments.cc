// SPDX-License-Identifier: Apache-2.0
#include <string>

#include <ATen/MemoryOverlap.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/scalar_tensor.h>
#include <c10/core/GradMode.h>

#include <weft/error.h>
#include <weft/python/backend/arguments.h>

namespace weft::python {

namespace {

[[noreturn]] void refuse_number(const char* operation, const char* things, std::size_t number) {
  throw Error(Blame::Caller, std::string(operation) + ": takes a list of one " + things +
                                 ", and got " + std::to_string(number));
}

bool is_strided(const at::Tensor& tensor) {
  return tensor.defined() && tensor.layout() == at::kStrided;
}

// True if the tensor's memory holds its values one after the other, and not their conjugates or
// negatives.
bool is_plain(const at::Tensor& tensor) {
  return tensor.is_contiguous() && !tensor.is_conj() && !tensor.is_neg();
}

// The same values in memory that is_plain(): the tensor's own if that is, else a copy.
at::Tensor plain(const at::Tensor& tensor) {
  return tensor.contiguous().resolve_conj().resolve_neg();
}

}  // namespace

const at::Tensor& only(const char* operation, const std::vector<at::Tensor>& tensors) {
  if (tensors.size() == 1) return tensors.front();
  refuse_number(operation, "tensor", tensors.size());
}

std::vector<at::Tensor>& only(const char* operation, std::vector<std::vector<at::Tensor>>& lists) {
  if (lists.size() == 1) return lists.front();
  refuse_number(operation, "list of tensors", lists.size());
}

void check_pairs(const char* operation, std::size_t outputs, std::size_t inputs) {
  if (outputs == inputs && outputs > 0) return;
  throw Error(Blame::Caller, std::string(operation) + ": " + std::to_string(outputs) +
                                 " outputs for " + std::to_string(inputs) +
                                 " inputs; it takes one for each, and at least one");
}

at::Tensor movable(const at::Tensor& tensor) {
  if (!is_strided(tensor)) return tensor;
  const at::AutoDispatchBelowADInplaceOrView same_memory;
  const at::Tensor whole = plain(tensor);
  switch (whole.scalar_type()) {
    case at::kFloat8_e4m3fnuz:
    case at::kFloat8_e5m2fnuz:
    case at::kFloat8_e8m0fnu:
    case at::kComplexHalf: break;
    default: return whole;
  }
  return (whole.dim() == 0 ? whole.view({1}) : whole).view(at::kByte);
}

std::vector<at::Tensor> movable(const std::vector<at::Tensor>& tensors) {
  std::vector<at::Tensor> all;
  all.reserve(tensors.size());
  for (const at::Tensor& one : tensors) all.push_back(movable(one));
  return all;
}

void Outputs::check_elements(const at::Tensor& tensor) const {
  if (at::has_internal_overlap(tensor) != at::MemOverlap::Yes) return;
  throw Error(Blame::Caller,
              std::string(operation_) +
                  ": elements of this tensor share memory, as expand() makes them; pass "
                  ".contiguous(), and read the result there");
}

at::Tensor Outputs::of(const at::Tensor& output) {
  if (!is_strided(output) || is_plain(output)) return movable(output);
  check_elements(output);
  at::Tensor instead = at::empty(output.sizes(), output.options());
  pairs_.emplace_back(output, instead);
  return movable(instead);
}

at::Tensor Outputs::in_place(const at::Tensor& tensor) {
  if (!is_strided(tensor) || is_plain(tensor)) return tensor;
  check_elements(tensor);
  const at::AutoDispatchBelowADInplaceOrView same_memory;
  at::Tensor instead = plain(tensor);
  pairs_.emplace_back(tensor, instead);
  return instead;
}

std::vector<at::Tensor> Outputs::of(const std::vector<at::Tensor>& outputs) {
  std::vector<at::Tensor> all;
  all.reserve(outputs.size());
  for (const at::Tensor& one : outputs) all.push_back(of(one));
  return all;
}

void Outputs::copy_back() const {
  // Below these keys, inference tensors may be changed on other threads too.
  const at::AutoDispatchBelowADInplaceOrView same_memory;
  for (const auto& [output, instead] : pairs_) output.copy_(instead);
}

std::vector<at::Tensor> parts_of(const at::Tensor& whole, int count, const at::Tensor& like) {
  if (whole.numel() != like.numel() * count) {
    throw Error(Blame::Caller, "a tensor of " + std::to_string(whole.numel()) +
                                   " elements does not hold " + std::to_string(count) +
                                   " parts of " + std::to_string(like.numel()));
  }
  const at::AutoDispatchBelowADInplaceOrView same_memory;
  std::vector<at::Tensor> parts;
  const at::Tensor row = whole.view({-1});
  for (int i = 0; i < count; ++i)
    parts.push_back(row.narrow(0, i * like.numel(), like.numel()).view(like.sizes()));
  return parts;
}

void Reduction::scale(at::Tensor tensor) const {
  const c10::AutoGradMode no_grad(false);
  if (factor.defined()) tensor.mul_(factor);
}

at::Tensor Reduction::scaled(const at::Tensor& tensor) const {
  const c10::AutoGradMode no_grad(false);
  return factor.defined() ? tensor.mul(factor.to(tensor.scalar_type())) : tensor;
}

Reduction reduction_of(const char* operation, const c10d::ReduceOp& op) {
  switch (op.op_) {
    case c10d::ReduceOp::SUM: return {ReduceOp::Sum, {}};
    case c10d::ReduceOp::AVG: return {ReduceOp::Avg, {}};
    case c10d::ReduceOp::PRODUCT: return {ReduceOp::Product, {}};
    case c10d::ReduceOp::MIN: return {ReduceOp::Min, {}};
    case c10d::ReduceOp::MAX: return {ReduceOp::Max, {}};
    case c10d::ReduceOp::BAND: return {ReduceOp::BitAnd, {}};
    case c10d::ReduceOp::BOR: return {ReduceOp::BitOr, {}};
    case c10d::ReduceOp::BXOR: return {ReduceOp::BitXor, {}};
    case c10d::ReduceOp::PREMUL_SUM: {
      const auto* const given =
          static_cast<const c10d::NCCLPreMulSumSupplement*>(op.supplement_.get());
      return {ReduceOp::Sum, given->tensor_factor.defined()
                                 ? given->tensor_factor
                                 : at::scalar_tensor(given->double_factor, at::kDouble)};
    }
    default: break;
  }
  throw Error(Blame::Caller, std::string(operation) + ": there is no ReduceOp " +
                                 std::to_string(static_cast<int>(op.op_)));
}

}  // namespace weft::python
