// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <array>
#include <atomic>
#include <set>
#include <tuple>

#include <gtest/gtest.h>

#include <weft/tests/harness/fake_nccl.h>
#include <weft/tests/harness/fake_nccl_world.h>

namespace weft::harness {

namespace {

using transport::nccl::Library;

enum class Call : std::size_t {
#define WEFT_FAKE_NUMBER(member, symbol, since) member,
  WEFT_NCCL_FUNCTIONS(WEFT_FAKE_NUMBER)
#undef WEFT_FAKE_NUMBER
      Count
};
constexpr auto kCalls = static_cast<std::size_t>(Call::Count);
static_assert(sizeof(Library) == kCalls * sizeof(void*), "FakeNccl::index_of counts pointers");

// Counts the operations that a rank's stream has reached, in stream order: a graph brings the same
// operations again.
struct Counters {
  std::mutex mutex;
  std::size_t collectives = 0;
  std::map<std::pair<bool, int>, std::size_t> messages;  // by direction (true: sent) and peer
};

struct FakeComm {
  std::shared_ptr<FakeWorld> world;
  std::size_t world_number = 0;
  int rank = 0;
  int size = 0;
  // The communicator's kernels read it.
  std::shared_ptr<std::atomic<bool>> aborted = std::make_shared<std::atomic<bool>>(false);
  bool freed = false;
  bool in_progress = false;
  bool initialising = false;
  int polls = 0;                                         // polls until it settles
  std::vector<std::pair<FakeCall, cudaStream_t>> begun;  // enqueued on the stream when it settles
  std::shared_ptr<Counters> counters = std::make_shared<Counters>();
};

// Complaints of streams, which may outlive the FakeNccl.
struct LateComplaints {
  std::mutex mutex;
  std::vector<std::string> texts;
};

// The group call that a thread is in.
struct Group {
  int depth = 0;
  std::vector<std::tuple<FakeComm*, FakeCall, cudaStream_t>> calls;
};
thread_local Group group;

}  // namespace

class FakeNcclState {
 public:
  explicit FakeNcclState(FakeDriver& of) : driver(of) {}

  struct Birth {
    std::shared_ptr<FakeWorld> world;
    int size = 0;
    std::set<int> ranks;
  };
  struct Failure {
    std::size_t function;
    ncclResult_t result;
    int after;
  };

  // Counts the call. Returns the error that the call must return at once, if a test set one.
  ncclResult_t enter(Call which) {
    ++calls[static_cast<std::size_t>(which)];
    for (auto failure = failures.begin(); failure != failures.end(); ++failure) {
      if (failure->function != static_cast<std::size_t>(which) || --failure->after > 0) continue;
      const ncclResult_t result = failure->result;
      failures.erase(failure);
      return result;
    }
    return ncclSuccess;
  }

  ncclResult_t refuse(const std::string& why) {
    complaints.push_back(why);
    return ncclInvalidUsage;
  }

  FakeComm* find(ncclComm_t handle) {
    for (const auto& comm : comms) {
      if (reinterpret_cast<ncclComm_t>(comm.get()) == handle && !comm->freed) return comm.get();
    }
    complaints.emplace_back("a communicator was used that was never made or is freed");
    return nullptr;
  }

  ncclResult_t begin(FakeComm& comm) {
    comm.in_progress = true;
    comm.polls = settle_after;
    return comm.polls == 0 && !held.contains(comm.rank) ? settle(comm) : ncclInProgress;
  }

  ncclResult_t settle(FakeComm& comm) {
    comm.in_progress = false;
    const auto begun = std::exchange(comm.begun, {});
    if (begun.empty()) return ncclSuccess;
    const auto placed = std::make_shared<std::vector<Placed>>();
    std::string text;
    for (const auto& [call, stream] : begun) {
      placed->push_back({call, 0});
      text += (text.empty() ? "" : "+") + std::string(name(call.kind));
    }
    const auto arrive = [complaining = late, counters = comm.counters, world = comm.world,
                         rank = comm.rank, placed] {
      for (Placed& one : *placed) {
        {
          const bool is_send = one.call.kind == Kind::Send;
          std::lock_guard lock(counters->mutex);
          const bool is_message = is_send || one.call.kind == Kind::Recv;
          one.number =
              (is_message ? counters->messages[{is_send, one.call.root}] : counters->collectives)++;
        }
        const std::string disagreement = world->arrive(rank, one);
        if (disagreement.empty()) continue;
        std::lock_guard lock(complaining->mutex);
        complaining->texts.push_back(disagreement);
      }
    };
    const auto is_complete = [world = comm.world, rank = comm.rank, placed,
                              aborted = comm.aborted] {
      if (*aborted) return true;
      for (const Placed& one : *placed) {
        if (!world->complete(rank, one)) return false;
      }
      return true;
    };
    const auto finish = [world = comm.world, rank = comm.rank, placed, aborted = comm.aborted] {
      for (const Placed& one : *placed) {
        if (world->complete(rank, one)) world->finish(rank, one);
      }
    };
    const cudaStream_t stream = begun.front().second;
    CUresult enqueued = driver.enqueue(stream, text + " arrives", arrive);
    if (enqueued == CUDA_SUCCESS) enqueued = driver.enqueue(stream, text, finish, is_complete);
    return enqueued == CUDA_SUCCESS ? ncclSuccess : ncclUnhandledCudaError;
  }

  ncclResult_t launch(ncclComm_t handle, Call which, const FakeCall& call, cudaStream_t stream) {
    const ncclResult_t failed = enter(which);
    FakeComm* const comm = find(handle);
    if (comm == nullptr) return ncclInvalidArgument;
    if (failed != ncclSuccess) return failed;
    if (comm->in_progress)
      return refuse(std::string(name(call.kind)) + " was called before the last call had settled");
    if (call.root < 0 || call.root >= comm->size)
      return refuse(std::string(name(call.kind)) + " names a rank that is not there");
    if (group.depth > 0) {
      group.calls.emplace_back(comm, call, stream);
      return ncclSuccess;
    }
    comm->begun.emplace_back(call, stream);
    return begin(*comm);
  }

  FakeDriver& driver;
  std::mutex mutex;
  // Freed communicators stay, so that a stale handle is recognised.
  std::vector<std::unique_ptr<FakeComm>> comms;
  std::map<std::size_t, Birth> births;  // by the number in the unique id
  std::array<int, kCalls> calls{};
  std::vector<Failure> failures;
  std::set<int> held;
  std::map<int, ncclResult_t> async_failures;
  std::vector<std::string> complaints;
  int settle_after = 2;
  const std::shared_ptr<LateComplaints> late = std::make_shared<LateComplaints>();
};

namespace {

std::atomic<FakeNcclState*> active{nullptr};

// Runs `body` on the active state, under its mutex.
template <class Body>
ncclResult_t on_state(const Body& body) {
  FakeNcclState* const state = active.load();
  if (state == nullptr) return ncclInternalError;
  std::lock_guard lock(state->mutex);
  return body(*state);
}

ncclResult_t get_version(int* version) {
  *version = NCCL_VERSION_CODE;
  return ncclSuccess;
}

const char* get_error_string(ncclResult_t result) {
  switch (result) {
    case ncclSuccess: return "no error";
    case ncclUnhandledCudaError: return "unhandled cuda error";
    case ncclSystemError: return "unhandled system error";
    case ncclInternalError: return "internal error";
    case ncclInvalidArgument: return "invalid argument";
    case ncclInvalidUsage: return "invalid usage";
    case ncclRemoteError: return "remote process exited or there was a network error";
    case ncclInProgress: return "NCCL operation in progress";
    default: return "unknown result code";
  }
}

const char* get_last_error(ncclComm_t) { return "said by the fake NCCL"; }

ncclResult_t get_unique_id(ncclUniqueId* id) {
  return on_state([&](FakeNcclState& state) {
    const ncclResult_t failed = state.enter(Call::get_unique_id);
    if (failed != ncclSuccess) return failed;
    const std::size_t number = state.births.size() + 1;
    state.births[number];
    *id = {};
    std::memcpy(id->internal, &number, sizeof number);
    return ncclSuccess;
  });
}

ncclResult_t comm_init_rank_config(ncclComm_t* handle, int size, ncclUniqueId id, int rank,
                                   ncclConfig_t* config) {
  return on_state([&](FakeNcclState& state) {
    const ncclResult_t failed = state.enter(Call::comm_init_rank_config);
    if (failed != ncclSuccess) return failed;
    if (config->blocking != 0)
      return state.refuse("a blocking communicator was asked for, which waits without a limit");
    std::size_t number = 0;
    std::memcpy(&number, id.internal, sizeof number);
    const auto birth = state.births.find(number);
    if (birth == state.births.end())
      return state.refuse("a communicator was made with an id that nobody gave out");
    if (!birth->second.world) {
      birth->second.world = std::make_shared<FakeWorld>(size);
      birth->second.size = size;
    }
    if (birth->second.size != size || rank < 0 || rank >= size ||
        !birth->second.ranks.insert(rank).second) {
      return state.refuse("rank " + std::to_string(rank) + " of " + std::to_string(size) +
                          " joins where it has no place");
    }
    FakeComm& comm = *state.comms.emplace_back(std::make_unique<FakeComm>());
    comm.world = birth->second.world;
    comm.world_number = number;
    comm.rank = rank;
    comm.size = size;
    comm.in_progress = comm.initialising = true;
    *handle = reinterpret_cast<ncclComm_t>(&comm);
    return ncclInProgress;
  });
}

ncclResult_t comm_get_async_error(ncclComm_t handle, ncclResult_t* result) {
  return on_state([&](FakeNcclState& state) {
    const ncclResult_t failed = state.enter(Call::comm_get_async_error);
    FakeComm* const comm = state.find(handle);
    if (comm == nullptr) return ncclInvalidArgument;
    if (failed != ncclSuccess) return failed;
    const auto broken = state.async_failures.find(comm->rank);
    *result = ncclSuccess;
    if (broken != state.async_failures.end()) {
      *result = broken->second;
    } else if (comm->in_progress) {
      *result = ncclInProgress;
      const bool alone =
          comm->initialising &&
          static_cast<int>(state.births[comm->world_number].ranks.size()) < comm->size;
      if (alone || state.held.contains(comm->rank) || --comm->polls > 0) return ncclSuccess;
      comm->initialising = false;
      *result = state.settle(*comm);
    }
    return ncclSuccess;
  });
}

ncclResult_t comm_finalize(ncclComm_t handle) {
  return on_state([&](FakeNcclState& state) {
    const ncclResult_t failed = state.enter(Call::comm_finalize);
    FakeComm* const comm = state.find(handle);
    if (comm == nullptr) return ncclInvalidArgument;
    if (failed != ncclSuccess) return failed;
    return comm->in_progress
               ? state.refuse("ncclCommFinalize was called before the last call had settled")
               : state.begin(*comm);
  });
}

ncclResult_t end(ncclComm_t handle, Call which, bool is_abort) {
  return on_state([&](FakeNcclState& state) {
    const ncclResult_t failed = state.enter(which);
    FakeComm* const comm = state.find(handle);
    if (comm == nullptr) return ncclInvalidArgument;
    if (failed != ncclSuccess) return failed;
    if (!is_abort && comm->in_progress)
      return state.refuse("ncclCommDestroy was called before the last call had settled");
    if (is_abort) *comm->aborted = true;
    comm->freed = true;
    return ncclSuccess;
  });
}
ncclResult_t comm_destroy(ncclComm_t handle) { return end(handle, Call::comm_destroy, false); }
ncclResult_t comm_abort(ncclComm_t handle) { return end(handle, Call::comm_abort, true); }

ncclResult_t call(Call which, ncclComm_t comm, cudaStream_t stream, const FakeCall& made) {
  return on_state([&](FakeNcclState& state) { return state.launch(comm, which, made, stream); });
}
ncclResult_t all_reduce(const void* from, void* to, std::size_t count, ncclDataType_t type,
                        ncclRedOp_t op, ncclComm_t comm, cudaStream_t stream) {
  return call(Call::all_reduce, comm, stream, {Kind::AllReduce, from, to, count, type, op});
}
ncclResult_t reduce(const void* from, void* to, std::size_t count, ncclDataType_t type,
                    ncclRedOp_t op, int root, ncclComm_t comm, cudaStream_t stream) {
  return call(Call::reduce, comm, stream, {Kind::Reduce, from, to, count, type, op, root});
}
ncclResult_t broadcast(const void* from, void* to, std::size_t count, ncclDataType_t type, int root,
                       ncclComm_t comm, cudaStream_t stream) {
  return call(Call::broadcast, comm, stream,
              {Kind::Broadcast, from, to, count, type, ncclSum, root});
}
ncclResult_t all_gather(const void* from, void* to, std::size_t count, ncclDataType_t type,
                        ncclComm_t comm, cudaStream_t stream) {
  return call(Call::all_gather, comm, stream, {Kind::AllGather, from, to, count, type});
}
ncclResult_t reduce_scatter(const void* from, void* to, std::size_t count, ncclDataType_t type,
                            ncclRedOp_t op, ncclComm_t comm, cudaStream_t stream) {
  return call(Call::reduce_scatter, comm, stream, {Kind::ReduceScatter, from, to, count, type, op});
}
ncclResult_t send(const void* from, std::size_t count, ncclDataType_t type, int peer,
                  ncclComm_t comm, cudaStream_t stream) {
  return call(Call::send, comm, stream, {Kind::Send, from, nullptr, count, type, ncclSum, peer});
}
ncclResult_t recv(void* to, std::size_t count, ncclDataType_t type, int peer, ncclComm_t comm,
                  cudaStream_t stream) {
  return call(Call::recv, comm, stream, {Kind::Recv, nullptr, to, count, type, ncclSum, peer});
}

ncclResult_t group_start() {
  return on_state([&](FakeNcclState& state) {
    const ncclResult_t failed = state.enter(Call::group_start);
    if (failed == ncclSuccess) ++group.depth;
    return failed;
  });
}

ncclResult_t group_end() {
  return on_state([&](FakeNcclState& state) {
    const ncclResult_t failed = state.enter(Call::group_end);
    if (group.depth == 0) return state.refuse("ncclGroupEnd was called outside a group");
    if (--group.depth > 0) return failed;
    const auto calls = std::exchange(group.calls, {});
    if (failed != ncclSuccess || calls.empty()) return failed;
    FakeComm* const comm = std::get<0>(calls.front());
    for (const auto& [of, made, stream] : calls) {
      if (of != comm) return state.refuse("the fake NCCL takes one communicator in a group");
      comm->begun.emplace_back(made, stream);
    }
    return state.begin(*comm);
  });
}

Library make_table() {
  Library table;
#define WEFT_FAKE_ENTRY(member, symbol, since) table.member = &member;
  WEFT_NCCL_FUNCTIONS(WEFT_FAKE_ENTRY)
#undef WEFT_FAKE_ENTRY
  return table;
}

}  // namespace

FakeNccl::FakeNccl(FakeDriver& driver)
    : state_(std::make_unique<FakeNcclState>(driver)),
      table_(std::make_shared<const Library>(make_table())) {
  FakeNcclState* none = nullptr;
  if (!active.compare_exchange_strong(none, state_.get())) {
    throw Error(Blame::Caller,
                "a FakeNccl is active already; NCCL's functions cannot tell two apart");
  }
}

FakeNccl::~FakeNccl() {
  EXPECT_EQ(alive(), 0) << "communicators that were not freed";
  active = nullptr;
  for (const std::string& complaint : take_complaints())
    ADD_FAILURE() << "fake NCCL: " << complaint;
}

std::shared_ptr<const FakeNccl::Library> FakeNccl::library() const { return table_; }

void FakeNccl::settle_after(int polls) {
  std::lock_guard lock(state_->mutex);
  state_->settle_after = polls;
}

void FakeNccl::hold(int rank) {
  std::lock_guard lock(state_->mutex);
  state_->held.insert(rank);
}

void FakeNccl::release(int rank) {
  std::lock_guard lock(state_->mutex);
  state_->held.erase(rank);
}

void FakeNccl::fail_async(int rank, ncclResult_t result) {
  std::lock_guard lock(state_->mutex);
  state_->async_failures[rank] = result;
}

void FakeNccl::fail_function(std::size_t index, ncclResult_t result, int nth) {
  std::lock_guard lock(state_->mutex);
  state_->failures.push_back({index, result, nth});
}

int FakeNccl::calls_of(std::size_t index) const {
  std::lock_guard lock(state_->mutex);
  return state_->calls[index];
}

int FakeNccl::alive() const {
  std::lock_guard lock(state_->mutex);
  return static_cast<int>(std::count_if(state_->comms.begin(), state_->comms.end(),
                                        [](const auto& c) { return !c->freed; }));
}

int FakeNccl::aborted() const {
  std::lock_guard lock(state_->mutex);
  return static_cast<int>(std::count_if(state_->comms.begin(), state_->comms.end(),
                                        [](const auto& c) { return c->aborted->load(); }));
}

void FakeNccl::forget_alive() {
  std::lock_guard lock(state_->mutex);
  for (const auto& comm : state_->comms) comm->freed = true;
}

std::vector<std::string> FakeNccl::take_complaints() {
  std::lock_guard lock(state_->mutex);
  std::lock_guard late(state_->late->mutex);
  auto complaints = std::exchange(state_->complaints, {});
  for (std::string& complaint : state_->late->texts) complaints.push_back(std::move(complaint));
  state_->late->texts.clear();
  return complaints;
}

}  // namespace weft::harness
