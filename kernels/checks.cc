// SPDX-License-Identifier: Apache-2.0
#include <algorithm>

#include <weft/base/error.h>
#include <weft/kernels/checks.h>

namespace weft::kernels {

namespace {

bool is_float(Dtype dtype) {
  return dtype == Dtype::Float16 || dtype == Dtype::BFloat16 || dtype == Dtype::Float32 ||
         dtype == Dtype::Float64;
}

std::string text_of(const char* what, std::ptrdiff_t index) {
  return index < 0 ? std::string(what) : std::string(what) + " " + std::to_string(index);
}

std::string text_of(Dtype dtype) { return std::string(weft::name(dtype)); }

}  // namespace

void Call::refuse(const std::string& text) const {
  throw Error(Blame::Caller, std::string(name) + ": " + text);
}

std::size_t Call::elements_of(const Slice& slice, Dtype dtype, const char* what,
                              std::ptrdiff_t index) const {
  if (slice.bytes == 0) return 0;
  if (slice.data == nullptr)
    refuse(text_of(what, index) + " of " + std::to_string(slice.bytes) + " bytes has no address");
  if (slice.device != device) {
    refuse(text_of(what, index) + " lies on " + describe(slice.device) +
           "; this call takes memory of " + describe(device));
  }
  if (slice.bytes % size_of(dtype) != 0) {
    refuse(text_of(what, index) + " has " + std::to_string(slice.bytes) +
           " bytes, not a whole number of " + text_of(dtype) + " elements");
  }
  if (reinterpret_cast<std::uintptr_t>(slice.data) % size_of(dtype) != 0) {
    refuse(text_of(what, index) + " is not aligned to an element of " + text_of(dtype));
  }
  return slice.bytes / size_of(dtype);
}

void Call::check_elements(std::size_t expected, const Slice& slice, Dtype dtype, const char* what,
                          std::ptrdiff_t index) const {
  const std::size_t elements = elements_of(slice, dtype, what, index);
  if (elements == expected) return;
  refuse(text_of(what, index) + " has " + std::to_string(elements) + " elements of " +
         text_of(dtype) + "; " + std::to_string(expected) + " are needed");
}

CastTypes Call::cast_types(Dtype from, Dtype to, double scale) const {
  if (from == to && scale == 1) {
    const std::size_t bytes = std::min(size_of(from), sizeof(std::uint64_t));
    return {from, to, bytes, bytes, true};
  }
  const Dtype real_from = real_of(from);
  const Dtype real_to = real_of(to);
  const bool both_complex = real_from != from && real_to != to;
  const bool both_real = real_from == from && real_to == to;
  if (!is_float(real_from) || !is_float(real_to) || !(both_complex || both_real)) {
    refuse("cannot convert " + text_of(from) + " to " + text_of(to) + " with a scale of " +
           std::to_string(scale) +
           "; supported: fp16, bf16, fp32 and fp64 to each other, complex to complex, and copies "
           "(same type, scale 1)");
  }
  return {real_from, real_to, size_of(real_from), size_of(real_to), false};
}

void Call::check_pairs(std::span<const Slice> from, Dtype from_dtype, std::span<const Slice> to,
                       Dtype to_dtype) const {
  if (from.size() != to.size()) {
    refuse(std::to_string(from.size()) + " slices to read but " + std::to_string(to.size()) +
           " to write");
  }
  for (std::size_t i = 0; i < from.size(); ++i) {
    const auto index = static_cast<std::ptrdiff_t>(i);
    check_elements(elements_of(from[i], from_dtype, "source", index), to[i], to_dtype,
                   "destination", index);
  }
}

void Call::check_flat(std::span<const Slice> scattered, Dtype dtype, const Slice& flat,
                      Dtype flat_dtype) const {
  std::size_t elements = 0;
  for (std::size_t i = 0; i < scattered.size(); ++i) {
    elements += elements_of(scattered[i], dtype, "slice", static_cast<std::ptrdiff_t>(i));
  }
  const std::size_t room = elements_of(flat, flat_dtype, "the flat buffer");
  if (elements <= room) return;
  refuse("the slices have " + std::to_string(elements) + " elements, the flat buffer has " +
         std::to_string(room) + " of " + text_of(flat_dtype));
}

void Call::check_reduce(const Slice& out, const Slice& a, const Slice& b, Dtype dtype,
                        ReduceOp op) const {
  if (!supports(op, dtype))
    refuse(std::string(weft::name(op)) + " is not defined for " + text_of(dtype));
  const std::size_t elements = elements_of(out, dtype, "the result");
  check_elements(elements, a, dtype, "the first operand", -1);
  check_elements(elements, b, dtype, "the second operand", -1);
}

void Call::check_optimizer_types(Dtype dtype, Dtype gradient_dtype) const {
  const bool half = gradient_dtype == Dtype::Float16 || gradient_dtype == Dtype::BFloat16;
  if (is_float(dtype) && (gradient_dtype == dtype || (dtype == Dtype::Float32 && half))) return;
  refuse("parameters of " + text_of(dtype) + " with gradients of " + text_of(gradient_dtype) +
         "; supported: fp16, bf16, fp32 and fp64 with gradients of their own type, and fp32 with "
         "fp16 or bf16");
}

void Call::check_sgd(std::span<const SgdTensor> tensors, Dtype dtype, Dtype gradient_dtype,
                     const SgdOptions& options) const {
  check_optimizer_types(dtype, gradient_dtype);
  if (options.nesterov && (options.momentum <= 0 || options.dampening != 0)) {
    refuse("Nesterov momentum needs a momentum above 0 and no dampening");
  }
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    const auto index = static_cast<std::ptrdiff_t>(i);
    const std::size_t elements = elements_of(tensors[i].parameter, dtype, "parameter", index);
    check_elements(elements, tensors[i].gradient, gradient_dtype, "gradient", index);
    if (options.momentum != 0)
      check_elements(elements, tensors[i].momentum_buffer, dtype, "momentum buffer", index);
  }
}

void Call::check_adamw(std::span<const AdamWTensor> tensors, Dtype dtype, Dtype gradient_dtype,
                       const AdamWOptions& options) const {
  check_optimizer_types(dtype, gradient_dtype);
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    const auto index = static_cast<std::ptrdiff_t>(i);
    const AdamWTensor& tensor = tensors[i];
    if (tensor.step < 1)
      refuse("the step of parameter " + std::to_string(i) + " is below 1; the first one is 1");
    const std::size_t elements = elements_of(tensor.parameter, dtype, "parameter", index);
    check_elements(elements, tensor.gradient, gradient_dtype, "gradient", index);
    check_elements(elements, tensor.exp_avg, dtype, "exp_avg", index);
    check_elements(elements, tensor.exp_avg_sq, dtype, "exp_avg_sq", index);
    if (options.amsgrad)
      check_elements(elements, tensor.max_exp_avg_sq, dtype, "max_exp_avg_sq", index);
  }
}

}  // namespace weft::kernels
