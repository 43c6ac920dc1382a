// SPDX-License-Identifier: Apache-2.0
#include <string_view>

#include <weft/engine/group/recent_calls.h>
#include <weft/engine/tensor/tensor.h>

namespace weft::group {

void RecentCalls::remember(const Operation& operation, std::uint64_t number) {
  Called called{.number = number,
                .name = operation.name,
                .reduction = operation.reduction,
                .root = operation.root,
                .training = operation.training};
  if (!operation.tensors.empty()) {
    const at::Tensor& first = operation.tensors.front();
    called.dtype = first.scalar_type();
    called.device = first.device().type();
    if (!operation.parts) called.bytes = first.nbytes();
  }
  MutexLock lock(mutex_);
  called_[number % called_.size()] = called;
}

std::optional<std::string> RecentCalls::text(std::uint64_t number) const {
  UniqueLock lock(mutex_);
  const Called called = called_[number % called_.size()];
  lock.unlock();
  return number > 0 && called.number == number ? std::optional(called.text()) : std::nullopt;
}

// In the words of the mesh. Leaves out differences between calls that match: "all_gather_into"
// matches "all_gather", "all_to_all_single" "all_to_all".
std::string RecentCalls::Called::text() const {
  std::string_view known(name);
  for (const std::string_view ending : {"_into", "_single"}) {
    if (known.ends_with(ending)) known.remove_suffix(ending.size());
  }
  std::string text(known);
  if (bytes && dtype) {
    text += " of " + elements_text(*bytes, tensor::dtype_of(*dtype));
  } else if (dtype) {
    text += " of " + std::string(weft::name(tensor::dtype_of(*dtype)));
  }
  if (device != c10::kCPU) text += " on " + c10::DeviceTypeName(device, /*lower_case=*/true);
  if (reduction) text += " with " + std::string(weft::name(*reduction));
  text += transport::training_text(training);
  const bool gives = text.starts_with("broadcast") || text.starts_with("scatter");
  if (root >= 0) text += (gives ? " from rank " : " to rank ") + std::to_string(root);
  return text;
}

}  // namespace weft::group
