// SPDX-License-Identifier: Apache-2.0
#include <sstream>

#include <c10/util/Exception.h>

#include <weft/base/error.h>
#include <weft/engine/tensor/tensor.h>

namespace weft::tensor {

namespace {

struct Row {
  Dtype dtype;
  at::ScalarType type;
};

constexpr Row kTable[] = {
    {Dtype::UInt8, at::kByte},
    {Dtype::Int8, at::kChar},
    {Dtype::Int16, at::kShort},
    {Dtype::Int32, at::kInt},
    {Dtype::Int64, at::kLong},
    {Dtype::Float16, at::kHalf},
    {Dtype::Float32, at::kFloat},
    {Dtype::Float64, at::kDouble},
    {Dtype::ComplexFloat32, at::kComplexFloat},
    {Dtype::ComplexFloat64, at::kComplexDouble},
    {Dtype::Bool, at::kBool},
    {Dtype::BFloat16, at::kBFloat16},
    {Dtype::Float8E4M3, at::kFloat8_e4m3fn},
    {Dtype::Float8E5M2, at::kFloat8_e5m2},
    {Dtype::UInt16, at::kUInt16},
    {Dtype::UInt32, at::kUInt32},
    {Dtype::UInt64, at::kUInt64},
};

}  // namespace

Dtype dtype_of(at::ScalarType type) {
  for (const Row& row : kTable) {
    if (row.type == type) return row.dtype;
  }
  throw Error(Blame::Caller, std::string("tensors of dtype ") + c10::toString(type) +
                                 " are not carried; convert it first");
}

Device device_of(const c10::Device& device) {
  if (device.is_cpu()) return Device::host();
  if (device.is_cuda()) return Device::cuda(device.has_index() ? device.index() : 0);
  throw Error(Blame::Caller,
              "tensors on " + device.str() + " are not carried; Weft takes cpu and cuda");
}

Slice slice_of(const at::Tensor& tensor) {
  return {tensor.numel() == 0 ? nullptr : tensor.data_ptr(), tensor.nbytes(),
          device_of(tensor.device())};
}

transport::Elements elements_of(const at::Tensor& tensor) {
  return {slice_of(tensor), dtype_of(tensor.scalar_type())};
}

Pin pin(at::Tensor tensor) { return std::make_shared<const at::Tensor>(std::move(tensor)); }

Pin pin(std::vector<at::Tensor> tensors) {
  return std::make_shared<const std::vector<at::Tensor>>(std::move(tensors));
}

std::string describe(const at::Tensor& tensor) {
  if (!tensor.defined()) return "an undefined tensor";
  std::ostringstream text;
  text << c10::toString(tensor.scalar_type()) << " " << tensor.sizes() << " on " << tensor.device();
  return text.str();
}

std::string text_of(const std::exception& error) {
  const auto* const c10_error = dynamic_cast<const c10::Error*>(&error);
  return c10_error != nullptr ? c10_error->what_without_backtrace() : weft::text_of(error);
}

}  // namespace weft::tensor
