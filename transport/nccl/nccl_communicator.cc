// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cstring>
#include <span>
#include <thread>

#include <weft/base/log.h>
#include <weft/base/make_error.h>
#include <weft/base/mutex.h>
#include <weft/cuda/fence.h>
#include <weft/cuda/poll.h>
#include <weft/cuda/retire.h>
#include <weft/profiling/trace/operation.h>
#include <weft/profiling/trace/trace.h>
#include <weft/transport/nccl/calls.h>
#include <weft/transport/nccl/nccl_communicator.h>

namespace weft::transport::nccl {

namespace {

constinit trace::Name enqueuing{trace::Layer::Transport, "nccl enqueue"};

// NCCL enqueues from a thread of its own, which takes tens of microseconds. The caller waits this
// long for it, because an event is then the cheapest fence. If it takes longer, NCCL waits for a
// peer.
constexpr auto kPatience = std::chrono::milliseconds(1);

// Groups of up to this many ranks connect all pairs when they are joined; larger groups connect a
// pair at its first use.
constexpr int kAllPairs = 64;

// How often the loop polls. Streams wait for each other and host threads poll for themselves, so
// the loop only drops pins and runs callbacks, which is not urgent. Polling more often would slow
// down threads that enqueue.
constexpr auto kBetweenLooks = std::chrono::microseconds(50);

constexpr std::size_t kBarrierBytes = sizeof(std::int32_t);

// The first byte of rank 0's value in the store.
enum class Said : std::uint8_t { Failure = 0, Id = 1 };

Bootstrap::Bytes say(Said what, std::span<const std::byte> bytes) {
  Bootstrap::Bytes value(1 + bytes.size());
  value[0] = static_cast<std::byte>(what);
  std::copy(bytes.begin(), bytes.end(), value.begin() + 1);
  return value;
}

// Returns the unique id. Rank 0 makes it and publishes it in the store, or the reason why it
// cannot.
ncclUniqueId meet(const JoinOptions& options, const Library& library, Deadline deadline) {
  constexpr const char* kKey = "nccl_id";
  ncclUniqueId id{};
  if (options.rank == 0) {
    const ncclResult_t made = library.get_unique_id(&id);
    if (made != ncclSuccess) {
      const Error error = error_of(library, made, "ncclGetUniqueId");
      options.store->set(kKey, say(Said::Failure, std::as_bytes(std::span(error.text()))));
      throw error;
    }
    options.store->set(kKey, say(Said::Id, std::as_bytes(std::span(id.internal))));
    return id;
  }
  const auto value = options.store->get(kKey, deadline);
  const auto rest = std::span(value).subspan(std::min<std::size_t>(value.size(), 1));
  if (value.empty() || value.front() != static_cast<std::byte>(Said::Id) ||
      rest.size() != sizeof id) {
    const std::string text(reinterpret_cast<const char*>(rest.data()), rest.size());
    throw Error(Blame::PeerLost, "rank 0 could not start NCCL: " + text);
  }
  std::memcpy(&id, rest.data(), sizeof id);
  return id;
}

std::shared_ptr<Handle> open(const JoinOptions& options,
                             const std::shared_ptr<const Library>& library, Deadline deadline) {
  const auto id = meet(options, *library, deadline);
  return std::make_shared<Handle>(library, options.cuda, id, options.rank, options.size, deadline);
}

std::string unsupported(std::string_view name, Dtype dtype, ReduceOp op) {
  return std::string(name) + ": NCCL cannot reduce " + std::string(weft::name(dtype)) + " with " +
         std::string(weft::name(op));
}

std::size_t bytes_of(std::span<const Slice> slices) {
  std::size_t bytes = 0;
  for (const Slice& slice : slices) bytes += slice.bytes;
  return bytes;
}

// A fence after everything on the communicator's stream; one that has passed if nothing can be
// recorded there any more.
Fence behind(const Handle& handle) noexcept {
  try {
    return cuda::record(handle.stream());
  } catch (const Error&) {
    return {};
  }
}

}  // namespace

// Passes when NCCL has enqueued the operation and the stream has executed it.
class NcclCommunicator::Launch final : public Fence::Source {
 public:
  explicit Launch(std::weak_ptr<NcclCommunicator> owner) : owner_(std::move(owner)) {}

  void arrive(Fence on_stream) {
    MutexLock lock(mutex_);
    on_stream_ = std::move(on_stream);
  }

  // Advances line_ until this operation is enqueued. Returns false if the deadline passes first.
  bool see_through(Deadline deadline) const noexcept {
    return cuda::poll_until([this] { return arrived().has_value(); }, deadline);
  }

  bool query() const noexcept override {
    const auto on_stream = arrived();
    return on_stream && on_stream->query();
  }
  bool synchronize(Deadline deadline) const noexcept override {
    return cuda::poll_until([this] { return query(); }, deadline);
  }
  // Blocks the host until the operation is enqueued; the communicator's timeout bounds that. (If
  // the stream waited for a flag instead, the device would be blocked while NCCL allocates and
  // loads kernels, which may wait for the device.)
  void wait(const cuda::StreamRef& stream) const override {
    static_cast<void>(see_through(Deadline::never()));
    arrived()->wait(stream);
  }
  bool on_passed(Task&) const override { return false; }

 private:
  std::optional<Fence> arrived() const noexcept {
    for (const bool again : {true, false}) {
      {
        MutexLock lock(mutex_);
        if (on_stream_) return on_stream_;
      }
      const auto owner = again ? owner_.lock() : nullptr;
      if (owner) owner->advance();
    }
    return std::nullopt;
  }

  std::weak_ptr<NcclCommunicator> owner_;
  mutable Mutex mutex_;
  std::optional<Fence> on_stream_ WEFT_GUARDED_BY(mutex_);
};

NcclCommunicator::NcclCommunicator(const JoinOptions& options,
                                   std::shared_ptr<const Library> library)
    : rank_(options.rank),
      size_(options.size),
      place_(place_of(options, "nccl")),
      timeout_(options.timeout),
      device_(options.cuda),
      in_flight_(
          options.cuda, options.loop, [this](const InFlight::Oldest& oldest) { watch(oldest); },
          kBetweenLooks) {
  const Deadline deadline = Deadline::in(timeout_);
  try {
    handle_ = open(options, library, deadline);
    warm_up(deadline);
  } catch (...) {
    if (handle_) handle_->abort();
    throw to_error(std::current_exception(), Blame::Device).within("joining " + place_);
  }
}

NcclCommunicator::~NcclCommunicator() {
  // The loop keeps this object alive while operations are pending, so if any are, the loop has
  // ended.
  if (broken_ || (line_.empty() && in_flight_.passed())) return;
  std::shared_ptr<Launch> begun;
  for (Request& request : line_) {
    if (request.started) {
      begun = request.launch;
    } else {
      request.launch->arrive(Fence());
    }
  }
  break_off(std::move(begun));
}

void NcclCommunicator::warm_up(Deadline deadline) {
  const auto ranks = static_cast<std::size_t>(size_);
  scratch_ = cuda::DeviceMemory(handle_->stream(), kBarrierBytes + 2 * ranks);
  const Slice word = scratch_.slice().part(0, kBarrierBytes);
  const Slice out = scratch_.slice().part(kBarrierBytes, ranks);
  const Slice in = scratch_.slice().part(kBarrierBytes + ranks, ranks);
  cuda::fill(handle_->stream(), scratch_.slice(), 0);
  cuda::copy(handle_->stream(), in, out);
  const auto run = [&](const Handle::Call& call) {
    handle_->start(call);
    if (!handle_->settle(deadline))
      throw Error(Blame::Timeout,
                  "NCCL: its ranks met, but its first connections were not made; "
                  "NCCL_SOCKET_IFNAME chooses its network, NCCL_DEBUG=INFO shows what it tries");
  };
  run(nccl::all_reduce(word, *reduction_of(Dtype::Int32, ReduceOp::Sum)));
  if (size_ > 1 && size_ <= kAllPairs) {
    std::vector<Slice> inputs, outputs;
    for (std::size_t peer = 0; peer < ranks; ++peer) {
      inputs.push_back(out.part(peer, 1));
      outputs.push_back(in.part(peer, 1));
    }
    run(nccl::all_to_all(outputs, inputs));
  }
  const Fence done = cuda::record(handle_->stream());
  std::optional<Error> failed;
  const bool in_time = cuda::poll_until(
      [&] { return done.query() || (failed = handle_->async_error()).has_value(); }, deadline);
  if (const auto lost = device_->lost()) throw *lost;
  if (failed) throw *failed;
  if (!in_time) throw Error(Blame::Timeout, "NCCL: the first operation did not end");
}

bool NcclCommunicator::can_reduce(Dtype dtype, ReduceOp op) const {
  constexpr int kFloat8From = 90;  // NCCL's float8 kernels need compute capability 9.0
  const bool is_float8 = dtype == Dtype::Float8E4M3 || dtype == Dtype::Float8E5M2;
  if (is_float8 && device_->properties().compute_capability < kFloat8From) return false;
  return reduction_of(dtype, op).has_value();
}

std::optional<Reduction> NcclCommunicator::reduction_for(Dtype dtype, ReduceOp op) const {
  // The average over one rank equals the sum. NCCL's kernel for that average is wrong for some
  // counts of bf16.
  const bool is_plain = size_ == 1 && op == ReduceOp::Avg && reduction_of(dtype, op);
  return reduction_of(dtype, is_plain ? ReduceOp::Sum : op);
}

Op NcclCommunicator::run(const Collective& collective, Pin pin, Fence ready) noexcept {
  const std::string name(transport::name(collective.kind));
  if (collective.kind == CollectiveKind::Barrier) {
    const Slice word = scratch_.slice().part(0, kBarrierBytes);  // always zero
    return issue(name, 0, std::move(pin), std::move(ready),
                 nccl::all_reduce(word, *reduction_of(Dtype::Int32, ReduceOp::Sum)));
  }
  std::optional<Reduction> reduction;
  std::optional<ReduceOp> op;
  if (reduces(collective.kind)) {
    op = collective.op;
    reduction = reduction_for(collective.dtype, *op);
    if (!reduction)
      return refuse(Blame::Unsupported, unsupported(name, collective.dtype, collective.op));
  }
  const std::size_t bytes = bytes_of(collective.inputs) +
                            (is_in_place(collective.kind) ? 0 : bytes_of(collective.outputs));
  return issue(name, bytes, std::move(pin), std::move(ready),
               nccl::call_of(collective, reduction, rank_), op);
}

Op NcclCommunicator::send(const Elements& data, int to, int tag, Pin pin, Fence ready) noexcept {
  if (tag != 0)
    return refuse(Blame::Unsupported,
                  "send with tag " + std::to_string(tag) + ": NCCL's messages have no tags; use 0");
  if (to == rank_)
    return refuse(Blame::Caller, "send to rank " + std::to_string(to) + ", which is this rank");
  return issue("send to rank " + std::to_string(to), data.slice.bytes, std::move(pin),
               std::move(ready), nccl::send(data.slice, to));
}

Op NcclCommunicator::recv(const Elements& data, int from, int tag, Pin pin, Fence ready) noexcept {
  if (from == kAnySource)
    return refuse(Blame::Unsupported,
                  "recv from any rank: NCCL must know the sender; give its rank");
  if (tag != 0)
    return refuse(Blame::Unsupported,
                  "recv with tag " + std::to_string(tag) + ": NCCL's messages have no tags; use 0");
  if (from == rank_)
    return refuse(Blame::Caller, "recv from rank " + std::to_string(from) + ", which is this rank");
  return issue("recv from rank " + std::to_string(from), data.slice.bytes, std::move(pin),
               std::move(ready), nccl::recv(data.slice, from));
}

Op NcclCommunicator::issue(std::string name, std::size_t bytes, Pin pin, Fence ready,
                           Handle::Call call, std::optional<ReduceOp> reduction) noexcept {
  trace::Range range(enqueuing,
                     {.bytes = bytes,
                      .reduction = reduction ? weft::name(*reduction).data() : "",  // a literal
                      .rank = rank_,
                      .ranks = size_,
                      .device = device_->index()});
  UniqueLock lock(mutex_);
  if (broken_) return Op::failed(broken_->within(name));
  const auto launch = std::make_shared<Launch>(weak_from_this());
  Request request{name, std::move(call), ready, launch, bytes, trace::Arrow::leave()};
  std::optional<std::string> captured;  // the operation's name, if captured
  if (cuda::is_captured(ready)) captured = name;
  const bool is_first = line_.empty();
  Fence done(request.launch);
  std::optional<Error> failed;
  try {
    if (const auto lost = device_->lost()) throw *lost;
    const cuda::DeviceGuard guard(*device_);  // once for all calls below
    if (is_first) {
      request.started = true;
      start(request);
      if (handle_->settle(Deadline::in(kPatience))) done = end_of(request);
    }
  } catch (...) {
    failed = to_error(std::current_exception(), Blame::Device).within(name + " " + place_);
  }
  // A failed operation also stays in flight until NCCL has released its memory. An operation on the
  // stream does not wait in line_.
  const bool in_line = done.source() == launch;
  Completion completion(pin, done);
  // The fence of a captured operation passes at the end of the capture, not in stream order.
  const bool is_behind = !in_line && !cuda::is_captured(done);
  in_flight_.add(
      {std::move(name), completion, std::move(pin), std::move(ready), done, in_line, is_behind},
      shared_from_this());
  if (in_line) line_.push_back(std::move(request));
  if (failed) {
    fail(std::move(lock), *failed);
  } else if (in_line && captured) {
    lock.unlock();
    see_through_capture(*launch, *captured);
  }
  return completion.op();
}

// Waits until a captured operation is enqueued: the capturing thread may end the capture at any
// time, and an operation still in line_ would be missing in the graph.
void NcclCommunicator::see_through_capture(const Launch& launch, const std::string& name) noexcept {
  if (launch.see_through(Deadline::in(timeout_))) return;
  abort(Error(Blame::Timeout, name + " " + place_ + ": NCCL did not enqueue it within " +
                                  describe(timeout_) + " while its stream was captured"));
}

Op NcclCommunicator::refuse(Blame blame, const std::string& text) const noexcept {
  return Op::failed(Error(blame, text + " " + place_));
}

void NcclCommunicator::start(Request& request) {
  request.ready.wait(handle_->stream());
  if (trace::timeline::on()) {
    request.span = cuda::Span::begin(handle_->stream(), trace::keep(request.name),
                                     trace::Layer::Transport, request.bytes, rank_, request.issued);
  }
  handle_->start(request.call);
}

Fence NcclCommunicator::end_of(Request& request) {
  request.span.end(handle_->stream());
  return cuda::record(handle_->stream());
}

void NcclCommunicator::advance() noexcept {
  UniqueLock lock(mutex_);
  std::string name;
  try {
    while (!line_.empty()) {
      Request& front = line_.front();
      name = front.name;
      if (!front.started) {
        front.started = true;
        start(front);
      }
      if (!handle_->settled()) return;
      front.launch->arrive(end_of(front));
      line_.pop_front();
    }
  } catch (...) {
    fail(std::move(lock),
         to_error(std::current_exception(), Blame::Device).within(name + " " + place_));
  }
}

void NcclCommunicator::watch(const InFlight::Oldest& oldest) noexcept {
  if (const auto lost = device_->lost()) return abort(lost->within(oldest.name + " " + place_));
  if (const auto error = handle_->async_error())
    return abort(error->within(oldest.name + " " + place_));
  if (Deadline::Clock::now() - oldest.since < timeout_) return;
  abort(Error(Blame::Timeout, oldest.name + " " + place_ + ": not all ranks took part within " +
                                  describe(timeout_)));
}

void NcclCommunicator::abort(const Error& why) noexcept {
  UniqueLock lock(mutex_);
  fail(std::move(lock), why);
}

void NcclCommunicator::fail(std::unique_lock<std::mutex> lock, const Error& why) noexcept {
  if (broken_) return;
  broken_ = why;
  std::shared_ptr<Launch> begun;
  for (Request& request : line_) {
    if (request.started) {
      begun = request.launch;
    } else {
      request.launch->arrive(Fence());
    }
  }
  line_.clear();
  lock.unlock();
  in_flight_.fail(why);
  break_off(std::move(begun));
}

void NcclCommunicator::break_off(std::shared_ptr<Launch> begun) noexcept {
  // A thread that reclaims waits until the abort has ended.
  const auto ended = std::make_shared<HostFlag>();
  device_->retirement().retire(Fence(ended), [] {});
  auto stop = [handle = handle_, begun = std::move(begun), ended]() mutable {
    handle->abort();
    if (begun) begun->arrive(behind(*handle));
    handle.reset();
    ended->raise();
  };
  try {
    std::thread(stop).detach();
  } catch (const std::exception& error) {
    log::error(std::string("cannot start a thread that aborts an NCCL communicator: ") +
               error.what());
    stop();
  }
}

}  // namespace weft::transport::nccl
