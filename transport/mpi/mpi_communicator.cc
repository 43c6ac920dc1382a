// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <numeric>
#include <set>
#include <utility>

#include <weft/base/loop_flag.h>
#include <weft/base/make_error.h>
#include <weft/kernels/kernels.h>
#include <weft/transport/mpi/agreement.h>
#include <weft/transport/mpi/mpi_communicator.h>

namespace weft::transport::mpi {

namespace {

// Memory that MPI uses until an operation has ended: the user's memory, copies of it, and arrays
// for MPI itself.
struct Held {
  Pin user;
  std::vector<std::byte> input;
  std::vector<std::byte> output;
  std::vector<int> counts[2];
  std::vector<int> places[2];
};

std::shared_ptr<Held> hold(Pin user) {
  auto held = std::make_shared<Held>();
  held->user = std::move(user);
  return held;
}

std::size_t bytes_of(std::span<const Slice> slices) {
  return std::accumulate(slices.begin(), slices.end(), std::size_t{0},
                         [](std::size_t sum, const Slice& slice) { return sum + slice.bytes; });
}

// The begin of the slices, if they are contiguous; else null.
void* joined(std::span<const Slice> slices) {
  const std::byte* end = nullptr;
  void* first = nullptr;
  for (const Slice& slice : slices) {
    if (slice.bytes == 0) continue;
    if (end != nullptr && slice.data != end) return nullptr;
    if (first == nullptr) first = slice.data;
    end = static_cast<const std::byte*>(slice.data) + slice.bytes;
  }
  return first;
}

void copy(std::vector<std::byte>& to, std::span<const Slice> from) {
  std::size_t offset = 0;
  for (const Slice& slice : from) {
    if (slice.bytes > 0) std::memcpy(&to[offset], slice.data, slice.bytes);
    offset += slice.bytes;
  }
}
void copy(std::span<const Slice> to, const std::vector<std::byte>& from) {
  std::size_t offset = 0;
  for (const Slice& slice : to) {
    if (slice.bytes > 0) std::memcpy(slice.data, &from[offset], slice.bytes);
    offset += slice.bytes;
  }
}

// How a reduction combines numbers.
struct Arithmetic {
  Arithmetic(Dtype given, ReduceOp op, int ranks)
      : dtype(given),
        summed(op == ReduceOp::Avg ? ReduceOp::Sum : op),
        scale(op == ReduceOp::Avg ? 1.0 / ranks : 1) {
    const bool is_short_float = given == Dtype::Float16 || given == Dtype::BFloat16;
    const bool rounds = op == ReduceOp::Sum || op == ReduceOp::Product || op == ReduceOp::Avg;
    is_wide = is_short_float && rounds;
  }
  Dtype sent() const { return is_wide ? Dtype::Float32 : dtype; }
  std::size_t sent_bytes(std::size_t bytes) const {
    return bytes / size_of(dtype) * size_of(sent());
  }
  void widen(std::span<const Slice> from, std::vector<std::byte>& to) const {
    kernels::pack(from, dtype, {to.data(), to.size(), Device::host()}, sent());
  }
  // Writes the result from `from` to `to`, which may be the same memory.
  void finish(const Slice& from, const Slice& to) const {
    if (to.bytes == 0) return;
    if (is_wide) {
      kernels::cast({&from, 1}, sent(), {&to, 1}, dtype, scale);
    } else if (scale != 1) {
      kernels::scale(to, dtype, scale);
    }
  }

  Dtype dtype;
  ReduceOp summed;
  double scale;
  bool is_wide = false;
};

// Refuses operations of more elements than an int can count, as MPI's counts are ints.
std::optional<Error> why_too_large(const std::string& what, std::size_t elements) {
  if (elements <= static_cast<std::size_t>(std::numeric_limits<int>::max())) return std::nullopt;
  return Error(Blame::Unsupported,
               what + ": " + std::to_string(elements) +
                   " elements, and MPI takes 2147483647 at a time; call it in parts");
}

// The id of the mpirun job that this process belongs to.
std::string job() {
  for (const char* const name : {"PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid"}) {
    if (const char* const value = std::getenv(name)) return value;
  }
  return {};
}

Bootstrap::Bytes to_bytes(const std::string& text) {
  const auto* const bytes = reinterpret_cast<const std::byte*>(text.data());
  return {bytes, bytes + text.size()};
}
std::string to_text(const Bootstrap::Bytes& bytes) {
  return {reinterpret_cast<const char*>(bytes.data()), bytes.size()};
}

// Exchanges "rank job" through the store and returns the group's ranks in MPI_COMM_WORLD. Throws if
// a rank cannot be in one communicator with this one.
std::vector<int> world_ranks(const JoinOptions& options, const World& world, Deadline deadline) {
  options.store->set("mpi/" + std::to_string(options.rank),
                     to_bytes(std::to_string(world.rank()) + " " + job()));
  std::vector<int> ranks;
  std::set<int> seen;
  for (int rank = 0; rank < options.size; ++rank) {
    const auto refuse = [&](const std::string& why) {
      throw Error(Blame::Unsupported, "joining " + place_of(options, "mpi") + ": rank " +
                                          std::to_string(rank) + " " + why);
    };
    const std::string text = to_text(options.store->get("mpi/" + std::to_string(rank), deadline));
    char* end = nullptr;
    const long number = std::strtol(text.c_str(), &end, 10);
    if (end == text.c_str() || *end != ' ' || number < 0 || number >= world.size() ||
        end + 1 != job()) {
      refuse("says '" + text + "', which is not a rank of this mpirun ('" + job() + "', " +
             std::to_string(world.size()) +
             " ranks); start all ranks of the group with one mpirun");
    }
    if (!seen.insert(static_cast<int>(number)).second) {
      refuse("is the process of another rank; MPI takes one rank of a group for each process");
    }
    ranks.push_back(static_cast<int>(number));
  }
  return ranks;
}

// An MPI_Group. Creates and frees it inside turns of its own.
struct Members {
  Members(World& of, const std::vector<int>& ranks) : world(of) {
    const Library& mpi = world.library();
    const auto turn = world.turn();
    MPI_Group all = nullptr;
    check(mpi, mpi.comm_group(mpi.comm_world, &all), "MPI_Comm_group");
    const int included = mpi.group_incl(all, static_cast<int>(ranks.size()), ranks.data(), &native);
    mpi.group_free(&all);
    check(mpi, included, "MPI_Group_incl");
  }
  ~Members() {
    const auto turn = world.turn();
    world.library().group_free(&native);
  }
  Members(const Members&) = delete;
  Members& operator=(const Members&) = delete;

  World& world;
  MPI_Group native = nullptr;
};

}  // namespace

MpiCommunicator::MpiCommunicator(const JoinOptions& options, std::shared_ptr<World> world)
    : world_(std::move(world)),
      rank_(options.rank),
      size_(options.size),
      place_(place_of(options, "mpi")),
      loop_(options.loop),
      requests_(std::make_shared<Requests>(world_, options.loop, place_, options.timeout)),
      collectives_(std::make_shared<FencedQueue>(options.loop)),
      sends_(std::make_shared<FencedQueue>(options.loop)),
      receives_(std::make_shared<FencedQueue>(options.loop)) {
  const Library& mpi = world_->library();
  const Deadline deadline = Deadline::in(options.timeout);
  const std::vector<int> ranks = world_ranks(options, *world_, deadline);
  if (rank_ == 0)
    options.store->set("mpi/tag", to_bytes(std::to_string(world_->next_creation_tag())));
  const std::string tag = to_text(options.store->get("mpi/tag", deadline));
  Members members(*world_, ranks);
  try {
    agree_to_begin(*options.store, rank_, size_, deadline);
  } catch (const Error& error) {
    throw error.within("joining " + place_);
  }
  const auto turn = world_->turn();
  const int created =
      mpi.comm_create_group(mpi.comm_world, members.native, std::atoi(tag.c_str()), &native_);
  check(mpi, created, "MPI_Comm_create_group for joining " + place_);
}

MpiCommunicator::~MpiCommunicator() {
  const bool is_clean = requests_->is_clean();
  requests_->abort(Error(Blame::Cancelled, "the communicator " + place_ + " was destroyed"));
  if (!is_clean) return;  // pending operations still use native_
  const auto turn = world_->turn();
  world_->library().comm_free(&native_);
}

Op MpiCommunicator::issue(FencedQueue& queue, Requests::Call call, Fence ready,
                          std::function<void()> before, Start start) noexcept {
  const Completion completion(call.pin, std::make_shared<LoopFlag>(loop_));
  call.start = [world = world_, native = native_, before = std::move(before),
                start = std::move(start)](MPI_Request* made) {
    if (before) before();
    return start(world->library(), native, made);
  };
  const std::uint64_t key = requests_->expect(completion);
  queue.run(std::move(ready), [requests = requests_, key, call = std::move(call)]() mutable {
    requests->start(key, std::move(call));
  });
  return completion.op();
}

// A call could not allocate its own memory. The other ranks wait in that operation, so this aborts
// the group.
Op MpiCommunicator::failed_here(std::string_view name) noexcept {
  const Error why =
      to_error(std::current_exception(), Blame::Busy).within(std::string(name) + " " + place_);
  requests_->abort(why);
  return Op::failed(why);
}

Op MpiCommunicator::run(const Collective& call, Pin pin, Fence ready) noexcept try {
  switch (call.kind) {
    case CollectiveKind::Broadcast:
      return issue_broadcast(call.input(), call.root, std::move(pin), std::move(ready));
    case CollectiveKind::AllReduce:
      return issue_all_reduce(call.input(), call.op, std::move(pin), std::move(ready));
    case CollectiveKind::Reduce:
      return issue_reduce(call.input(), call.root, call.op, std::move(pin), std::move(ready));
    case CollectiveKind::AllGather:
      return issue_all_gather(call.outputs, call.input(), std::move(pin), std::move(ready));
    case CollectiveKind::Gather:
      return issue_gather(call.outputs, call.input(), call.root, std::move(pin), std::move(ready));
    case CollectiveKind::Scatter:
      return issue_scatter(call.output(), call.inputs, call.root, std::move(pin), std::move(ready));
    case CollectiveKind::ReduceScatter:
      return issue_reduce_scatter(call.output(), call.inputs, call.op, std::move(pin),
                                  std::move(ready));
    case CollectiveKind::AllToAll:
      return issue_all_to_all(call.outputs, call.inputs, call.dtype, std::move(pin),
                              std::move(ready));
    case CollectiveKind::Barrier: break;
  }
  return issue_barrier(std::move(ready));
} catch (...) {
  return failed_here(name(call.kind));
}

// --- Moving data ---

Op MpiCommunicator::issue_broadcast(const Elements& data, int root, Pin pin, Fence ready) {
  if (auto why = why_too_large("broadcast " + place_, data.count())) return Op::failed(*why);
  return issue(
      *collectives_, {.name = "broadcast", .pin = std::move(pin)}, std::move(ready), {},
      [data, root, world = world_](const Library& mpi, MPI_Comm native, MPI_Request* request) {
        const MPI_Datatype type = world->elements(size_of(data.dtype));
        return mpi.ibcast(data.slice.data, static_cast<int>(data.count()), type, root, native,
                          request);
      });
}

Op MpiCommunicator::issue_all_gather(std::span<const Slice> outputs, const Elements& input, Pin pin,
                                     Fence ready) {
  if (auto why = why_too_large("all_gather " + place_, input.count())) return Op::failed(*why);
  const auto held = hold(std::move(pin));
  std::vector<Slice> parts(outputs.begin(), outputs.end());
  void* to = joined(outputs);
  const bool is_scattered = to == nullptr && bytes_of(outputs) > 0;
  if (is_scattered) held->output.resize(bytes_of(outputs));
  if (is_scattered) to = held->output.data();
  const bool in_place =
      !is_scattered && input.slice.data == outputs[static_cast<std::size_t>(rank_)].data;
  Requests::Call call{.name = "all_gather", .pin = held};
  if (is_scattered) call.finish = [held, parts = std::move(parts)] { copy(parts, held->output); };
  return issue(*collectives_, std::move(call), std::move(ready), {},
               [=, world = world_](const Library& mpi, MPI_Comm native, MPI_Request* request) {
                 const MPI_Datatype type = world->elements(size_of(input.dtype));
                 const auto count = static_cast<int>(input.count());
                 return mpi.iallgather(in_place ? MPI_IN_PLACE : input.slice.data, count, type, to,
                                       count, type, native, request);
               });
}

Op MpiCommunicator::issue_gather(std::span<const Slice> outputs, const Elements& input, int root,
                                 Pin pin, Fence ready) {
  if (auto why = why_too_large("gather " + place_, input.count())) return Op::failed(*why);
  const auto held = hold(std::move(pin));
  std::vector<Slice> parts(outputs.begin(), outputs.end());
  void* to = joined(outputs);
  const bool is_scattered = to == nullptr && bytes_of(outputs) > 0;
  if (is_scattered) held->output.resize(bytes_of(outputs));
  if (is_scattered) to = held->output.data();
  const bool in_place = rank_ == root && !is_scattered &&
                        input.slice.data == outputs[static_cast<std::size_t>(rank_)].data;
  Requests::Call call{.name = "gather", .pin = held};
  if (is_scattered) call.finish = [held, parts = std::move(parts)] { copy(parts, held->output); };
  return issue(*collectives_, std::move(call), std::move(ready), {},
               [=, world = world_](const Library& mpi, MPI_Comm native, MPI_Request* request) {
                 const MPI_Datatype type = world->elements(size_of(input.dtype));
                 const auto count = static_cast<int>(input.count());
                 return mpi.igather(in_place ? MPI_IN_PLACE : input.slice.data, count, type, to,
                                    count, type, root, native, request);
               });
}

Op MpiCommunicator::issue_scatter(const Elements& output, std::span<const Slice> inputs, int root,
                                  Pin pin, Fence ready) {
  if (auto why = why_too_large("scatter " + place_, output.count())) return Op::failed(*why);
  const auto held = hold(std::move(pin));
  std::vector<Slice> parts(inputs.begin(), inputs.end());
  const void* from = joined(inputs);
  const bool is_scattered = from == nullptr && bytes_of(inputs) > 0;
  if (is_scattered) held->input.resize(bytes_of(inputs));
  if (is_scattered) from = held->input.data();
  const bool in_place = rank_ == root && !is_scattered &&
                        output.slice.data == inputs[static_cast<std::size_t>(rank_)].data;
  std::function<void()> before;
  if (is_scattered) before = [held, parts = std::move(parts)] { copy(held->input, parts); };
  return issue(*collectives_, {.name = "scatter", .pin = held}, std::move(ready), std::move(before),
               [=, world = world_](const Library& mpi, MPI_Comm native, MPI_Request* request) {
                 const MPI_Datatype type = world->elements(size_of(output.dtype));
                 const auto count = static_cast<int>(output.count());
                 return mpi.iscatter(from, count, type, in_place ? MPI_IN_PLACE : output.slice.data,
                                     count, type, root, native, request);
               });
}

Op MpiCommunicator::issue_all_to_all(std::span<const Slice> outputs, std::span<const Slice> inputs,
                                     Dtype dtype, Pin pin, Fence ready) {
  const std::size_t each = size_of(dtype);
  for (const auto& slices : {outputs, inputs}) {
    if (auto why = why_too_large("all_to_all " + place_, bytes_of(slices) / each))
      return Op::failed(*why);
  }
  const auto held = hold(std::move(pin));
  int which = 0;
  for (const auto& slices : {inputs, outputs}) {
    int place = 0;
    for (const Slice& slice : slices) {
      held->counts[which].push_back(static_cast<int>(slice.bytes / each));
      held->places[which].push_back(place);
      place += held->counts[which].back();
    }
    ++which;
  }
  const void* from = joined(inputs);
  void* to = joined(outputs);
  std::vector<Slice> to_copy, from_copy;
  if (from == nullptr && bytes_of(inputs) > 0) {
    from_copy.assign(inputs.begin(), inputs.end());
    held->input.resize(bytes_of(inputs));
    from = held->input.data();
  }
  if (to == nullptr && bytes_of(outputs) > 0) {
    to_copy.assign(outputs.begin(), outputs.end());
    held->output.resize(bytes_of(outputs));
    to = held->output.data();
  }
  Requests::Call call{.name = "all_to_all", .pin = held};
  call.finish = [held, parts = std::move(to_copy)] { copy(parts, held->output); };
  const auto before = [held, parts = std::move(from_copy)] { copy(held->input, parts); };
  return issue(*collectives_, std::move(call), std::move(ready), before,
               [=, world = world_](const Library& mpi, MPI_Comm native, MPI_Request* request) {
                 const MPI_Datatype type = world->elements(size_of(dtype));
                 return mpi.ialltoallv(from, held->counts[0].data(), held->places[0].data(), type,
                                       to, held->counts[1].data(), held->places[1].data(), type,
                                       native, request);
               });
}

Op MpiCommunicator::issue_barrier(Fence ready) {
  return issue(*collectives_, {.name = "barrier", .is_barrier = true}, std::move(ready), {},
               [](const Library& mpi, MPI_Comm native, MPI_Request* request) {
                 return mpi.ibarrier(native, request);
               });
}

// --- Reducing ---

Op MpiCommunicator::issue_all_reduce(const Elements& data, ReduceOp op, Pin pin, Fence ready) {
  if (auto why = why_refused("all_reduce", data.dtype, op, data.count())) return Op::failed(*why);
  const Arithmetic arithmetic(data.dtype, op, size_);
  const auto held = hold(std::move(pin));
  Slice sent = data.slice;
  std::function<void()> before;
  if (arithmetic.is_wide) {
    held->input.resize(arithmetic.sent_bytes(data.slice.bytes));
    sent = {held->input.data(), held->input.size(), Device::host()};
    before = [=] { arithmetic.widen({&data.slice, 1}, held->input); };
  }
  Requests::Call call{.name = "all_reduce", .pin = held};
  call.finish = [=, held = held] { arithmetic.finish(sent, data.slice); };
  return issue(*collectives_, std::move(call), std::move(ready), std::move(before),
               [=, world = world_](const Library& mpi, MPI_Comm native, MPI_Request* request) {
                 return mpi.iallreduce(MPI_IN_PLACE, sent.data, static_cast<int>(data.count()),
                                       world->elements(size_of(arithmetic.sent())),
                                       world->operation(arithmetic.sent(), arithmetic.summed),
                                       native, request);
               });
}

Op MpiCommunicator::issue_reduce(const Elements& data, int root, ReduceOp op, Pin pin,
                                 Fence ready) {
  if (auto why = why_refused("reduce", data.dtype, op, data.count())) return Op::failed(*why);
  const Arithmetic arithmetic(data.dtype, op, size_);
  const auto held = hold(std::move(pin));
  const bool is_root = rank_ == root;
  Slice sent = data.slice;
  std::function<void()> before;
  if (arithmetic.is_wide) {
    held->input.resize(arithmetic.sent_bytes(data.slice.bytes));
    sent = {held->input.data(), held->input.size(), Device::host()};
    before = [=] { arithmetic.widen({&data.slice, 1}, held->input); };
  }
  Requests::Call call{.name = "reduce", .pin = held};
  if (is_root) call.finish = [=, held = held] { arithmetic.finish(sent, data.slice); };
  return issue(*collectives_, std::move(call), std::move(ready), std::move(before),
               [=, world = world_](const Library& mpi, MPI_Comm native, MPI_Request* request) {
                 return mpi.ireduce(
                     is_root ? MPI_IN_PLACE : sent.data, is_root ? sent.data : nullptr,
                     static_cast<int>(data.count()), world->elements(size_of(arithmetic.sent())),
                     world->operation(arithmetic.sent(), arithmetic.summed), root, native, request);
               });
}

Op MpiCommunicator::issue_reduce_scatter(const Elements& output, std::span<const Slice> inputs,
                                         ReduceOp op, Pin pin, Fence ready) {
  const std::size_t bytes = bytes_of(inputs);
  if (auto why = why_refused("reduce_scatter", output.dtype, op, bytes / size_of(output.dtype)))
    return Op::failed(*why);
  const Arithmetic arithmetic(output.dtype, op, size_);
  const auto held = hold(std::move(pin));
  for (const Slice& input : inputs)
    held->counts[0].push_back(static_cast<int>(input.bytes / size_of(output.dtype)));
  const void* from = joined(inputs);
  std::function<void()> before;
  // The inputs are only read, and the output may be one of them.
  std::vector<Slice> parts(inputs.begin(), inputs.end());
  const bool overlaps = std::any_of(parts.begin(), parts.end(),
                                    [&](const Slice& in) { return in.data == output.slice.data; });
  if (bytes > 0 && (arithmetic.is_wide || from == nullptr || overlaps)) {
    held->input.resize(arithmetic.sent_bytes(bytes));
    from = held->input.data();
    before = [=, parts = std::move(parts)] { arithmetic.widen(parts, held->input); };
  }
  Slice to = output.slice;
  if (arithmetic.is_wide) {
    held->output.resize(arithmetic.sent_bytes(output.slice.bytes));
    to = {held->output.data(), held->output.size(), Device::host()};
  }
  Requests::Call call{.name = "reduce_scatter", .pin = held};
  call.finish = [=, held = held] { arithmetic.finish(to, output.slice); };
  return issue(*collectives_, std::move(call), std::move(ready), std::move(before),
               [=, world = world_](const Library& mpi, MPI_Comm native, MPI_Request* request) {
                 return mpi.ireduce_scatter(from, to.data, held->counts[0].data(),
                                            world->elements(size_of(arithmetic.sent())),
                                            world->operation(arithmetic.sent(), arithmetic.summed),
                                            native, request);
               });
}

std::optional<Error> MpiCommunicator::why_refused(const char* what, Dtype dtype, ReduceOp op,
                                                  std::size_t elements) const {
  if (can_reduce(dtype, op)) return why_too_large(std::string(what) + " " + place_, elements);
  return Error(Blame::Unsupported, std::string(what) + " " + place_ + ": no " +
                                       std::string(name(op)) + " of " + std::string(name(dtype)));
}

// --- Messages ---

std::optional<Error> MpiCommunicator::why_refused(const std::string& what, const Elements& data,
                                                  int tag) const {
  if (auto why = why_too_large(what + " " + place_, data.count())) return why;
  if (tag <= world_->largest_tag()) return std::nullopt;
  return Error(Blame::Unsupported, what + " " + place_ + ": tag " + std::to_string(tag) +
                                       ", but this MPI's largest tag is " +
                                       std::to_string(world_->largest_tag()));
}

Op MpiCommunicator::send(const Elements& data, int to, int tag, Pin pin, Fence ready) noexcept try {
  const std::string what = "send to rank " + std::to_string(to);
  if (auto why = why_refused(what, data, tag)) return Op::failed(*why);
  return issue(*sends_, {.name = what, .pin = std::move(pin)}, std::move(ready), {},
               [=, world = world_](const Library& mpi, MPI_Comm native, MPI_Request* request) {
                 const MPI_Datatype type = world->elements(size_of(data.dtype));
                 return mpi.isend(data.slice.data, static_cast<int>(data.count()), type, to, tag,
                                  native, request);
               });
} catch (...) {
  return failed_here("send");
}

Op MpiCommunicator::recv(const Elements& data, int from, int tag, Pin pin, Fence ready) noexcept
    try {
  const std::string what =
      "recv from " + (from == kAnySource ? "any rank" : "rank " + std::to_string(from));
  if (auto why = why_refused(what, data, tag)) return Op::failed(*why);
  return issue(*receives_, {.name = what, .pin = std::move(pin), .receives = data.slice.bytes},
               std::move(ready), {},
               [=, world = world_](const Library& mpi, MPI_Comm native, MPI_Request* request) {
                 const MPI_Datatype type = world->elements(size_of(data.dtype));
                 return mpi.irecv(data.slice.data, static_cast<int>(data.count()), type,
                                  from == kAnySource ? MPI_ANY_SOURCE : from, tag, native, request);
               });
} catch (...) {
  return failed_here("recv");
}

}  // namespace weft::transport::mpi
