// SPDX-License-Identifier: Apache-2.0
#include <utility>

#include <weft/python/backend/coalescing.h>

namespace weft::python {

void Coalescing::begin() {
  const std::lock_guard lock(mutex_);
  collected_.emplace();
}

void Coalescing::add(const IssuedWork& work, const std::vector<at::Tensor>& outputs) {
  const std::lock_guard lock(mutex_);
  if (!collected_) return;
  const auto append = [](auto& to, const auto& from) {
    to.insert(to.end(), from.begin(), from.end());
  };
  append(collected_->operations, work.operations());
  append(collected_->copies, work.copies());
  append(collected_->outputs, outputs);
}

std::optional<Coalescing::Coalesced> Coalescing::end() {
  const std::lock_guard lock(mutex_);
  return std::exchange(collected_, std::nullopt);
}

}  // namespace weft::python
