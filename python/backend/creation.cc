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
struct World {
  std::mutex mutex;
  c10::weak_intrusive_ptr<Backend> backend{c10::intrusive_ptr<Backend>()};
};
World& world() {
  static auto* const one = new World;  // outlives the interpreter
  return *one;
}

c10::intrusive_ptr<Backend> known_world() {
  World& one = world();
  const std::lock_guard lock(one.mutex);
  return one.backend.lock();
}

// The GPU that init_process_group(device_id=…) names. libtorch's options hold the process group in
// later releases than 2.11.
template <class GroupOptions>
std::optional<c10::Device> bound_gpu(const GroupOptions& options) {
  std::optional<c10::Device> bound;
  if constexpr (requires { options.process_group; }) {
    if (options.process_group) bound = options.process_group->getBoundDeviceId();
  }
  return bound && bound->is_cuda() ? bound : std::nullopt;
}

// Calls a function that makes a group and blocks until the other ranks have called it too.
template <class Function>
weft::ProcessGroup made_by(Function function) {
  // Shared, since the call goes on after Ctrl-C.
  const auto made = std::make_shared<weft::ProcessGroup>();
  interruptible([made, function]() mutable { *made = function(); });
  return *made;
}

weft::ProcessGroup join(const c10d::DistributedBackendOptions& options,
                        std::chrono::milliseconds timeout) {
  weft::ProcessGroupOptions wanted;
  const auto gpu = bound_gpu(options);
  wanted.backend = gpu ? "weft" : "cpu:weft";
  wanted.device = gpu.value_or(c10::Device(c10::kCPU));
  wanted.rank = options.group_rank;
  wanted.world_size = options.group_size;
  wanted.store = options.store;
  wanted.group_name = options.group_id;
  wanted.timeout = timeout;
  return made_by([wanted] { return weft::init_process_group(wanted); });
}

// The ranks of the new group among the ranks of the first one, if it has all of them in c10d's
// order.
std::optional<std::vector<int>> ranks_in(const Backend& first,
                                         const c10d::DistributedBackendOptions& options) {
  std::vector<int> ranks;
  for (const std::int64_t rank : options.global_ranks_in_group) {
    if (rank < 0 || rank >= first.getSize()) return std::nullopt;
    ranks.push_back(static_cast<int>(rank));
  }
  const auto place = static_cast<std::size_t>(options.group_rank);
  if (place >= ranks.size() || ranks[place] != first.getRank()) return std::nullopt;
  return ranks;
}

weft::ProcessGroup make(const c10d::DistributedBackendOptions& options,
                        std::chrono::milliseconds timeout) {
  const auto first = known_world();
  if (!first || !first->is_present()) return join(options, timeout);
  const auto ranks = ranks_in(*first, options);
  if (!ranks) return join(options, timeout);
  weft::ProcessGroupOptions wanted;
  wanted.group_name = options.group_id;
  wanted.timeout = timeout;
  if (const auto gpu = bound_gpu(options); gpu && !first->group().device().is_cuda()) {
    wanted.backend = "weft";
    wanted.device = *gpu;
  }
  return made_by([parent = first->group(), ranks, wanted]() mutable {
    return parent.new_group(*ranks, wanted);
  });
}

}  // namespace

c10::intrusive_ptr<Backend> create(const c10d::DistributedBackendOptions& options) {
  const auto timeout = std::chrono::duration_cast<std::chrono::milliseconds>(options.timeout);
  const bool is_world = options.global_ranks_in_group.empty();
  return translated(is_world ? "init_process_group" : "new_group", [&] {
    auto group = is_world ? join(options, timeout) : make(options, timeout);
    auto backend =
        c10::make_intrusive<Backend>(std::move(group), options.store, options.group_id, timeout);
    if (is_world) {
      World& one = world();
      const std::lock_guard lock(one.mutex);
      one.backend = c10::weak_intrusive_ptr<Backend>(backend);
    }
    return backend;
  });
}

c10::intrusive_ptr<c10d::Backend> Backend::split(const c10::intrusive_ptr<c10d::Store>& store,
                                                 const std::vector<int>& ranks,
                                                 const c10::intrusive_ptr<Options>& options) {
  const bool is_member = std::find(ranks.begin(), ranks.end(), getRank()) != ranks.end();
  if (!is_member) return nullptr;
  const auto timeout = options ? std::min(options->timeout, longest()) : longest();
  const std::string name = options ? options->group_name : "";
  return translated("split_group", [&] {
    weft::ProcessGroupOptions wanted;
    wanted.group_name = name;
    wanted.timeout = timeout;
    auto made = made_by(
        [parent = group(), ranks, wanted]() mutable { return parent.new_group(ranks, wanted); });
    return c10::intrusive_ptr<c10d::Backend>(
        c10::make_intrusive<Backend>(std::move(made), store, name, timeout));
  });
}

}  // namespace weft::python
