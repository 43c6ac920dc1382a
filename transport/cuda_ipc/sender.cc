#include <algorithm>
#include <utility>

#include <weft/base/loop_flag.h>
#include <weft/transport/cuda_ipc/sender.h>
#include <weft/transport/frame.h>

namespace weft::transport::cuda_ipc {

using staged::Landing;

Sender::Source::Source(std::shared_ptr<cuda::Device> on, const std::shared_ptr<EventLoop>& loop)
    : device(std::move(on)), stream(*device, cuda::Priority::High), values(kSlots), in_flight(device, loop) {
  for (std::size_t slot = 0; slot < kSlots; ++slot) {
    events.emplace_back(*device);
    free.push_back(slot);
  }
}

Sender::Sender(std::shared_ptr<Connection> below, std::shared_ptr<staged::Stage> stage, const Capabilities& limits,
               const std::shared_ptr<EventLoop>& loop)
    : peer_(below->peer()),
      stage_(std::move(stage)),
      limits_(limits),
      loop_(loop),
      loop_address_(loop.get()),
      below_(std::move(below)) {
  for (const auto& device : stage_->devices()) sources_.push_back(std::make_unique<Source>(device, loop));
}

std::vector<Gpu> Sender::gpus() const {
  std::vector<Gpu> gpus;
  for (const auto& source : sources_) {
    Gpu& gpu = gpus.emplace_back();
    gpu.uuid = cuda::uuid_of(*source->device);
    for (const cuda::SharedEvent& event : source->events) gpu.events.push_back(event.handle());
  }
  return gpus;
}

// --- from the caller --------------------------------------------------------------------------------------------------

std::optional<Error> Sender::why_refused(Bytes header, std::span<const Slice> payloads) const {
  const auto wrong = [&](const std::string& text) { return Error(Blame::Caller, name() + ": " + text); };
  if (auto limit = frame::why_too_large(header.size(), payloads.size(), frame::total_of(payloads), limits_)) {
    return wrong(*limit);
  }
  for (std::size_t i = 0; i < payloads.size(); ++i) {
    if (const auto why = stage_->why_not(payloads[i])) return wrong("payload " + std::to_string(i) + " is " + *why);
  }
  return std::nullopt;
}

Op Sender::send(Bytes header, std::span<const Slice> payloads, Pin pin, Fence ready) noexcept {
  if (auto wrong = why_refused(header, payloads)) return Op::failed(std::move(*wrong));
  const bool is_host =
      std::all_of(payloads.begin(), payloads.end(), [](const Slice& slice) { return slice.device.is_host(); });
  std::vector<std::pair<std::shared_ptr<Landing>, Error>> failed;
  Op op;
  {
    std::lock_guard lock(mutex_);
    if (failure_) return Op::failed(*failure_);
    if (is_host && is_met_ && line_.empty()) {
      return below_->send(encode_plain(header), payloads, std::move(pin), std::move(ready));
    }
    if (line_.size() >= limits_.max_queued) {
      return Op::failed(Error(Blame::Busy, name() + ": " + std::to_string(limits_.max_queued) +
                                               " messages wait already (max_queued); send again when some are done"));
    }
    Item item;
    item.header.assign(header.begin(), header.end());
    item.payloads.assign(payloads.begin(), payloads.end());
    item.pin = pin;
    item.ready = std::move(ready);
    // A stream can wait for what concerns its device's memory.
    auto flag = is_host ? std::static_pointer_cast<HostFlag>(std::make_shared<LoopFlag>(loop_)) : stage_->flags().make();
    item.landing = std::make_shared<Landing>(staged::ending_of(Completion(std::move(pin), std::move(flag)), name()));
    op = item.landing->op();
    line_.push_back(std::move(item));
    pump(failed);
  }
  for (const auto& [landing, error] : failed) landing->fail(error);
  return op;
}

void Sender::meet(std::shared_ptr<Process> peer, std::uint32_t reached, std::string why_not) {
  {
    std::lock_guard lock(mutex_);
    is_met_ = true;
    process_ = std::move(peer);
    why_not_ = std::move(why_not);
    for (std::size_t gpu = 0; gpu < sources_.size(); ++gpu) sources_[gpu]->is_reached = (reached >> gpu & 1) != 0;
  }
  pump();
}

bool Sender::refuse(const Error& why) {
  std::lock_guard lock(mutex_);
  if (failure_) return false;
  failure_ = why;
  return true;
}

void Sender::lose(const Error& why) {
  const bool is_first = refuse(why);
  std::lock_guard lock(mutex_);
  if (is_first && below_) below_->close(why);
}

void Sender::introduce(const std::vector<std::byte>& message) {
  std::lock_guard lock(mutex_);
  if (!failure_) below_->send(message, {}, nullptr, {});
}

// --- naming -----------------------------------------------------------------------------------------------------------

void Sender::pump() {
  std::vector<std::pair<std::shared_ptr<Landing>, Error>> failed;
  {
    std::lock_guard lock(mutex_);
    pump(failed);
  }
  for (const auto& [landing, error] : failed) landing->fail(error);
}

void Sender::pump(std::vector<std::pair<std::shared_ptr<Landing>, Error>>& failed) {
  while (is_met_ && !failure_ && !line_.empty()) {
    Item& item = line_.front();
    try {
      if (go(item) == Went::Waits) return;
    } catch (...) {
      failed.emplace_back(item.landing, to_error(std::current_exception(), Blame::Device).within(name()));
    }
    line_.pop_front();
  }
}

Sender::Went Sender::go(Item& item) {
  std::optional<std::size_t> gpu;  // of what is named; a message names memory of one
  std::vector<Payload> payloads;
  for (const Slice& slice : item.payloads) {
    Payload& payload = payloads.emplace_back();
    payload.bytes = slice.bytes;
    if (slice.device.is_host() || slice.bytes == 0) continue;
    for (std::size_t i = 0; i < sources_.size(); ++i) {
      if (sources_[i]->device->id() != slice.device || !sources_[i]->is_reached || gpu.value_or(i) != i) continue;
      if (sources_[i]->free.empty()) return Went::Waits;
      payload.named = name_of(*sources_[i], slice);
      if (payload.named) gpu = i;
    }
    if (payload.named || below_->capabilities().device_memory) continue;
    throw Error(Blame::Unsupported,
                "memory of " + describe(slice.device) + " cannot be shared" +
                    (why_not_.empty() ? ", because it is not of cuMemAlloc or a second GPU's" : ": " + why_not_) +
                    "; and the lane below carries host memory only (transport/staged_connection.h makes one that does)");
  }
  if (gpu) return go_shared(item, *gpu, std::move(payloads));
  for (Slice& slice : item.payloads) slice = slice.bytes > 0 ? slice : Slice{nullptr, 0, Device::host()};
  follow(item.landing, below_->send(encode_plain(item.header), item.payloads, item.pin, item.ready), /*names=*/false);
  item.landing->end_part(std::nullopt);
  return Went::Out;
}

// False where the loop must wait instead, because no stream can see the flag.
bool Sender::stream_waits(Source& source, Item& item) {
  try {
    item.ready.wait(source.stream);
    return true;
  } catch (const Error& error) {
    if (error.blame() != Blame::Unsupported) throw;
  }
  auto* const here = loop();
  if (!std::exchange(item.is_awaited, true) && here) {
    here->when(item.ready, [weak = weak_from_this()] {
      if (const auto self = weak.lock()) self->pump();
    });
  }
  return false;
}

Sender::Went Sender::go_shared(Item& item, std::size_t gpu, std::vector<Payload> payloads) {
  Source& source = *sources_[gpu];
  if (const auto lost = source.device->lost()) throw *lost;
  const bool is_ready = item.ready.query();
  if (!is_ready && !stream_waits(source, item)) return Went::Waits;
  const std::size_t slot = source.free.back();
  if (!is_ready) source.events[slot].record(source.stream);  // else the slot's last record, which has passed, will do
  source.free.pop_back();
  const std::uint32_t value = ++source.values[slot];
  std::vector<Slice> others;
  for (std::size_t i = 0; i < payloads.size(); ++i) {
    if (payloads[i].named) continue;
    others.push_back(payloads[i].bytes > 0 ? item.payloads[i] : Slice{nullptr, 0, Device::host()});
  }
  const bool has_others = std::any_of(others.begin(), others.end(), [](const Slice& slice) { return slice.bytes > 0; });
  const Shared message{static_cast<std::uint32_t>(gpu), static_cast<std::uint32_t>(slot), value, std::move(payloads),
                       item.header};
  const Op told = below_->send(encode(message), others, item.pin, has_others ? item.ready : Fence());
  if (const auto error = told.ended() ? told.error() : std::nullopt) {  // nobody hears of it
    source.free.push_back(slot);
    throw Error(*error);
  }
  const auto read = std::make_shared<ReadFence>(page_, process_, gpu, slot, value);
  const Completion known(item.pin, Fence(read));
  item.landing->begin_part();
  known.op().on_ended([weak = weak_from_this(), landing = item.landing, op = known.op(), read, gpu, slot] {
    auto error = op.error();
    if (!error && !read->was_read()) error = Error(Blame::PeerLost, "the peer ended before it had read the message");
    landing->end_part(error);
    const auto self = weak.lock();
    if (self && read->was_read()) self->was_read(gpu, slot);
  });
  // Behind that: the peer may have read it by now, and the loop says so on its own thread, not on this one, which has the
  // mutex.
  source.in_flight.add({name(), known, item.pin, Fence(), Fence(read)}, shared_from_this());
  for (auto& [base, allocation] : source.known) {
    const auto is_told = [&, number = allocation.named.allocation](const Payload& payload) {
      return payload.named && payload.named->allocation == number;
    };
    if (!std::any_of(message.payloads.begin(), message.payloads.end(), is_told)) continue;
    allocation.named.handle.reset();
    allocation.named.replaces = 0;
  }
  follow(item.landing, told, /*names=*/true);
  item.landing->end_part(std::nullopt);
  return Went::Out;
}

std::optional<Named> Sender::name_of(Source& source, const Slice& slice) {
  const auto address = reinterpret_cast<CUdeviceptr>(slice.data);
  const cuda::AllocationRange range = cuda::allocation_of(*source.device, address);
  if (slice.bytes > range.bytes - (address - range.base)) {
    throw Error(Blame::Caller,
                "a payload of " + std::to_string(slice.bytes) + " bytes runs over the end of its allocation");
  }
  Known& known = source.known[range.base];
  if (known.id != range.id) {
    auto handle = cuda::share_memory(*source.device, range.base);
    if (!handle) return std::nullopt;
    known = {range.id, {.allocation = ++allocations_, .replaces = known.named.allocation, .handle = handle}};
  }
  Named named = known.named;
  named.offset = address - range.base;
  return named;
}

void Sender::follow(const std::shared_ptr<Landing>& landing, const Op& below, bool names) {
  landing->begin_part();
  // Posted: it may have ended already, and the mutex is held.
  below.on_ended([weak = weak_from_this(), landing, below, names] {
    const auto self = weak.lock();
    auto* const here = self ? self->loop() : nullptr;
    if (!here) return;
    here->post([weak, landing, below, names] {
      const auto error = below.error();
      landing->end_part(error);
      const auto sender = names && error ? weak.lock() : nullptr;
      if (sender) sender->lose(*error);
    });
  });
}

// --- on the loop ------------------------------------------------------------------------------------------------------

void Sender::was_read(std::size_t gpu, std::size_t slot) {
  {
    std::lock_guard lock(mutex_);
    sources_[gpu]->free.push_back(slot);
  }
  pump();
}

std::shared_ptr<Connection> Sender::let_go() noexcept {
  std::lock_guard lock(mutex_);
  return std::exchange(below_, nullptr);
}

void Sender::end() noexcept {
  std::deque<Item> line;
  std::optional<Error> why;
  {
    std::lock_guard lock(mutex_);
    line.swap(line_);
    why = failure_;
  }
  for (const auto& source : sources_) source->in_flight.fail(*why);
  for (Item& item : line) item.landing->fail(*why);
}

}  // namespace weft::transport::cuda_ipc
