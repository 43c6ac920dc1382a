// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <memory>
#include <mutex>
#include <optional>
#include <utility>

#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <weft/python/backend/creation.h>
#include <weft/python/backend/errors.h>
#include <weft/python/backend/interpreter.h>

namespace weft::python {

namespace {

// The first group of the job, of which the others are made, so that they share its connections.
c10::weak_intrusive_ptr<Backend>& world() {
  static auto* const first = new c10::weak_intrusive_ptr<Backend>(c10::intrusive_ptr<Backend>());
  return *first;
}
std::mutex world_mutex;

weft::ProcessGroup join(const c10d::DistributedBackendOptions& options,
                        std::chrono::milliseconds timeout) {
  weft::ProcessGroupOptions wanted;
  wanted.backend = "cpu:weft";
  wanted.device = c10::Device(c10::kCPU);
  if (const auto bound =
          options.process_group ? options.process_group->getBoundDeviceId() : std::nullopt;
      bound && bound->is_cuda()) {
    wanted.backend = "weft";
    wanted.device = *bound;
  }
  wanted.rank = options.group_rank;
  wanted.world_size = options.group_size;
  wanted.store = options.store;
  wanted.group_name = options.group_id;
  wanted.timeout = timeout;
  // Shared, since the call goes on after Ctrl-C.
  const auto joined = std::make_shared<weft::ProcessGroup>();
  interruptible([joined, wanted] { *joined = weft::init_process_group(wanted); });
  return *joined;
}

}  // namespace

c10::intrusive_ptr<c10d::Backend> create(const c10d::DistributedBackendOptions& options) {
  const auto timeout = std::chrono::duration_cast<std::chrono::milliseconds>(options.timeout);
  const bool is_world = options.global_ranks_in_group.empty();
  return translated("init_process_group", [&] {
    auto backend = c10::make_intrusive<Backend>(join(options, timeout), options.store,
                                                options.group_id, timeout);
    if (is_world) {
      const std::lock_guard lock(world_mutex);
      world() = c10::weak_intrusive_ptr<Backend>(backend);
    }
    return c10::intrusive_ptr<c10d::Backend>(std::move(backend));
  });
}

}  // namespace weft::python
