// SPDX-License-Identifier: Apache-2.0
#include <cstring>
#include <system_error>
#include <thread>

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <c10/util/Exception.h>
#include <torch/csrc/distributed/c10d/ProcessGroupGloo.hpp>

#include <weft/base/log.h>
#include <weft/base/make_error.h>
#include <weft/base/mutex.h>
#include <weft/base/shortage.h>
#include <weft/transport/gloo/descriptors.h>
#include <weft/transport/gloo/gloo_communicator.h>
#include <weft/transport/gloo/pending.h>
#include <weft/transport/gloo/sigpipe.h>
#include <weft/transport/gloo/store_adapter.h>

namespace weft::transport::gloo {

namespace {

// True if this thread belongs to Gloo or to Waiters. ProcessGroupGloo's destructor joins those
// threads, so it must not run on one of them.
thread_local bool on_backend_thread = false;

// Time limit for breaking Gloo's connections, which takes milliseconds unless the machine is
// overloaded.
constexpr auto kUntilBroken = std::chrono::seconds(1);

std::optional<at::ScalarType> scalar_type(Dtype dtype) {
  switch (dtype) {
    case Dtype::UInt8: return at::kByte;
    case Dtype::Int8: return at::kChar;
    case Dtype::Int32: return at::kInt;
    case Dtype::Int64: return at::kLong;
    case Dtype::Float16: return at::kHalf;
    case Dtype::Float32: return at::kFloat;
    case Dtype::Float64: return at::kDouble;
    case Dtype::BFloat16: return at::kBFloat16;
    case Dtype::Bool: return at::kBool;
    default: return std::nullopt;
  }
}

// Treats complex numbers as pairs of reals, because a complex sum is the sum of the parts.
Elements as_real(Elements data) {
  if (data.dtype == Dtype::ComplexFloat32) data.dtype = Dtype::Float32;
  if (data.dtype == Dtype::ComplexFloat64) data.dtype = Dtype::Float64;
  return data;
}

at::Tensor typed(const Elements& data) {
  return at::from_blob(data.slice.data, {static_cast<std::int64_t>(data.count())},
                       at::TensorOptions(*scalar_type(data.dtype)));
}

// For operations that only move data, because Gloo does not know all dtypes.
at::Tensor bytes(const Slice& slice) {
  return at::from_blob(slice.data, {static_cast<std::int64_t>(slice.bytes)},
                       at::TensorOptions(at::kByte));
}

std::vector<at::Tensor> bytes(std::span<const Slice> slices) {
  std::vector<at::Tensor> tensors;
  tensors.reserve(slices.size());
  for (const Slice& slice : slices) tensors.push_back(bytes(slice));
  return tensors;
}

// One slice that covers all slices, if they are contiguous.
std::optional<Slice> joined(std::span<const Slice> slices) {
  if (slices.empty()) return std::nullopt;
  Slice whole = slices.front();
  for (const Slice& slice : slices.subspan(1)) {
    if (slice.data != static_cast<std::byte*>(whole.data) + whole.bytes) return std::nullopt;
    whole.bytes += slice.bytes;
  }
  return whole;
}

// Copy scattered parts into one buffer, and back.
void copy_parts(std::byte* to, std::span<const Slice> parts) {
  for (const Slice& part : parts) {
    if (part.bytes > 0) std::memcpy(to, part.data, part.bytes);
    to += part.bytes;
  }
}
void copy_parts(std::span<const Slice> parts, const std::byte* from) {
  for (const Slice& part : parts) {
    if (part.bytes > 0) std::memcpy(part.data, from, part.bytes);
    from += part.bytes;
  }
}

c10d::ReduceOp to_c10d(Dtype dtype, ReduceOp op) {
  // The sum of bools is "any" and their product "all", because 1 + 1 is not a bool.
  const bool is_bool = dtype == Dtype::Bool;
  switch (op) {
    case ReduceOp::Sum:
    case ReduceOp::Avg:
      return is_bool ? c10d::ReduceOp::MAX : c10d::ReduceOp::SUM;  // Avg is divided afterwards
    case ReduceOp::Product: return is_bool ? c10d::ReduceOp::MIN : c10d::ReduceOp::PRODUCT;
    case ReduceOp::Min: return c10d::ReduceOp::MIN;
    case ReduceOp::Max: return c10d::ReduceOp::MAX;
    case ReduceOp::BitAnd: return c10d::ReduceOp::BAND;
    case ReduceOp::BitOr: return c10d::ReduceOp::BOR;
    case ReduceOp::BitXor: return c10d::ReduceOp::BXOR;
  }
  broken("no such ReduceOp");
}

bool is_floating(Dtype dtype) {
  return dtype == Dtype::Float16 || dtype == Dtype::BFloat16 || dtype == Dtype::Float32 ||
         dtype == Dtype::Float64;
}

bool is_complex(Dtype dtype) {
  return dtype == Dtype::ComplexFloat32 || dtype == Dtype::ComplexFloat64;
}

std::function<void()> divide(const Elements& data, ReduceOp op, int ranks) {
  if (op != ReduceOp::Avg) return {};
  return [data, ranks] { typed(data).div_(ranks); };
}

// Checks for free descriptors, because Gloo's thread ends the process if it cannot accept a
// connection.
void require_descriptors_to_join(const JoinOptions& options) {
  // Gloo's pipe, epoll instance and listener, and descriptors that are open for a moment.
  constexpr int kDevice = 6;
  const int others = options.size - 1;
  // The job's connections, which are made at the same time. Rank 0 may host the store, to which
  // each rank makes four.
  const int of_job = options.rank == 0 ? 4 * others : 1;
  require_descriptors(kDevice + others + of_job, "joining " + place_of(options, "gloo"));
}

// Leaves out the stack trace of c10's errors, which does not help a user.
std::string text_of(const std::exception& error) {
  const auto* c10_error = dynamic_cast<const c10::Error*>(&error);
  return c10_error != nullptr ? c10_error->what_without_backtrace() : error.what();
}

// --- Collectives as c10d calls them. `start` begins one once its bytes are ready; `finish` runs
// when it has succeeded. Both own the objects that they use.

struct Steps {
  GlooCommunicator::Start start;
  std::function<void()> finish = {};
};

Steps broadcast(const Elements& data, int root) {
  return {[data, root](c10d::ProcessGroupGloo& group) {
    c10d::BroadcastOptions options;
    options.rootRank = root;
    std::vector<at::Tensor> tensors{bytes(data.slice)};
    return group.broadcast(tensors, options);
  }};
}

Steps all_reduce(const Elements& data, ReduceOp op, int size) {
  const Elements real = as_real(data);
  return {[real, op](c10d::ProcessGroupGloo& group) {
            c10d::AllreduceOptions options;
            options.reduceOp = to_c10d(real.dtype, op);
            std::vector<at::Tensor> tensors{typed(real)};
            return group.allreduce(tensors, options);
          },
          divide(real, op, size)};
}

Steps reduce(const Elements& data, int root, ReduceOp op, int rank, int size) {
  const Elements real = as_real(data);
  const bool is_root = rank == root;
  return {[real, root, op, is_root](c10d::ProcessGroupGloo& group) {
            c10d::ReduceOptions options;
            options.reduceOp = to_c10d(real.dtype, op);
            options.rootRank = root;
            // Gloo reduces in place on every rank, but only root's tensor may change.
            std::vector<at::Tensor> tensors{is_root ? typed(real) : typed(real).clone()};
            return group.reduce(tensors, options);
          },
          is_root ? divide(real, op, size) : nullptr};
}

Steps all_gather(std::vector<Slice> outputs, const Slice& input) {
  return {[outputs = std::move(outputs), input](c10d::ProcessGroupGloo& group) {
    std::vector<std::vector<at::Tensor>> gathered{bytes(outputs)};
    std::vector<at::Tensor> inputs{bytes(input)};
    return group.allgather(gathered, inputs);
  }};
}

Steps gather(std::vector<Slice> outputs, const Slice& input, int root, int rank) {
  return {[outputs = std::move(outputs), input, root,
           is_root = rank == root](c10d::ProcessGroupGloo& group) {
    c10d::GatherOptions options;
    options.rootRank = root;
    std::vector<std::vector<at::Tensor>> gathered;
    if (is_root) gathered.push_back(bytes(outputs));
    std::vector<at::Tensor> inputs{bytes(input)};
    return group.gather(gathered, inputs, options);
  }};
}

Steps scatter(const Slice& output, std::vector<Slice> inputs, int root, int rank) {
  return {[inputs = std::move(inputs), output, root,
           is_root = rank == root](c10d::ProcessGroupGloo& group) {
    c10d::ScatterOptions options;
    options.rootRank = root;
    std::vector<std::vector<at::Tensor>> scattered;
    if (is_root) scattered.push_back(bytes(inputs));
    std::vector<at::Tensor> outputs{bytes(output)};
    return group.scatter(outputs, scattered, options);
  }};
}

Steps reduce_scatter(const Elements& output, std::span<const Slice> inputs, ReduceOp op, int rank,
                     int size) {
  const Elements real = as_real(output);
  // c10d's reduce_scatter also does an all-reduce of a copy, but it does not report when it is
  // done.
  struct Copy {
    std::vector<Slice> parts;
    at::Tensor sum;
  };
  const auto copy = std::make_shared<Copy>(Copy{{inputs.begin(), inputs.end()}, {}});
  const auto start = [copy, dtype = real.dtype, op](c10d::ProcessGroupGloo& group) {
    std::size_t count = 0;
    for (const Slice& part : copy->parts) count += Elements{part, dtype}.count();
    copy->sum =
        at::empty({static_cast<std::int64_t>(count)}, at::TensorOptions(*scalar_type(dtype)));
    copy_parts(static_cast<std::byte*>(copy->sum.data_ptr()), copy->parts);
    c10d::AllreduceOptions options;
    options.reduceOp = to_c10d(dtype, op);
    std::vector<at::Tensor> tensors{copy->sum};
    return group.allreduce(tensors, options);
  };
  const auto finish = [copy, real, rank, then = divide(real, op, size)] {
    const auto* data = static_cast<const std::byte*>(copy->sum.data_ptr());
    for (int part = 0; part < rank; ++part)
      data += copy->parts[static_cast<std::size_t>(part)].bytes;
    if (real.slice.bytes > 0) std::memcpy(real.slice.data, data, real.slice.bytes);
    if (then) then();
  };
  return {start, finish};
}

Steps all_to_all(std::span<const Slice> outputs, std::span<const Slice> inputs) {
  // Gloo takes one buffer for each direction; scattered parts are copied through one.
  struct Flat {
    std::vector<Slice> parts;
    at::Tensor tensor;
    bool is_copy = false;
    std::int64_t total = 0;
    std::vector<std::int64_t> counts;
    void take_memory() {
      if (is_copy) tensor = at::empty({total}, at::TensorOptions(at::kByte));
    }
  };
  const auto flatten = [](std::span<const Slice> slices) {
    Flat flat;
    flat.parts.assign(slices.begin(), slices.end());
    for (const Slice& slice : slices) {
      flat.counts.push_back(static_cast<std::int64_t>(slice.bytes));
      flat.total += flat.counts.back();
    }
    const auto whole = joined(slices);
    flat.is_copy = !whole;
    if (whole) flat.tensor = bytes(*whole);
    return std::make_shared<Flat>(std::move(flat));
  };
  const auto from = flatten(inputs);
  const auto to = flatten(outputs);
  const auto start = [from, to](c10d::ProcessGroupGloo& group) {
    from->take_memory();
    to->take_memory();
    if (from->is_copy) copy_parts(static_cast<std::byte*>(from->tensor.data_ptr()), from->parts);
    return group.alltoall_base(to->tensor, from->tensor, to->counts, from->counts);
  };
  const auto finish = [to] {
    if (to->is_copy) copy_parts(to->parts, static_cast<const std::byte*>(to->tensor.data_ptr()));
  };
  return {start, finish};
}

Steps steps_of(const Collective& collective, int rank, int size) {
  const auto copy_of = [](std::span<const Slice> slices) {
    return std::vector<Slice>(slices.begin(), slices.end());
  };
  const int root = collective.root;
  switch (collective.kind) {
    case CollectiveKind::Broadcast: return broadcast(collective.input(), root);
    case CollectiveKind::AllReduce: return all_reduce(collective.input(), collective.op, size);
    case CollectiveKind::Reduce: return reduce(collective.input(), root, collective.op, rank, size);
    case CollectiveKind::AllGather:
      return all_gather(copy_of(collective.outputs), collective.inputs.front());
    case CollectiveKind::Gather:
      return gather(copy_of(collective.outputs), collective.inputs.front(), root, rank);
    case CollectiveKind::Scatter:
      return scatter(collective.outputs.front(), copy_of(collective.inputs), root, rank);
    case CollectiveKind::ReduceScatter:
      return reduce_scatter(collective.output(), collective.inputs, collective.op, rank, size);
    case CollectiveKind::AllToAll: return all_to_all(collective.outputs, collective.inputs);
    case CollectiveKind::Barrier: break;
  }
  return {[](c10d::ProcessGroupGloo& group) { return group.barrier(); }};
}

}  // namespace

struct GlooCommunicator::Group {
  Mutex mutex;  // c10d's object is not thread-safe
  c10::intrusive_ptr<StoreAdapter> store;
  c10::intrusive_ptr<c10d::ProcessGroupGloo> gloo WEFT_POINTEE_GUARDED_BY(mutex);

  // Frees Gloo's threads from peers that will never answer. c10d offers no such call, but a receive
  // that times out closes every connection of the context and fails all operations that wait for
  // them.
  void break_connections(int rank, int size) {
    constexpr int kTag = 0x7ffffffe;
    std::vector<at::Tensor> nothing{at::empty({1}, at::TensorOptions(at::kByte))};
    for (int peer = 0; peer < size; ++peer) {
      if (peer == rank) continue;
      try {
        c10::intrusive_ptr<c10d::Work> work;
        {
          MutexLock lock(mutex);
          work = gloo->recv(nothing, peer, kTag);
        }
        work->wait(std::chrono::milliseconds(1));
      } catch (const std::exception&) {
        // expected: the connection is closed now, or was before
      }
    }
  }
};

GlooCommunicator::GlooCommunicator(const JoinOptions& options)
    : rank_(options.rank),
      size_(options.size),
      loop_(options.loop),
      pending_(std::make_shared<Pending>(options)),
      group_(std::make_shared<Group>()),
      collectives_(std::make_shared<FencedQueue>(options.loop)),
      messages_(std::make_shared<FencedQueue>(options.loop)),
      waiters_(std::make_shared<Waiters>()) {
  const WithoutSigpipe quiet;  // Gloo's threads, which start here, inherit the mask
  require_descriptors_to_join(options);
  const Descriptors descriptors;
  try {
    auto gloo = c10d::ProcessGroupGloo::Options::create(options.timeout);
    gloo->devices.push_back(
        options.interface_address.empty()
            ? c10d::ProcessGroupGloo::createDefaultDevice()
            : c10d::ProcessGroupGloo::createDeviceForHostname(options.interface_address));
    group_->store = c10::make_intrusive<StoreAdapter>(options.store, options.timeout);
    group_->gloo = c10::make_intrusive<c10d::ProcessGroupGloo>(group_->store, rank_, size_, gloo);
    descriptors.close_on_exec();
  } catch (const Error& error) {
    throw error.within("joining " + pending_->context());
  } catch (const std::exception& error) {
    throw pending_->failure("joining", text_of(error));
  }
}

GlooCommunicator::~GlooCommunicator() {
  if (!pending_->empty()) abort(Error(Blame::Cancelled, "the group was destroyed"));
  const auto store = group_->store;
  const auto ended = std::make_shared<HostFlag>();
  // Never freed if no thread may wait for Gloo.
  struct Rest {
    std::shared_ptr<Group> group;
    std::shared_ptr<Waiters> waiters;
  };
  auto kept = std::make_unique<Rest>();
  kept->group = std::move(group_);
  kept->waiters = std::move(waiters_);
  const auto destroy = [rest = kept.release(), ended] {
    rest->waiters.reset();  // first, because its threads may still use the group
    delete rest;
    ended->raise();
  };
  const bool may_wait = !on_backend_thread && !loop_->inside();
  if (may_wait && !pending_->is_aborted()) {
    destroy();
    return;
  }
  try {
    std::thread(destroy).detach();
  } catch (const std::system_error& error) {
    log::error("cannot start a thread that ends Gloo " + pending_->context() + " (" + error.what() +
               "); " +
               (may_wait ? "this thread waits for it"
                         : "its threads and connections stay until the process ends"));
    if (may_wait) destroy();
  }
  // Gloo forgets sends that its sockets had not taken when their connection broke. Its thread then
  // waits until the group's timeout; this destructor waits only kUntilBroken for it.
  if (may_wait && !ended->synchronize(Deadline::in(kUntilBroken)))
    log::debug("Gloo still waits for a broken connection " + pending_->context() +
               "; a background thread keeps waiting for it");
  store->release();
}

bool GlooCommunicator::can_reduce(Dtype dtype, ReduceOp op) const {
  if (is_complex(dtype)) return op == ReduceOp::Sum || op == ReduceOp::Avg;
  if (!scalar_type(dtype)) return false;
  switch (op) {
    case ReduceOp::Avg: return is_floating(dtype);
    case ReduceOp::BitAnd:
    case ReduceOp::BitOr:
    case ReduceOp::BitXor: return !is_floating(dtype);
    default: return true;
  }
}

Op GlooCommunicator::run(const Collective& collective, Pin pin, Fence ready) noexcept {
  Steps steps = steps_of(collective, rank_, size_);
  return this->collective(std::string(name(collective.kind)), std::move(pin), std::move(ready),
                          std::move(steps.start), std::move(steps.finish));
}

Op GlooCommunicator::send(const Elements& data, int to, int tag, Pin pin, Fence ready) noexcept {
  return message("send to rank " + std::to_string(to), {false, to, tag}, std::move(pin),
                 std::move(ready), [data, to, tag](c10d::ProcessGroupGloo& group) {
                   std::vector<at::Tensor> tensors{bytes(data.slice)};
                   return group.send(tensors, to, tag);
                 });
}

Op GlooCommunicator::recv(const Elements& data, int from, int tag, Pin pin, Fence ready) noexcept {
  const std::string source = from == kAnySource ? "any rank" : "rank " + std::to_string(from);
  return message("recv from " + source, {true, from, tag}, std::move(pin), std::move(ready),
                 [data, from, tag](c10d::ProcessGroupGloo& group) {
                   std::vector<at::Tensor> tensors{bytes(data.slice)};
                   if (from != kAnySource) return group.recv(tensors, from, tag);
                   // Gloo refuses to receive zero bytes from any rank, but a larger buffer can
                   // receive them.
                   if (data.slice.bytes == 0)
                     tensors[0] = at::empty({1}, at::TensorOptions(at::kByte));
                   return group.recvAnysource(tensors, tag);
                 });
}

Op GlooCommunicator::collective(std::string name, Pin pin, Fence ready, Start start,
                                std::function<void()> finish) noexcept {
  const Completion completion(pin);
  const auto key = pending_->add(completion);
  // The callback holds the pin too, because Gloo may still use an operation that abort() has ended.
  auto run = [weak = weak_from_this(), pending = pending_, key, name = std::move(name),
              pin = std::move(pin), start = std::move(start), finish = std::move(finish)] {
    const auto self = weak.lock();
    if (!self || !pending->begin(key)) return pending->fail(key, name, "the group was destroyed");
    try {
      c10::intrusive_ptr<c10d::Work> work;
      {
        MutexLock lock(self->group_->mutex);
        const WithoutSigpipe quiet;
        work = start(*self->group_->gloo);
      }
      // If the work is already done, the callback runs on this thread.
      const auto here = std::this_thread::get_id();
      work->getFuture()->addCallback(
          [pending, key, name, pin, finish, here](c10::ivalue::Future& future) {
            if (std::this_thread::get_id() != here) on_backend_thread = true;
            if (future.hasError())
              return pending->fail(key, name, future.tryRetrieveErrorMessage());
            pending->complete(key, finish);
          });
    } catch (const std::exception& error) {
      pending->fail(key, name, text_of(error));
    }
  };
  collectives_->run(std::move(ready), std::move(run));
  return completion.op();
}

Op GlooCommunicator::message(std::string name, const Waiters::Stream& stream, Pin pin, Fence ready,
                             Start start) noexcept {
  const Completion completion(pin);
  const auto key = pending_->add(completion);
  auto run = [weak = weak_from_this(), pending = pending_, key, name = std::move(name), stream,
              pin = std::move(pin), start = std::move(start)] {
    const auto self = weak.lock();
    if (!self || !pending->begin(key)) return pending->fail(key, name, "the group was destroyed");
    try {
      self->waiters_->run(stream, [&]() -> Task {
        c10::intrusive_ptr<c10d::Work> work;
        {
          MutexLock lock(self->group_->mutex);
          const WithoutSigpipe quiet;
          work = start(*self->group_->gloo);
        }
        const Deadline deadline = Deadline::in(pending->timeout());
        return [pending, key, name, pin, deadline, is_recv = stream.receives,
                work = std::move(work)]() mutable {
          on_backend_thread = true;
          try {
            if (!pending->wait(key, work, deadline)) {
              work.reset();  // once it is destroyed, Gloo does not write any more
              return pending->fail(key, name, "");
            }
            // sourceRank() throws for a send.
            pending->complete_message(key, is_recv ? work->sourceRank() : -1);
          } catch (const std::exception& error) {
            pending->fail(key, name, text_of(error));
          }
        };
      });
    } catch (const Error& error) {
      pending->fail(key, error.within(name + " " + pending->context()));
    } catch (const std::exception& error) {
      pending->fail(key, name, text_of(error));
    }
  };
  messages_->run(std::move(ready), std::move(run));
  return completion.op();
}

// Breaks Gloo's connections, so that Gloo releases the memory of operations that it has begun, and
// fails them only then: after a failure the caller may reuse the memory, so no more bytes may
// arrive in it.
void GlooCommunicator::abort(const Error& why) noexcept {
  if (!pending_->abort(why)) return;
  const auto break_off = [group = group_, pending = pending_, rank = rank_,
                          size = size_](std::chrono::milliseconds patience) {
    group->break_connections(rank, size);
    pending->fail_begun(patience);
  };
  try {
    waiters_->run(Task([break_off] {
      on_backend_thread = true;
      break_off(kUntilBroken);
    }));
  } catch (const Error& error) {
    log::error("aborting " + pending_->context() + ": " + error.text() +
               "; the calling thread breaks its connections");
    const WithoutSigpipe quiet;
    break_off(std::chrono::milliseconds(0));
  }
}

}  // namespace weft::transport::gloo
