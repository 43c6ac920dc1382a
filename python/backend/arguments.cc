// SPDX-License-Identifier: Apache-2.0
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/as_strided.h>
#include <ATen/ops/scalar_tensor.h>

#include <weft/error.h>
#include <weft/python/backend/arguments.h>

namespace weft::python {

const at::Tensor& only(const char* operation, const std::vector<at::Tensor>& tensors) {
  if (tensors.size() == 1) return tensors.front();
  throw Error(Blame::Caller, std::string(operation) + ": takes a list of one tensor, and got " +
                                 std::to_string(tensors.size()));
}

at::Tensor flat(const char* operation, const at::Tensor& tensor) {
  if (!tensor.defined() || tensor.layout() != at::kStrided || tensor.is_contiguous()) return tensor;
  if (!tensor.is_non_overlapping_and_dense()) {
    throw Error(Blame::Caller,
                std::string(operation) +
                    ": Tensors must be contiguous, and this one has gaps; pass .contiguous(), and "
                    "read the result there");
  }
  const at::AutoDispatchBelowADInplaceOrView same_memory;
  return at::as_strided(tensor, {tensor.numel()}, {1});
}

at::Tensor movable(const at::Tensor& tensor) {
  if (!tensor.defined() || !tensor.is_contiguous()) return tensor;
  switch (tensor.scalar_type()) {
    case at::kFloat8_e4m3fnuz:
    case at::kFloat8_e5m2fnuz:
    case at::kFloat8_e8m0fnu:
    case at::kComplexHalf: break;
    default: return tensor;
  }
  const at::AutoDispatchBelowADInplaceOrView same_memory;
  return tensor.view({-1}).view(at::kByte);
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
