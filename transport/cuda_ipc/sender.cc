// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <utility>

#include <weft/base/log.h>
#include <weft/base/loop_flag.h>
#include <weft/base/make_error.h>
#include <weft/base/mutex.h>
#include <weft/transport/cuda_ipc/sender.h>
#include <weft/transport/stream/frame.h>

namespace weft::transport::cuda_ipc {

using staged::Landing;

namespace {

// Interval for passing descriptors again while the socket is full.
constexpr auto kRetry = std::chrono::milliseconds(1);

}  // namespace

Sender::Source::Source(std::shared_ptr<cuda::Device> on, const std::shared_ptr<EventLoop>& loop)
    : device(std::move(on)),
      stream(*device, cuda::Priority::High),
      values(kSlots),
      in_flight(device, loop) {
  for (std::size_t slot = 0; slot < kSlots; ++slot) {
    events.emplace_back(*device);
    free.push_back(slot);
  }
}

Sender::Sender(std::shared_ptr<Connection> below, std::shared_ptr<staged::Stage> stage,
               const Capabilities& limits, const std::shared_ptr<EventLoop>& loop)
    : peer_(below->peer()),
      stage_(std::move(stage)),
      limits_(limits),
      loop_(loop),
      loop_address_(loop.get()),
      below_(std::move(below)) {
  for (const auto& device : stage_->devices())
    sources_.push_back(std::make_unique<Source>(device, loop));
  if (!sources_.empty()) passing_.emplace();
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

// --- From the caller ---

std::optional<Error> Sender::why_refused(Bytes header, std::span<const Slice> payloads) const {
  const auto wrong = [&](const std::string& text) {
    return Error(Blame::Caller, name() + ": " + text);
  };
  if (auto limit = frame::why_too_large(header.size(), payloads.size(), frame::total_of(payloads),
                                        limits_)) {
    return wrong(*limit);
  }
  for (std::size_t i = 0; i < payloads.size(); ++i) {
    if (const auto why = stage_->why_not(payloads[i]))
      return wrong("payload " + std::to_string(i) + " is " + *why);
  }
  return std::nullopt;
}

Op Sender::send(Bytes header, std::span<const Slice> payloads, Pin pin, Fence ready) noexcept {
  if (auto wrong = why_refused(header, payloads)) return Op::failed(std::move(*wrong));
  const bool is_host = std::all_of(payloads.begin(), payloads.end(),
                                   [](const Slice& slice) { return slice.device.is_host(); });
  std::vector<std::pair<std::shared_ptr<Landing>, Error>> failed;
  Op op;
  {
    MutexLock lock(mutex_);
    if (failure_) return Op::failed(*failure_);
    if (is_host && is_met_ && line_.empty()) {
      return below_->send(encode_plain(header), payloads, std::move(pin), std::move(ready));
    }
    if (line_.size() >= limits_.max_queued) {
      return Op::failed(Error(
          Blame::Busy, name() + ": " + std::to_string(limits_.max_queued) +
                           " messages wait already (max_queued); send again when some are done"));
    }
    Item item;
    item.header.assign(header.begin(), header.end());
    item.payloads.assign(payloads.begin(), payloads.end());
    item.pin = pin;
    item.ready = std::move(ready);
    // Streams can wait for the flag if the message has device memory.
    auto flag = is_host ? std::static_pointer_cast<HostFlag>(std::make_shared<LoopFlag>(loop_))
                        : stage_->flags().make();
    item.landing = std::make_shared<Landing>(
        staged::ending_of(Completion(std::move(pin), std::move(flag)), name()));
    op = item.landing->op();
    line_.push_back(std::move(item));
    pump(failed);
  }
  for (const auto& [landing, error] : failed) landing->fail(error);
  return op;
}

void Sender::meet(std::shared_ptr<Process> peer, std::uint32_t reached, std::string why_not) {
  {
    MutexLock lock(mutex_);
    is_met_ = true;
    process_ = std::move(peer);
    why_not_ = std::move(why_not);
    for (std::size_t gpu = 0; gpu < sources_.size(); ++gpu)
      sources_[gpu]->is_reached = (reached >> gpu & 1) != 0;
  }
  pump();
}

bool Sender::refuse(const Error& why) {
  MutexLock lock(mutex_);
  if (failure_) return false;
  failure_ = why;
  return true;
}

void Sender::lose(const Error& why) {
  const bool is_first = refuse(why);
  MutexLock lock(mutex_);
  if (is_first && below_) below_->close(why);
}

void Sender::introduce(const std::vector<std::byte>& message) {
  MutexLock lock(mutex_);
  if (!failure_) below_->send(message, {}, nullptr, {});
}

// --- Naming ---

void Sender::pump() {
  std::vector<std::pair<std::shared_ptr<Landing>, Error>> failed;
  {
    MutexLock lock(mutex_);
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
      failed.emplace_back(item.landing,
                          to_error(std::current_exception(), Blame::Device).within(name()));
    }
    line_.pop_front();
  }
}

Sender::Went Sender::go(Item& item) {
  Naming naming{.number = ++namings_};
  for (const Slice& slice : item.payloads) {
    naming.payloads.push_back({slice.bytes, {}});
    if (slice.device.is_host() || slice.bytes == 0) continue;
    naming.why_not.clear();
    bool is_named = false;
    for (std::size_t i = 0; i < sources_.size() && !is_named; ++i) {
      if (sources_[i]->device->id() != slice.device || !sources_[i]->is_reached ||
          naming.gpu.value_or(i) != i)
        continue;
      if (sources_[i]->free.empty()) return Went::Waits;
      is_named = name_slice(*sources_[i], slice, naming);
      if (is_named) naming.gpu = i;
    }
    if (is_named || below_->capabilities().device_memory) continue;
    throw Error(Blame::Unsupported,
                "memory of " + describe(slice.device) +
                    " cannot be shared: " + (naming.why_not.empty() ? why_not_ : naming.why_not) +
                    "; and the connection below carries only host memory "
                    "(transport/staged/staged_connection.h makes one that carries device memory)");
  }
  if (naming.gpu) return go_shared(item, std::move(naming));
  for (Slice& slice : item.payloads)
    slice = slice.bytes > 0 ? slice : Slice{nullptr, 0, Device::host()};
  follow(item.landing, below_->send(encode_plain(item.header), item.payloads, item.pin, item.ready),
         /*names=*/false);
  item.landing->end_part(std::nullopt);
  return Went::Out;
}

// Makes the source's stream wait for item.ready. Returns false if no stream can see that fence;
// then the loop waits for it.
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

// Passes the descriptors of the allocations that the message describes, before the message itself.
// Returns empty if all have been passed; else the result for the item.
std::optional<Sender::Went> Sender::pass(const Naming& naming, Item& item) {
  for (Known* known : naming.told) {
    if (!known->descriptor) continue;
    switch (passing_->pass(known->allocation, known->descriptor)) {
      case PassingEnd::Outcome::Passed: known->descriptor = Descriptor(); break;
      case PassingEnd::Outcome::Full:
        if (auto* const here = loop()) {
          retry_ = here->at(Deadline::in(kRetry), [weak = weak_from_this()] {
            if (const auto self = weak.lock()) self->pump();
          });
        }
        return Went::Waits;
      case PassingEnd::Outcome::Gone:
        return go(item);  // names nothing that would need a descriptor
    }
  }
  return std::nullopt;
}

Sender::Went Sender::go_shared(Item& item, Naming naming) {
  const std::size_t gpu = *naming.gpu;
  Source& source = *sources_[gpu];
  if (const auto lost = source.device->lost()) throw *lost;
  if (const auto other = pass(naming, item)) return *other;
  const bool is_ready = item.ready.query();
  if (!is_ready && !stream_waits(source, item)) return Went::Waits;
  const std::size_t slot = source.free.back();
  // If it is ready, the slot's previous record, which has passed, is enough.
  if (!is_ready) source.events[slot].record(source.stream);
  source.free.pop_back();
  const std::uint32_t value = ++source.values[slot];
  std::vector<Slice> others;
  for (std::size_t i = 0; i < item.payloads.size(); ++i) {
    if (!naming.payloads[i].pieces.empty()) continue;
    others.push_back(item.payloads[i].bytes > 0 ? item.payloads[i]
                                                : Slice{nullptr, 0, Device::host()});
  }
  const bool has_others =
      std::any_of(others.begin(), others.end(), [](const Slice& slice) { return slice.bytes > 0; });
  const Shared message{static_cast<std::uint32_t>(gpu), static_cast<std::uint32_t>(slot), value,
                       std::move(naming.payloads), item.header};
  const Op told =
      below_->send(encode(message), others, item.pin, has_others ? item.ready : Fence());
  if (const auto error = told.ended() ? told.error() : std::nullopt) {
    // The peer does not get the message, so it will not raise the slot's word.
    source.free.push_back(slot);
    throw Error(*error);
  }
  for (Known* known : naming.told) {
    known->is_told = true;
    known->replaces = 0;
    known->handle.reset();
  }
  const auto read = std::make_shared<ReadFence>(page_, process_, gpu, slot, value);
  const Completion known(item.pin, Fence(read));
  item.landing->begin_part();
  known.op().on_ended(
      [weak = weak_from_this(), landing = item.landing, op = known.op(), read, gpu, slot] {
        auto error = op.error();
        if (!error && !read->was_read())
          error = Error(Blame::PeerLost, "the peer ended before it had read the message");
        landing->end_part(error);
        const auto self = weak.lock();
        if (self && read->was_read()) self->was_read(gpu, slot);
      });
  // Added after on_ended(): the peer may already have read the message. The loop then reports it on
  // its own thread, not on this one, which holds mutex_.
  source.in_flight.add({name(), known, item.pin, Fence(), Fence(read)}, shared_from_this());
  follow(item.landing, told, /*names=*/true);
  item.landing->end_part(std::nullopt);
  return Went::Out;
}

bool Sender::name_slice(Source& source, const Slice& slice, Naming& naming) {
  std::vector<Piece>& pieces = naming.payloads.back().pieces;
  const std::size_t told = naming.told.size();
  const auto begin = reinterpret_cast<CUdeviceptr>(slice.data);
  for (std::size_t at = 0; at < slice.bytes; at += static_cast<std::size_t>(pieces.back().bytes)) {
    const auto piece = name_piece(source, begin + at, slice.bytes - at, naming);
    if (!piece) {
      for (std::size_t i = told; i < naming.told.size(); ++i) naming.told[i]->named_in = 0;
      naming.told.resize(told);
      pieces.clear();
      return false;
    }
    pieces.push_back(*piece);
  }
  naming.pieces += pieces.size();
  return true;
}

// Names as much of the memory as lies in one allocation.
std::optional<Piece> Sender::name_piece(Source& source, CUdeviceptr address, std::size_t bytes,
                                        Naming& naming) {
  if (naming.pieces + naming.payloads.back().pieces.size() == limits_.max_payloads) {
    naming.why_not = "a message shares at most " + std::to_string(limits_.max_payloads) +
                     " pieces of memory (each segment of expandable memory is a piece)";
    return std::nullopt;
  }
  const cuda::AllocationRange range = cuda::allocation_of(*source.device, address);
  Known* const known = known_at(source, range, naming);
  if (known == nullptr) return std::nullopt;
  const auto offset = static_cast<std::size_t>(address - range.base);
  if (bytes > range.bytes - offset && !known->physical) {
    throw Error(Blame::Caller, "a payload runs over the end of its allocation by " +
                                   std::to_string(bytes - (range.bytes - offset)) + " bytes");
  }
  Piece piece{.bytes = std::min(bytes, range.bytes - offset),
              .allocation = known->allocation,
              .offset = offset};
  if (known->is_told || known->named_in == naming.number) return piece;
  known->named_in = naming.number;
  naming.told.push_back(known);
  piece.replaces = known->replaces;
  piece.handle = known->handle;
  piece.passed = known->physical ? known->bytes : 0;
  return piece;
}

// Finds or adds the allocation; null if it cannot be shared.
Sender::Known* Sender::known_at(Source& source, const cuda::AllocationRange& range,
                                Naming& naming) {
  const auto found = source.known.find(range.base);
  std::optional<cuda::PhysicalMemory> mapped;
  if (found != source.known.end()) {
    Known& known = found->second;
    if (!known.physical && known.id == range.id) return &known;
    if (known.physical) mapped = cuda::PhysicalMemory::at(*source.device, range.base);
    const bool is_same = mapped && mapped == known.physical && known.bytes == range.bytes;
    if (is_same && (known.is_told || !why_not_passed())) return &known;
  }
  auto shared = share(source, range, std::move(mapped), naming);
  if (!shared) return nullptr;
  Known& known = source.known[range.base];
  // An allocation that was never described to the peer gives its number to its successor at the
  // same address.
  shared->allocation = known.is_told || known.allocation == 0 ? ++allocations_ : known.allocation;
  shared->replaces = known.is_told ? known.allocation : known.replaces;
  return &(known = std::move(*shared));
}

// Makes the allocation shareable; empty if it cannot be shared. `mapped` is the memory that is
// mapped there, if it is already known.
std::optional<Sender::Known> Sender::share(Source& source, const cuda::AllocationRange& range,
                                           std::optional<cuda::PhysicalMemory> mapped,
                                           Naming& naming) {
  Known known;
  known.id = range.id;
  known.bytes = range.bytes;
  if (!mapped) known.handle = cuda::share_memory(*source.device, range.base);
  if (known.handle) return known;
  known.physical =
      mapped ? std::move(mapped) : cuda::PhysicalMemory::at(*source.device, range.base);
  if (!known.physical) {
    naming.why_not =
        "it is not of cuMemAlloc, nor of cuMemMap (stream-ordered pools are not shared)";
  } else if (const auto why = why_not_passed()) {
    naming.why_not = *why;
  } else if (known.descriptor = known.physical->share(); known.descriptor) {
    return known;
  } else {
    naming.why_not =
        "it was not created shareable (cuMemCreate with requestedHandleTypes "
        "CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR)";
  }
  return std::nullopt;
}

std::optional<std::string> Sender::why_not_passed() {
  auto why = passing_->why_not(process_->number());
  if (why && !std::exchange(has_said_why_, true)) {
    log::info("cuda_ipc to " + peer_ +
              ": memory of virtual addresses is sent over the connection below, because " + *why);
  }
  return why;
}

void Sender::follow(const std::shared_ptr<Landing>& landing, const Op& below, bool names) {
  landing->begin_part();
  // Posted to the loop, because `below` may have ended already and mutex_ is held.
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

// --- On the loop ---

void Sender::was_read(std::size_t gpu, std::size_t slot) {
  {
    MutexLock lock(mutex_);
    sources_[gpu]->free.push_back(slot);
  }
  pump();
}

std::shared_ptr<Connection> Sender::let_go() noexcept {
  MutexLock lock(mutex_);
  return std::exchange(below_, nullptr);
}

void Sender::end() noexcept {
  std::deque<Item> line;
  std::optional<Error> why;
  {
    MutexLock lock(mutex_);
    line.swap(line_);
    why = failure_;
    retry_.reset();
    if (passing_) passing_->close();
    // Also releases memory that the program has already freed.
    for (const auto& source : sources_) source->known.clear();
  }
  for (const auto& source : sources_) source->in_flight.fail(*why);
  for (Item& item : line) item.landing->fail(*why);
}

}  // namespace weft::transport::cuda_ipc
