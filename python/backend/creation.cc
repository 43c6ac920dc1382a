// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <mutex>

#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <weft/python/backend/creation.h>
#include <weft/python/backend/device_groups.h>
#include <weft/python/backend/errors.h>

namespace weft::python {

namespace {

// The first group of the job. The others are made of it, so that they share its connections.
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

void set_world(const c10::intrusive_ptr<Backend>& backend) {
  World& one = world();
  const std::lock_guard lock(one.mutex);
  one.backend = c10::weak_intrusive_ptr<Backend>(backend);
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

// True if the group joins later, by reconfigure().
template <class GroupOptions>
bool joins_later(const GroupOptions& options) {
  if constexpr (requires { options.enable_reconfigure; }) return options.enable_reconfigure;
  return false;
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

// Joins the first group of the job, which has ranks in C++ too: they meet in the store as it was
// before c10d took the keys below "0/cpu/" for this backend, and know the group without a name.
weft::ProcessGroup join_world(const c10d::DistributedBackendOptions& options, Place place) {
  auto* const of_device = dynamic_cast<c10d::PrefixStore*>(options.store.get());
  const auto above = of_device ? of_device->getUnderlyingStore() : options.store;
  auto* const of_group = dynamic_cast<c10d::PrefixStore*>(above.get());
  if (place.name != "0" || of_device == nullptr || of_group == nullptr)
    return join(options.store, place, bound_gpu(options));
  place.name.clear();
  return join(of_group->getUnderlyingStore(), place, bound_gpu(options));
}

weft::ProcessGroup make(const c10d::DistributedBackendOptions& options, const Place& place) {
  const auto first = known_world();
  const auto ranks = first && first->is_present() ? ranks_in(*first, options) : std::nullopt;
  if (!ranks) return join(options.store, place, bound_gpu(options));
  weft::ProcessGroupOptions wanted;
  wanted.group_name = place.name;
  wanted.timeout = place.timeout;
  if (const auto gpu = bound_gpu(options); gpu && !first->group().device().is_cuda()) {
    wanted.backend = "weft";
    wanted.device = *gpu;
  }
  return make_subgroup(first->group(), *ranks, wanted);
}

}  // namespace

weft::ProcessGroup join(const c10::intrusive_ptr<c10d::Store>& store, const Place& place,
                        std::optional<c10::Device> gpu) {
  weft::ProcessGroupOptions wanted;
  wanted.backend = gpu ? "weft" : "cpu:weft";
  wanted.device = gpu.value_or(c10::Device(c10::kCPU));
  wanted.rank = place.rank;
  wanted.world_size = place.size;
  wanted.store = store;
  wanted.group_name = place.name;
  wanted.timeout = place.timeout;
  return made_by([wanted] { return weft::init_process_group(wanted); });
}

void follow_world(const Backend& first, const c10::intrusive_ptr<Backend>& second) {
  if (known_world().get() == &first) set_world(second);
}

c10::intrusive_ptr<Backend> create(const c10d::DistributedBackendOptions& options) {
  const Place place{options.group_rank, options.group_size, options.group_id,
                    std::chrono::duration_cast<std::chrono::milliseconds>(options.timeout)};
  const bool is_world = options.global_ranks_in_group.empty();
  return translated(is_world ? "init_process_group" : "new_group", [&] {
    weft::ProcessGroup group;
    if (!joins_later(options)) {
      group = is_world ? join_world(options, place) : make(options, place);
    }
    auto backend = c10::make_intrusive<Backend>(std::move(group), options.store, place);
    if (is_world) set_world(backend);
    return backend;
  });
}

}  // namespace weft::python
