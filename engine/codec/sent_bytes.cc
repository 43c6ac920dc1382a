// SPDX-License-Identifier: Apache-2.0
#include <functional>
#include <string_view>

#include <weft/engine/codec/sent_bytes.h>
#include <weft/engine/tensor/tensor.h>

namespace weft::codec {

namespace {

std::uint32_t version_of(const at::Tensor& tensor) {
  return tensor.unsafeGetTensorImpl()->version_counter().current_version();
}

std::size_t sum_of(const Part& part) {
  return std::hash<std::string_view>()({reinterpret_cast<const char*>(part.data()), part.bytes});
}

}  // namespace

void SentBytes::add(const at::Tensor& tensor) {
  if (tensor.is_inference()) return;
  versions_.push_back(
      {tensor.detach(), version_of(tensor)});  // shares the version counter, and keeps no graph
}

void SentBytes::add(const std::vector<Part>& parts) {
  for (const Part& part : parts) {
    if (part.device().is_cpu() && part.bytes > 0) sums_.push_back({part, sum_of(part)});
  }
}

std::optional<std::string> SentBytes::changed() const {
  for (const auto& [tensor, version] : versions_) {
    if (version_of(tensor) != version)
      return tensor::describe(tensor) + " was changed by an operation in place";
  }
  for (const auto& [part, sum] : sums_) {
    if (sum_of(part) != sum) {
      return std::to_string(part.bytes) +
             " bytes were changed through .data() or a pointer into a tensor's memory";
    }
  }
  return std::nullopt;
}

}  // namespace weft::codec
