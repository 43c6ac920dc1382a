// SPDX-License-Identifier: Apache-2.0
// For any bytes weft::decode either throws an Error or gives a value that can be used and encoded:
// tensors, also sparse ones, lie within the received bytes. The first byte chooses the type that is
// expected.
#include <chrono>
#include <cstdint>
#include <map>
#include <optional>
#include <span>
#include <string>
#include <variant>
#include <vector>

#include <ATen/ATen.h>

#include <weft/base/error.h>
#include <weft/base/make_error.h>
#include <weft/engine/codec/codec.h>

namespace {

using weft::broken;

// Larger tensors are not read: with strides of zero, few bytes make a large tensor.
constexpr std::int64_t kMostElements = 4096;

// Reads every element, so that a sanitizer detects memory that does not exist.
void use(const at::Tensor& tensor) {
  if (!tensor.defined()) return;
  if (tensor.numel() > kMostElements) return;
  if (tensor.layout() == at::kStrided) {
    if (!tensor.detach().clone().defined()) broken("a tensor that cannot be copied");
    return;
  }
  const at::Tensor dense = tensor.detach().to_dense();  // writes where its indices point
  if (dense.sizes() != tensor.sizes()) broken("a sparse tensor of another shape");
  // sum() needs no strides of the values.
  const bool sums_up = tensor.layout() == at::kSparseCsr && tensor.dim() == 2 &&
                       at::isFloatingType(tensor.scalar_type());
  if (sums_up && !tensor.detach().sum(1, true).defined()) broken("a sparse tensor without a sum");
}
template <class T>
void use(const T&) {}
template <class T>
void use(const std::vector<T>& values) {
  for (const auto& value : values) use(value);
}
template <class K, class T>
void use(const std::map<K, T>& values) {
  for (const auto& [key, value] : values) use(value);
}
template <class T>
void use(const std::optional<T>& value) {
  if (value) use(*value);
}
template <class... T>
void use(const std::variant<T...>& value) {
  std::visit([](const auto& held) { use(held); }, value);
}

struct Record {
  std::string name;
  std::map<std::string, std::vector<at::Tensor>> tensors;
  std::optional<double> number;
  WEFT_FIELDS(name, tensors, number)
};
void use(const Record& record) { use(record.tensors); }

template <class T>
void check(std::span<const std::byte> bytes) {
  std::optional<T> value;
  try {
    value.emplace(weft::decode<T>(bytes));
  } catch (const weft::Error& error) {
    if (error.blame() != weft::Blame::Caller && error.blame() != weft::Blame::Busy)
      broken("an Error is blamed on a peer");
    return;
  }
  use(*value);
  // A decoded value can be encoded. Large tensors are left out: the gaps between strides are
  // encoded too.
  if (weft::encode(*value).empty()) broken("a value that has no bytes");
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t bytes) {
  if (bytes == 0) return 0;
  const auto input = std::as_bytes(std::span(data + 1, bytes - 1));
  switch (data[0] % 6) {
    case 0: check<at::Tensor>(input); break;
    case 1: check<std::vector<at::Tensor>>(input); break;
    case 2: check<Record>(input); break;
    case 3:
      check<std::variant<std::int64_t, std::string, at::Tensor, std::vector<double>>>(input);
      break;
    case 4: check<std::vector<c10::Scalar>>(input); break;
    default: check<std::map<std::int64_t, std::optional<std::chrono::milliseconds>>>(input); break;
  }
  return 0;
}
