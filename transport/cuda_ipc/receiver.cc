// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cstring>
#include <utility>

#include <sys/epoll.h>

#include <weft/base/log.h>
#include <weft/base/make_error.h>
#include <weft/base/mutex.h>
#include <weft/cuda/retire.h>
#include <weft/transport/cuda_ipc/receiver.h>
#include <weft/transport/stream/frame.h>

namespace weft::transport::cuda_ipc {

using staged::CopyStream;
using staged::Landing;

namespace {

constexpr std::size_t kChunks = 4;                 // pinned chunks for destinations on the host
constexpr std::size_t kMostAllocations = 1 << 16;  // of one GPU that a peer may describe

Slice nothing() { return {nullptr, 0, Device::host()}; }

CopyStream::Copy part_of(const CopyStream::Copy& copy, std::size_t offset, std::size_t bytes) {
  return {copy.to.part(offset, bytes), copy.from.part(offset, bytes)};
}

}  // namespace

struct Receiver::Reading {
  explicit Reading(std::shared_ptr<Page> of) : page(std::move(of)) {}
  ~Reading() { page->closed().store(1, std::memory_order_release); }
  Reading(const Reading&) = delete;
  Reading& operator=(const Reading&) = delete;

  std::shared_ptr<Page> page;  // the peer's page
};

struct Receiver::Read {
  Read(std::shared_ptr<Reading> of, const Shared& message)
      : reading(std::move(of)),
        word(reading->page->word(message.gpu, message.slot)),
        value(message.value) {}
  ~Read() { word.store(value, std::memory_order_release); }
  Read(const Read&) = delete;
  Read& operator=(const Read&) = delete;

  std::shared_ptr<Reading> reading;
  std::atomic<std::uint32_t>& word;
  std::uint32_t value;
};

struct Receiver::HostCopies {
  std::vector<CopyStream::Copy> copies;
  CopyStream* stream = nullptr;
  std::optional<cuda::EventRef> after;
  Pin held;
  std::shared_ptr<Landing> landing;
  std::size_t index = 0;
  std::size_t offset = 0;
};

Receiver::Receiver(std::shared_ptr<Connection> below, std::shared_ptr<staged::Stage> stage,
                   const Capabilities& limits, const std::shared_ptr<EventLoop>& loop)
    : peer_(below->peer()),
      stage_(std::move(stage)),
      limits_(limits),
      loop_(loop),
      loop_address_(loop.get()),
      chunks_(std::make_shared<staged::Chunks>(*stage_, kChunks)),
      streams_(*stage_, loop),
      below_(std::move(below)) {}

Receiver::~Receiver() = default;

std::uint32_t Receiver::meet(Hello theirs, std::shared_ptr<Page> page) {
  MutexLock lock(mutex_);
  theirs_ = std::move(theirs);
  reading_ = std::make_shared<Reading>(std::move(page));
  sources_.resize(theirs_.gpus.size());
  std::uint32_t reached = 0;
  for (std::size_t gpu = 0; gpu < sources_.size(); ++gpu) {
    Source& source = sources_[gpu];
    for (std::size_t own = 0; own < streams_.size(); ++own) {
      cuda::Device& device = *stage_->devices()[own];
      const bool is_same = cuda::uuid_of(device) == theirs_.gpus[gpu].uuid;
      if (!is_same && (source.stream != nullptr || !cuda::can_read(device, theirs_.gpus[gpu].uuid)))
        continue;
      source.stream = &streams_[own];
      source.device = &device;
    }
    source.events.resize(kSlots);
    if (source.stream != nullptr) reached |= std::uint32_t{1} << gpu;
  }
  if (reached != 0 && theirs_.socket != 0) connect();
  return reached;
}

void Receiver::connect() {
  auto* const here = loop();
  if (!here) return;
  try {
    taking_.emplace(theirs_.identity.process, theirs_.socket);
    watch_ = here->watch(taking_->descriptor(), EPOLLIN, [weak = weak_from_this()](std::uint32_t) {
      if (const auto self = weak.lock()) self->take_passed();
    });
  } catch (const Error& error) {
    taking_.reset();
    log::info("cuda_ipc from " + peer_ +
              ": its memory of virtual addresses is received over the connection below, because " +
              error.text());
  }
}

void Receiver::take_passed() {
  MutexLock lock(mutex_);
  if (taking_ && !taking_->take()) watch_.reset();
}

// --- Arriving ---

std::optional<Error> Receiver::take(const Arrival& below, const Arrived& arrived) {
  Bytes header;
  Stand stand = Stand::Plain;
  std::span<const std::uint64_t> sizes;
  {
    MutexLock lock(mutex_);
    if (failure_) return std::nullopt;
    const auto kind = below.header.empty() ? 0 : std::to_integer<int>(below.header[0]);
    if (kind == static_cast<int>(Kind::Plain)) {
      header = below.header.subspan(1);
      sizes_.assign(below.sizes.begin(), below.sizes.end());
    } else if (kind == static_cast<int>(Kind::Shared)) {
      auto decoded = decode_shared(below.header, below.sizes, limits_);
      if (!decoded) return decoded.error();
      message_ = std::move(decoded).value();
      if (message_.gpu >= sources_.size() || sources_[message_.gpu].stream == nullptr) {
        return Error(
            Blame::Protocol,
            "the peer named memory of a GPU although it was told that this GPU cannot be read");
      }
      if (auto wrong = learn()) return wrong;
      header = std::exchange(message_.header, {});
      sizes_.clear();
      for (const Payload& payload : message_.payloads) sizes_.push_back(payload.bytes);
      stand = Stand::Shared;
    } else {
      return Error(Blame::Protocol,
                   "the peer sent an invalid message of kind " + std::to_string(kind));
    }
    stand_ = stand;
    sizes = sizes_;
  }
  arrived({header, sizes, stand == Stand::Plain ? below.in_place : Bytes()});
  return std::nullopt;
}

// Records the allocations that the message describes, even if it is then not accepted, because the
// peer describes each only once.
std::optional<Error> Receiver::learn() {
  auto& allocations = sources_[message_.gpu].allocations;
  for (const Payload& payload : message_.payloads) {
    for (const Piece& piece : payload.pieces) {
      if (auto wrong = learn(piece, allocations)) return wrong;
    }
  }
  // Checks all pieces again, because one piece may have replaced the allocation of another.
  for (const Payload& payload : message_.payloads) {
    for (const Piece& piece : payload.pieces) {
      if (allocations.contains(piece.allocation)) continue;
      return Error(Blame::Protocol, "the peer named memory that it has not described");
    }
  }
  if (allocations.size() <= kMostAllocations) return std::nullopt;
  return Error(Blame::Protocol,
               "the peer described more than " + std::to_string(kMostAllocations) + " allocations");
}

std::optional<Error> Receiver::learn(const Piece& piece,
                                     std::map<std::uint64_t, Allocation>& allocations) {
  if (piece.replaces != 0)
    allocations.erase(piece.replaces);  // copies in progress keep its memory open
  if (piece.handle) {
    Allocation& allocation = allocations[piece.allocation];
    if (allocation.handle == *piece.handle) return std::nullopt;
    allocation = {};
    allocation.handle = *piece.handle;
  }
  if (piece.passed == 0) return std::nullopt;
  // The descriptor was passed before the message was sent, so it has arrived by now.
  if (taking_ && !taking_->take()) watch_.reset();
  Descriptor descriptor = taking_ ? taking_->find(piece.allocation) : Descriptor();
  if (!descriptor) {
    if (taking_ && taking_->failure()) return taking_->failure();
    return Error(Blame::Protocol, "the peer described memory without passing its descriptor");
  }
  Allocation& allocation = allocations[piece.allocation];
  allocation = {};
  allocation.descriptor = std::move(descriptor);
  allocation.passed = piece.passed;
  return std::nullopt;
}

// --- Accepting, on any thread ---

std::optional<Error> Receiver::why_refused(std::span<const Slice> destinations) const {
  const auto wrong = [&](const std::string& text) {
    return Error(Blame::Caller, name() + ": " + text);
  };
  if (stand_ == Stand::None)
    return wrong("no message waits to be accepted; accept each once, after it has arrived");
  const auto misfit = frame::why_misfit(destinations, sizes_,
                                        [this](const Slice& to) { return stage_->why_not(to); });
  if (misfit) return wrong(*misfit);
  return std::nullopt;
}

Op Receiver::accept(std::span<const Slice> destinations, Pin pin, Fence ready) noexcept {
  MutexLock lock(mutex_);
  if (failure_) return Op::failed(*failure_);
  // The message still waits to be accepted.
  if (auto wrong = why_refused(destinations)) return Op::failed(std::move(*wrong));
  if (stand_ == Stand::Shared) return accept_shared(destinations, std::move(pin), std::move(ready));
  std::vector<Slice> places(destinations.begin(), destinations.end());
  for (Slice& place : places) place = place.bytes > 0 ? place : nothing();
  // The connection below may refuse device memory if it carries none; then the message still waits.
  const Op op = below_->accept(places, std::move(pin), std::move(ready));
  if (const auto error = op.ended() ? op.error() : std::nullopt;
      !error || error->blame() != Blame::Caller) {
    stand_ = Stand::None;
  }
  return op;
}

Op Receiver::accept_shared(std::span<const Slice> destinations, Pin pin, Fence ready) {
  stand_ = Stand::None;
  Source& source = sources_[message_.gpu];
  const auto read = std::make_shared<Read>(reading_, message_);
  std::vector<Slice> others;  // destinations of the payloads of the connection below
  for (std::size_t i = 0; i < destinations.size(); ++i) {
    if (message_.payloads[i].pieces.empty())
      others.push_back(destinations[i].bytes > 0 ? destinations[i] : nothing());
  }
  if (destinations.empty()) return below_->accept({}, nullptr, {});
  std::vector<Pin> pins{pin, read};
  std::vector<CopyStream::Copy> copies;
  std::optional<cuda::EventRef> after;
  try {
    copies = copies_to(destinations, source, pins);
    after = event_of(source);
  } catch (const Error& error) {
    const Error why = error.within(name());
    if (ends_connection(error.blame())) {
      failure_ = why;
      streams_.close(why);
      below_->close(why);
    } else {
      below_->accept({}, nullptr, {});  // the connection can still be used
    }
    return Op::failed(why);
  }
  const Pin held = std::make_shared<std::vector<Pin>>(std::move(pins));
  const bool has_others =
      std::any_of(others.begin(), others.end(), [](const Slice& slice) { return slice.bytes > 0; });
  const auto on_host =
      std::stable_partition(copies.begin(), copies.end(),
                            [](const CopyStream::Copy& copy) { return !copy.to.device.is_host(); });
  std::vector<CopyStream::Copy> to_host(on_host, copies.end());
  copies.erase(on_host, copies.end());
  if (!has_others && to_host.empty()) {
    below_->accept(others, nullptr, {});
    return source.stream->run(name(), std::move(copies), held, ready, shared_from_this(), after);
  }
  auto landing =
      std::make_shared<Landing>(staged::ending_of(Completion(pin, stage_->flags().make()), name()));
  const Op op = landing->op();
  const auto follow = [&](const Op& part) {
    landing->begin_part();
    part.on_ended([landing, part] { landing->end_part(part.error()); });
  };
  follow(below_->accept(others, pin, has_others ? ready : Fence()));
  if (!copies.empty())
    follow(source.stream->run(name(), std::move(copies), held, ready, shared_from_this(), after));
  if (auto* const here = loop(); here && !to_host.empty()) {
    landing->begin_part();
    auto work = std::make_shared<HostCopies>();
    *work = {std::move(to_host), source.stream, after, held, landing};
    to_host_.push_back(work);
    // Both are weak, because the fence's owner may keep it for ever.
    here->when(ready, [weak = weak_from_this(), waiting = std::weak_ptr(work)] {
      const auto self = weak.lock();
      const auto still = waiting.lock();
      if (self && still) self->go_on(still);
    });
  }
  landing->end_part(std::nullopt);
  return op;
}

std::vector<CopyStream::Copy> Receiver::copies_to(std::span<const Slice> destinations,
                                                  Source& source, std::vector<Pin>& pins) {
  std::vector<CopyStream::Copy> copies;
  for (std::size_t i = 0; i < destinations.size(); ++i) {
    std::size_t at = 0;
    for (const Piece& piece : message_.payloads[i].pieces) {
      const auto opened = memory_of(piece, source);
      const auto bytes = static_cast<std::size_t>(piece.bytes);
      const Slice from{reinterpret_cast<void*>(opened->base() + piece.offset), bytes,
                       source.device->id()};
      copies.push_back({destinations[i].part(at, bytes), from});
      pins.push_back(opened);
      at += bytes;
    }
  }
  return copies;
}

std::shared_ptr<cuda::OpenedMemory> Receiver::memory_of(const Piece& piece, Source& source) {
  Allocation& allocation = source.allocations.at(piece.allocation);
  if (!allocation.memory && allocation.passed > 0) {
    const auto bytes = static_cast<std::size_t>(allocation.passed);
    allocation.memory =
        std::make_shared<cuda::OpenedMemory>(*source.device, allocation.descriptor, bytes);
    allocation.descriptor = Descriptor();
  } else if (!allocation.memory) {
    // Closes memory that no copy uses. It is opened again when it is named again.
    const auto close_others = [&source] {
      for (auto& [number, other] : source.allocations) {
        if (other.passed == 0) other.memory.reset();
      }
      source.device->retirement().reclaim();
    };
    allocation.memory =
        std::make_shared<cuda::OpenedMemory>(*source.device, allocation.handle, close_others);
  }
  const auto& opened = allocation.memory;
  if (piece.offset > opened->bytes() || piece.bytes > opened->bytes() - piece.offset) {
    throw Error(Blame::Protocol, "the peer named memory outside of its allocation");
  }
  return opened;
}

cuda::EventRef Receiver::event_of(Source& source) {
  auto& event = source.events[message_.slot];
  if (!event) event.emplace(*source.device, theirs_.gpus[message_.gpu].events[message_.slot]);
  return *event;
}

// --- Copying to the host, on the loop ---

void Receiver::go_on(const std::shared_ptr<HostCopies>& work) {
  if (work->index == work->copies.size()) return finish(work, std::nullopt);
  const auto again = [weak = weak_from_this(), work] {
    if (const auto self = weak.lock()) self->go_on(work);
  };
  const auto chunk = chunks_->take([weak = weak_from_this(), again] {
    const auto self = weak.lock();
    if (auto* const here = self ? self->loop() : nullptr) here->post(again);
  });
  if (!chunk) return;
  const CopyStream::Copy& copy = work->copies[work->index];
  const CopyStream::Copy part =
      part_of(copy, work->offset, std::min(copy.to.bytes - work->offset, chunk->bytes));
  const Slice here = chunk->part(0, part.to.bytes);
  const Op op = work->stream->run(name() + " to the host", {{here, part.from}}, work->held, Fence(),
                                  shared_from_this(), work->after);
  op.on_ended([weak = weak_from_this(), work, op, here, to = part.to, chunk, again] {
    if (const auto error = op.error()) {
      if (const auto self = weak.lock()) self->finish(work, error);
      return;
    }
    std::memcpy(to.data, here.data, to.bytes);
    work->offset += to.bytes;
    if (work->offset == work->copies[work->index].to.bytes) {
      ++work->index;
      work->offset = 0;
    }
    again();
  });
}

void Receiver::finish(const std::shared_ptr<HostCopies>& work, const std::optional<Error>& error) {
  {
    MutexLock lock(mutex_);
    std::erase(to_host_, work);
  }
  work->held.reset();  // tells the peer that the message has been read
  work->landing->end_part(error);
}

void Receiver::take_introduction() {
  MutexLock lock(mutex_);
  if (!failure_) below_->accept({}, nullptr, {});
}

bool Receiver::refuse(const Error& why) {
  MutexLock lock(mutex_);
  if (failure_) return false;
  failure_ = why;
  streams_.close(why);
  return true;
}

std::shared_ptr<Connection> Receiver::let_go() noexcept {
  MutexLock lock(mutex_);
  return std::exchange(below_, nullptr);
}

void Receiver::end() noexcept {
  std::optional<Error> why;
  std::vector<std::shared_ptr<HostCopies>> to_host;
  // Dropped at the end of this function; streams that still read keep it.
  std::shared_ptr<Reading> last;
  {
    MutexLock lock(mutex_);
    why = failure_;
    stand_ = Stand::None;
    last = std::exchange(reading_, nullptr);
    to_host.swap(to_host_);
    watch_.reset();
    taking_.reset();
    // Copies in progress keep their memory open.
    for (Source& source : sources_) source.allocations.clear();
  }
  for (const auto& work : to_host) work->landing->fail(*why);
  streams_.fail(*why);
}

}  // namespace weft::transport::cuda_ipc
