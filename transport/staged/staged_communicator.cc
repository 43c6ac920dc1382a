// SPDX-License-Identifier: Apache-2.0
#include <utility>
#include <vector>

#include <weft/base/make_error.h>
#include <weft/cuda/fence.h>
#include <weft/cuda/flag_pool.h>
#include <weft/cuda/memory.h>
#include <weft/cuda/pinned.h>
#include <weft/cuda/retire.h>
#include <weft/profiling/trace/trace.h>
#include <weft/transport/fenced_queue.h>
#include <weft/transport/in_flight.h>
#include <weft/transport/staged/staged_communicator.h>
#include <weft/transport/staged/staging.h>

namespace weft::transport::staged {

namespace {

constinit trace::Name staging{trace::Layer::Transport, "stage"};

constexpr auto kSetUp = std::chrono::seconds(60);

// A slice of an operation and the directions in which it is copied.
struct StagedSlice {
  Slice device;
  bool to_host = false;
  bool to_device = false;
};

// Memory that must stay until the copies are done: the user's, and its counterpart on the host, one
// piece for each part.
struct Held {
  Pin user;
  cuda::PinnedMemory block;
  std::vector<Slice> pieces;
};

void make(const std::vector<Copy>& copies, const cuda::StreamRef& stream, int rank) {
  cuda::Span shown = show(stream, copies, rank);
  for (const Copy& copy : copies) cuda::copy(stream, copy.to, copy.from);
  shown.end(stream);
}

// The host's half of an operation. Ending it raises the flag for which a stream waits. If the last
// reference is dropped before that (the loop has ended), the operation fails.
class Delivery {
 public:
  enum class Then { CopyBack, Nothing };  // the step after the host's half

  Delivery(std::string name, Completion completion, std::shared_ptr<HostFlag> landed, Then then)
      : name_(std::move(name)),
        completion_(std::move(completion)),
        landed_(std::move(landed)),
        then_(then) {}
  ~Delivery() {
    if (!over_) fail(Error(Blame::Cancelled, name_ + ": the group was destroyed"));
  }
  Delivery(const Delivery&) = delete;
  Delivery& operator=(const Delivery&) = delete;

  void fail(const Error& why) noexcept {
    completion_.fail(why);
    land();
  }
  // Called when the host has done its half.
  void land() noexcept {
    over_ = true;
    if (then_ == Then::Nothing) completion_.finish();
    landed_->raise();
  }
  // Called when another owner will finish the operation.
  void hand_over() noexcept { over_ = true; }
  Completion& completion() { return completion_; }

 private:
  std::string name_;
  Completion completion_;
  std::shared_ptr<HostFlag> landed_;
  Then then_;
  bool over_ = false;
};

class StagedCommunicator final : public Communicator,
                                 public PointToPoint,
                                 public std::enable_shared_from_this<StagedCommunicator> {
 public:
  StagedCommunicator(std::shared_ptr<Communicator> host, std::shared_ptr<cuda::Device> device,
                     const std::shared_ptr<EventLoop>& loop)
      : host_(std::move(host)),
        messages_(host_->point_to_point()),
        device_(std::move(device)),
        loop_(loop),
        pinned_(*device_),
        flags_(*device_),
        collectives_(std::make_shared<FencedQueue>(loop)),
        sends_(std::make_shared<FencedQueue>(loop)),
        in_flight_(device_, loop),
        copying_(device_, loop),
        received_(device_, loop) {
    warm_up();
  }
  ~StagedCommunicator() override {
    // The loop keeps this object alive while operations are under way. So here the loop has ended,
    // and streams still wait for the host's half.
    if (!in_flight_.passed()) host_->abort(Error(Blame::Cancelled, "the group was destroyed"));
  }

  std::string_view backend() const override { return host_->backend(); }
  std::string transport(int peer) const override { return host_->transport(peer); }
  int rank() const override { return host_->rank(); }
  int size() const override { return host_->size(); }
  bool can_reduce(Dtype dtype, ReduceOp op) const override { return host_->can_reduce(dtype, op); }
  bool compares_calls() const override { return host_->compares_calls(); }
  bool is_broken() const noexcept override { return host_->is_broken(); }
  PointToPoint* point_to_point() override { return messages_ != nullptr ? this : nullptr; }
  std::vector<Unreceived> unreceived() override { return messages_->unreceived(); }

  Op run(const Collective& collective, Pin pin, Fence ready) noexcept override;

  void abort(const Error& why) noexcept override {
    host_->abort(why);
    in_flight_.fail(why);
    received_.fail(why);
  }

  bool has_tags() const override { return messages_->has_tags(); }
  bool has_any_source() const override { return messages_->has_any_source(); }
  Op send(const Elements& data, int to, int tag, Pin pin, Fence ready) noexcept override;
  Op recv(const Elements& data, int from, int tag, Pin pin, Fence ready) noexcept override;

 private:
  using HostCall = std::function<Op(Communicator& host, std::span<const Slice> pieces, Pin held)>;

  void warm_up();
  // `call` receives the parts' pieces on the host, in the order of `parts`.
  Op collective(std::string name, std::vector<StagedSlice> parts, Pin pin, Fence ready,
                HostCall call) noexcept;
  std::shared_ptr<Held> hold(const std::vector<StagedSlice>& parts, Pin pin);
  // Starts the host's half, on the loop or, if its inputs are already there, on the caller's
  // thread.
  void begin(const std::shared_ptr<Held>& held, const std::shared_ptr<Delivery>& delivery,
             const HostCall& call) noexcept;
  void land(const std::shared_ptr<Held>& held, const std::shared_ptr<Delivery>& delivery,
            const Slice& to, const Fence& ready, const std::string& name) noexcept;
  // A launch of the graph would copy to the host but send nothing.
  Op refuse_capture(const std::string& name) const noexcept {
    return Op::failed(
        Error(Blame::Unsupported,
              name + ": backend '" + std::string(backend()) +
                  "' works on the host and cannot be captured into a CUDA graph; make the "
                  "group with backend 'nccl'"));
  }
  // Ends the group, because the other ranks will not receive this operation.
  Op give_up(const std::string& name, const std::shared_ptr<Held>& held,
             const cuda::StreamRef& stream) noexcept;
  void outlive(const std::shared_ptr<Held>& held, const cuda::StreamRef& stream) noexcept;

  std::shared_ptr<Communicator> host_;
  PointToPoint* messages_;
  std::shared_ptr<cuda::Device> device_;
  const std::weak_ptr<EventLoop> loop_;
  // High priority, so that they share no hardware queue with streams that wait for this
  // communicator. Sends and receives have their own streams: one that waits for a peer must not
  // delay collectives.
  cuda::Stream out_{*device_, cuda::Priority::High};
  cuda::Stream in_{*device_, cuda::Priority::High};
  cuda::Stream sending_{*device_, cuda::Priority::High};
  cuda::Stream receiving_{*device_, cuda::Priority::High};
  cuda::PinnedPool pinned_;
  cuda::FlagPool flags_;
  std::shared_ptr<FencedQueue> collectives_;
  std::shared_ptr<FencedQueue> sends_;
  InFlight in_flight_;  // collectives
  InFlight copying_;    // sends
  InFlight received_;
};

// The driver loads its own kernels at their first use, and the pools allocate their first slab.
void StagedCommunicator::warm_up() {
  constexpr std::size_t kBytes = 64;
  const cuda::PinnedMemory host = pinned_.allocate(kBytes);
  const cuda::DeviceMemory memory(out_, kBytes);
  cuda::fill(out_, memory.slice(), 0);
  cuda::copy(out_, host.slice(), memory.slice());
  cuda::copy(out_, memory.slice(), host.slice());
  const bool in_time = flags_.signal(out_).synchronize(Deadline::in(kSetUp));
  if (const auto lost = device_->lost()) throw *lost;
  if (!in_time)
    throw Error(Blame::Timeout,
                "staging on " + describe(device_->id()) + ": the first copy did not end");
}

Op StagedCommunicator::run(const Collective& collective, Pin pin, Fence ready) noexcept {
  std::vector<StagedSlice> parts;
  if (is_in_place(collective.kind)) {
    const bool is_root = rank() == collective.root;
    const bool reads = collective.kind != CollectiveKind::Broadcast || is_root;
    const bool writes = collective.kind == CollectiveKind::AllReduce ||
                        is_root == (collective.kind == CollectiveKind::Reduce);
    parts.push_back({collective.inputs.front(), reads, writes});
  } else {
    for (const Slice& output : collective.outputs) parts.push_back({output, false, true});
    for (const Slice& input : collective.inputs) parts.push_back({input, true, false});
  }
  // The slices are the caller's, and those of the pieces take their place.
  Collective on_host = collective;
  on_host.inputs = on_host.outputs = {};
  const auto call = [on_host, outputs = collective.outputs.size()](
                        Communicator& host, std::span<const Slice> pieces, Pin held) mutable {
    const bool in_place = is_in_place(on_host.kind);
    on_host.outputs = in_place ? pieces : pieces.first(outputs);
    on_host.inputs = in_place ? pieces : pieces.subspan(outputs);
    return host.run(on_host, std::move(held), Fence());
  };
  return this->collective(std::string(name(collective.kind)), std::move(parts), std::move(pin),
                          std::move(ready), call);
}

std::shared_ptr<Held> StagedCommunicator::hold(const std::vector<StagedSlice>& parts, Pin pin) {
  std::size_t bytes = 0;
  for (const StagedSlice& part : parts) bytes += part.device.bytes;
  auto held = std::make_shared<Held>();
  held->user = std::move(pin);
  held->block = pinned_.allocate(bytes);
  std::size_t offset = 0;
  for (const StagedSlice& part : parts) {
    held->pieces.push_back(held->block.slice().part(offset, part.device.bytes));
    offset += part.device.bytes;
  }
  return held;
}

Op StagedCommunicator::collective(std::string name, std::vector<StagedSlice> parts, Pin pin,
                                  Fence ready, HostCall call) noexcept {
  trace::Range range(staging, {.rank = rank(), .ranks = size(), .device = device_->index()});
  if (cuda::is_captured(ready)) return refuse_capture(name);
  std::shared_ptr<Held> held;
  std::shared_ptr<cuda::MappedFlag> landed;
  try {
    if (const auto lost = device_->lost()) throw *lost;
    held = hold(parts, std::move(pin));
    ready.wait(out_);
    std::vector<Copy> to_host, to_device;
    for (std::size_t i = 0; i < parts.size(); ++i) {
      if (parts[i].to_host) to_host.push_back({held->pieces[i], parts[i].device});
      if (parts[i].to_device) to_device.push_back({parts[i].device, held->pieces[i]});
    }
    make(to_host, out_, rank());
    const Fence copied = flags_.signal(out_);
    cuda::record(out_).wait(in_);  // the driver does not know the order that the flag imposes
    landed = flags_.make();
    landed->wait(in_);
    make(to_device, in_, rank());
    const Fence done = cuda::record(in_);
    const Completion completion(held, done);
    auto delivery = std::make_shared<Delivery>(name, completion, landed, Delivery::Then::CopyBack);
    in_flight_.add({std::move(name), completion, held, std::move(ready), done}, shared_from_this());
    collectives_->run(copied, [weak = weak_from_this(), held, delivery = std::move(delivery),
                               call = std::move(call)] {
      if (const auto self = weak.lock()) self->begin(held, delivery, call);
    });
    return completion.op();
  } catch (...) {
    const Op op = give_up(name, held, out_);
    if (landed) {
      landed->raise();
      outlive(held, in_);
    }
    return op;
  }
}

void StagedCommunicator::begin(const std::shared_ptr<Held>& held,
                               const std::shared_ptr<Delivery>& delivery,
                               const HostCall& call) noexcept {
  // The fence of a lost device passes although nothing was copied.
  if (const auto lost = device_->lost()) {
    host_->abort(*lost);
    return delivery->fail(*lost);
  }
  const Op op = call(*host_, held->pieces, held);
  op.on_ended([op, delivery] {
    if (const auto error = op.error()) return delivery->fail(*error);
    delivery->land();
  });
}

Op StagedCommunicator::send(const Elements& data, int to, int tag, Pin pin, Fence ready) noexcept {
  trace::Range range(
      staging,
      {.bytes = data.slice.bytes, .rank = rank(), .ranks = size(), .device = device_->index()});
  const std::string name = "send to rank " + std::to_string(to);
  if (cuda::is_captured(ready)) return refuse_capture(name);
  std::shared_ptr<Held> held;
  try {
    if (const auto lost = device_->lost()) throw *lost;
    held = hold({{data.slice, true, false}}, std::move(pin));
    ready.wait(sending_);
    make({{held->pieces[0], data.slice}}, sending_, rank());
    const Fence copied = flags_.signal(sending_);
    // The memory stays until the copy is made, even if the message fails before.
    copying_.add({name, Completion(held, copied), held, ready, copied}, shared_from_this());
    const auto sent = flags_.make();
    const Completion completion(held, sent);
    const auto delivery =
        std::make_shared<Delivery>(name, completion, sent, Delivery::Then::Nothing);
    const HostCall call = [to, tag, dtype = data.dtype, messages = messages_](
                              Communicator&, std::span<const Slice> pieces, Pin pinned) {
      return messages->send({pieces[0], dtype}, to, tag, std::move(pinned), Fence());
    };
    sends_->run(copied, [weak = weak_from_this(), held, delivery, call] {
      if (const auto self = weak.lock()) self->begin(held, delivery, call);
    });
    return completion.op();
  } catch (...) {
    return give_up(name, held, sending_);
  }
}

Op StagedCommunicator::recv(const Elements& data, int from, int tag, Pin pin,
                            Fence ready) noexcept {
  trace::Range range(
      staging,
      {.bytes = data.slice.bytes, .rank = rank(), .ranks = size(), .device = device_->index()});
  const std::string name =
      "recv from " + (from == kAnySource ? "any rank" : "rank " + std::to_string(from));
  if (cuda::is_captured(ready)) return refuse_capture(name);
  std::shared_ptr<Held> held;
  try {
    if (const auto lost = device_->lost()) throw *lost;
    held = hold({{data.slice, false, true}}, std::move(pin));
    const auto here = flags_.make();
    const Completion completion(held, here);
    const auto delivery =
        std::make_shared<Delivery>(name, completion, here, Delivery::Then::CopyBack);
    const Op op = messages_->recv({held->pieces[0], data.dtype}, from, tag, held, Fence());
    // Messages arrive in any order, and the fence of one may depend on the landing of another. So
    // the loop waits for `ready`, not receiving_, which all messages share.
    op.on_ended([weak = weak_from_this(), op, held, delivery, to = data.slice, ready, name] {
      delivery->completion().set_source_rank(op.source_rank());
      if (const auto error = op.error()) return delivery->fail(*error);
      const auto self = weak.lock();
      if (!self) return;
      if (ready.query()) return self->land(held, delivery, to, ready, name);
      const auto loop = self->loop_.lock();
      if (!loop) return;
      loop->when(ready, Task([weak, held, delivery, to, ready, name] {
                   if (const auto again = weak.lock()) again->land(held, delivery, to, ready, name);
                 }));
    });
    return completion.op();
  } catch (...) {
    return give_up(name, held, receiving_);
  }
}

// Copies a message that has arrived to its destination. Runs on a thread of the host's
// communicator.
void StagedCommunicator::land(const std::shared_ptr<Held>& held,
                              const std::shared_ptr<Delivery>& delivery, const Slice& to,
                              const Fence& ready, const std::string& name) noexcept {
  const trace::Range range(
      staging, {.bytes = to.bytes, .rank = rank(), .ranks = size(), .device = device_->index()});
  try {
    if (const auto lost = device_->lost()) throw *lost;
    ready.wait(receiving_);
    make({{to, held->pieces[0]}}, receiving_, rank());
    const Fence copied = cuda::record(receiving_);
    received_.add({name, delivery->completion(), held, ready, copied}, shared_from_this());
    delivery->hand_over();
  } catch (...) {
    const Error error = to_error(std::current_exception(), Blame::Device).within(name);
    outlive(held, receiving_);
    delivery->fail(error);
  }
}

Op StagedCommunicator::give_up(const std::string& name, const std::shared_ptr<Held>& held,
                               const cuda::StreamRef& stream) noexcept {
  const Error error =
      to_error(std::current_exception(), Blame::Device).within(name + " through pinned memory");
  host_->abort(error);
  outlive(held, stream);
  return Op::failed(error);
}

// Keeps the memory, because enqueued copies may still use it.
void StagedCommunicator::outlive(const std::shared_ptr<Held>& held,
                                 const cuda::StreamRef& stream) noexcept {
  try {
    if (held) device_->retirement().retire(cuda::record(stream), [held] {});
  } catch (const Error&) {
    // The device is lost or its context has ended, so nothing copies any more.
  }
}

}  // namespace

std::shared_ptr<Communicator> over(std::shared_ptr<Communicator> host,
                                   std::shared_ptr<cuda::Device> device,
                                   std::shared_ptr<EventLoop> loop) {
  return std::make_shared<StagedCommunicator>(std::move(host), std::move(device), loop);
}

}  // namespace weft::transport::staged
