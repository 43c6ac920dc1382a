// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <array>

#include <weft/base/log.h>
#include <weft/base/mutex.h>
#include <weft/kernels/kernels.h>
#include <weft/transport/mpi/world.h>

namespace weft::transport::mpi {

namespace {

constexpr int kTagsOfARank = 4096;
constexpr std::size_t kDtypes = static_cast<std::size_t>(Dtype::UInt64) + 1;
constexpr std::size_t kOps = static_cast<std::size_t>(ReduceOp::BitXor) + 1;

// MPI's operators support neither bf16 nor NaN in a minimum, so Weft defines all of them. MPI does
// not tell the function the type or operator (the elements are bytes to it), so there is one
// function for each pair.
template <std::size_t Pair>
void combine(void* with, void* into, int* count, MPI_Datatype*) {
  constexpr auto kDtype = static_cast<Dtype>(Pair / kOps);
  constexpr auto kOp = static_cast<ReduceOp>(Pair % kOps);
  const std::size_t bytes = static_cast<std::size_t>(*count) * size_of(kDtype);
  const Slice out{into, bytes, Device::host()};
  kernels::reduce(out, {with, bytes, Device::host()}, out, kDtype, kOp);
}

template <std::size_t... Pairs>
constexpr std::array<MPI_User_function*, sizeof...(Pairs)> all_of(std::index_sequence<Pairs...>) {
  return {&combine<Pairs>...};
}
constexpr auto kCombine = all_of(std::make_index_sequence<kDtypes * kOps>());

}  // namespace

std::shared_ptr<World> World::of_process(const std::shared_ptr<const Library>& library) {
  static Mutex mutex;
  // Destroyed after main(), before MPI's own exit handlers run.
  static std::shared_ptr<World> world WEFT_GUARDED_BY(mutex);
  MutexLock lock(mutex);
  if (!world) world = std::make_shared<World>(Key(), library);
  return world;
}

World::World(Key, std::shared_ptr<const Library> library) : library_(std::move(library)) {
  int is_started = 0, has_ended = 0, level = MPI_THREAD_SINGLE;
  check(*library_, library_->finalized(&has_ended), "MPI_Finalized");
  if (has_ended)
    throw Error(Blame::Unsupported,
                "MPI has been finalized in this process and cannot be started again");
  check(*library_, library_->initialized(&is_started), "MPI_Initialized");
  if (is_started) {
    check(*library_, library_->query_thread(&level), "MPI_Query_thread");
  } else {
    check(*library_, library_->init_thread(nullptr, nullptr, MPI_THREAD_MULTIPLE, &level),
          "MPI_Init_thread");
    ours_ = true;
  }
  if (level < MPI_THREAD_SERIALIZED) {
    throw Error(
        Blame::Unsupported,
        library_->version() +
            (ours_ ? " offers no sufficient thread level; Weft calls it from several threads"
                   : " was started by the program for a single thread; start it with "
                     "MPI_Init_thread(MPI_THREAD_MULTIPLE), or leave that to Weft"));
  }
  one_thread_at_a_time_ = level == MPI_THREAD_SERIALIZED;
  if (one_thread_at_a_time_) {
    log::warn(library_->version() +
              " offers only MPI_THREAD_SERIALIZED: Weft's calls wait for each other, and the "
              "program must not call MPI meanwhile");
  }
  check(*library_, library_->comm_set_errhandler(library_->comm_world, library_->errors_return),
        "MPI_Comm_set_errhandler");
  check(*library_, library_->comm_rank(library_->comm_world, &rank_), "MPI_Comm_rank");
  check(*library_, library_->comm_size(library_->comm_world, &size_), "MPI_Comm_size");
  int is_set = 0;
  int* largest = nullptr;
  check(*library_,
        library_->comm_get_attr(library_->comm_world, MPI_TAG_UB, static_cast<void*>(&largest),
                                &is_set),
        "MPI_Comm_get_attr");
  if (is_set != 0) largest_tag_ = *largest;
}

World::~World() {
  if (!ours_) return;
  int has_ended = 0;
  library_->finalized(&has_ended);
  if (has_ended != 0) return;
  if (const int code = library_->finalize(); code != MPI_SUCCESS)
    log::warn(error_of(*library_, code, "MPI_Finalize").what());
}

std::unique_lock<std::mutex> World::turn() {
  return one_thread_at_a_time_ ? std::unique_lock(turns_) : std::unique_lock<std::mutex>();
}

MPI_Datatype World::elements(std::size_t bytes) {
  MutexLock lock(mutex_);
  auto [found, is_new] = elements_.try_emplace(bytes, nullptr);
  if (is_new) {
    try {
      check(*library_,
            library_->type_contiguous(static_cast<int>(bytes), library_->byte, &found->second),
            "MPI_Type_contiguous");
      check(*library_, library_->type_commit(&found->second), "MPI_Type_commit");
    } catch (...) {
      elements_.erase(found);
      throw;
    }
  }
  return found->second;
}

MPI_Op World::operation(Dtype dtype, ReduceOp op) {
  MutexLock lock(mutex_);
  auto [found, is_new] = operations_.try_emplace({dtype, op}, nullptr);
  if (is_new) {
    const std::size_t pair = static_cast<std::size_t>(dtype) * kOps + static_cast<std::size_t>(op);
    const int code = library_->op_create(kCombine[pair], /*commute=*/1, &found->second);
    if (code != MPI_SUCCESS) {
      operations_.erase(found);
      throw error_of(*library_, code, "MPI_Op_create");
    }
  }
  return found->second;
}

int World::next_creation_tag() {
  MutexLock lock(mutex_);
  const int room = std::max(largest_tag_ / kTagsOfARank, 1);
  return rank_ % room * kTagsOfARank + created_++ % kTagsOfARank;
}

void World::keep_for_ever(Pin pin) {
  MutexLock lock(mutex_);
  kept_.push_back(std::move(pin));
}

}  // namespace weft::transport::mpi
