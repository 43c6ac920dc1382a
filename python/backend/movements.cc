// SPDX-License-Identifier: Apache-2.0
// The operations that move elements without looking at them.
#include <weft/python/backend/arguments.h>
#include <weft/python/backend/backend.h>
#include <weft/python/backend/errors.h>

namespace weft::python {

namespace {

constexpr CallName kBroadcast{c10d::OpType::BROADCAST, "broadcast", "weft:broadcast"};

}  // namespace

c10::intrusive_ptr<c10d::Work> Backend::broadcast(std::vector<at::Tensor>& tensors,
                                                  const c10d::BroadcastOptions& options) {
  const char* const name = kBroadcast.operation;
  return translated(name, [&] {
    const at::Tensor& tensor = only(name, tensors);
    return issue(
        kBroadcast, options.timeout, tensor.device(), tensors, tensors,
        [&](weft::ProcessGroup& group) -> Works {
          return {group.broadcast(movable(flat(name, tensor)), static_cast<int>(options.rootRank))};
        });
  });
}

}  // namespace weft::python
