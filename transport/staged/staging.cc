// SPDX-License-Identifier: Apache-2.0
#include <utility>

#include <weft/base/make_error.h>
#include <weft/base/mutex.h>
#include <weft/cuda/fence.h>
#include <weft/cuda/memory.h>
#include <weft/profiling/trace/timeline.h>
#include <weft/profiling/trace/trace.h>
#include <weft/transport/staged/staged_frame.h>
#include <weft/transport/staged/staging.h>

namespace weft::transport::staged {

namespace {

constinit trace::Name copying{trace::Layer::Transport, "enqueue copies"};

constexpr auto kSetUp = std::chrono::seconds(60);

std::size_t bytes_of(std::span<const Copy> copies) {
  std::size_t bytes = 0;
  for (const Copy& copy : copies) bytes += copy.to.bytes;
  return bytes;
}

}  // namespace

Stage::Stage(std::vector<std::shared_ptr<cuda::Device>> devices) : devices_(std::move(devices)) {
  if (devices_.empty()) return;
  pinned_.emplace(*devices_.front());
  flags_.emplace(*devices_.front());
  for (const auto& device : devices_) warm_up(*device);
}

cuda::Device& Stage::device(int index) const {
  for (const auto& device : devices_) {
    if (device->index() == index) return *device;
  }
  broken("a slice lies on a GPU that is not one of the stage's");
}

std::optional<Error> Stage::why_lost(std::span<const Slice> slices) const {
  for (const Slice& slice : slices) {
    if (slice.device.is_host()) continue;
    if (auto lost = device(slice.device.index).lost()) return lost;
  }
  return std::nullopt;
}

Pin Reached::join_pins(Pin other) {
  if (pins.empty()) return other;
  pins.push_back(std::move(other));
  return std::make_shared<std::vector<Pin>>(std::exchange(pins, {}));
}

Reached reach_with(Connection& connection, const Stage& stage, std::span<const Slice> slices) {
  const std::size_t least = connection.capabilities().direct_bytes;
  if (least == 0) return {};
  Reached reached{.which = std::vector<bool>(slices.size(), false), .pins = {}};
  for (std::size_t i = 0; i < slices.size(); ++i) {
    if (slices[i].device.is_host() || slices[i].bytes < least) continue;
    if (auto pin = connection.reach(slices[i], stage.device(slices[i].device.index))) {
      reached.which[i] = true;
      reached.pins.push_back(std::move(pin).value());
    }
  }
  return reached;
}

void Stage::warm_up(cuda::Device& device) {
  constexpr std::size_t kBytes = 64;
  const cuda::Stream stream(device);
  const cuda::PinnedMemory host = pinned_->allocate(kBytes);
  const cuda::DeviceMemory memory(stream, kBytes);
  cuda::copy(stream, memory.slice(), host.slice());
  cuda::copy(stream, host.slice(), memory.slice());
  const bool in_time = flags_->signal(stream).synchronize(Deadline::in(kSetUp));
  if (const auto lost = device.lost()) throw *lost;
  if (!in_time)
    throw Error(Blame::Timeout,
                "staging on " + describe(device.id()) + ": the first copy did not end");
}

std::optional<std::string> Stage::why_not(const Slice& slice) const {
  if (slice.bytes > 0 && slice.data == nullptr)
    return std::to_string(slice.bytes) + " bytes without an address";
  if (slice.device.is_host()) return std::nullopt;
  for (const auto& device : devices_) {
    if (device->id() == slice.device) return std::nullopt;
  }
  return "memory of " + describe(slice.device) +
         (devices_.empty() ? ", and this process opened the connection without a GPU"
                           : ", which the connection was not opened with");
}

// --- chunks

Chunks::Chunks(Stage& stage, std::size_t chunks) {
  if (stage.devices().empty()) return;
  for (std::size_t i = 0; i < chunks; ++i) {
    blocks_.push_back(stage.pinned().allocate(kChunkBytes));
    free_.push_back(i);
  }
}

Chunks::Lease Chunks::take(Task again) {
  MutexLock lock(mutex_);
  if (free_.empty()) {
    waiting_.push_back(std::move(again));
    return nullptr;
  }
  const std::size_t index = free_.back();
  free_.pop_back();
  return {new Slice(blocks_[index].slice()),
          [self = shared_from_this(), index](const Slice* chunk) {
            delete chunk;
            self->give_back(index);
          }};
}

void Chunks::give_back(std::size_t index) noexcept {
  std::vector<Task> waiting;
  {
    MutexLock lock(mutex_);
    free_.push_back(index);
    waiting.swap(waiting_);
  }
  for (Task& again : waiting) again();  // callers that find no chunk wait again
}

std::shared_ptr<Completion> ending_of(Completion completion, std::string name) {
  return {new Completion(std::move(completion)), [name = std::move(name)](Completion* last) {
            if (!last->finished())
              last->fail(Error(Blame::Cancelled, name + ": the loop that was to end it has ended"));
            delete last;
          }};
}

// --- copying

cuda::Span show(const cuda::StreamRef& stream, std::span<const Copy> copies, int rank) noexcept {
  const std::size_t bytes = trace::timeline::on() ? bytes_of(copies) : 0;
  if (bytes == 0) return {};
  const Copy& first = copies.front();
  const char* const text = first.to.device.is_host()     ? "copy to host"
                           : first.from.device.is_host() ? "copy to device"
                                                         : "copy";
  return cuda::Span::begin(stream, text, trace::Layer::Transport, bytes, rank);
}

CopyStream::CopyStream(std::shared_ptr<cuda::Device> device, cuda::FlagPool& flags,
                       const std::shared_ptr<EventLoop>& loop)
    : device_(std::move(device)),
      flags_(flags),
      loop_(loop),
      // High priority, so that it shares no hardware queue with streams that wait for this
      // connection.
      stream_(*device_, cuda::Priority::High),
      in_flight_(device_, loop) {}

// Returns false if no stream can see the flag, so that the host must wait for it.
bool CopyStream::waits_for(const Fence& ready) {
  try {
    ready.wait(stream_);
    return true;
  } catch (const Error& error) {
    if (error.blame() != Blame::Unsupported) throw;
    return false;
  }
}

Op CopyStream::run(const std::string& name, std::vector<Copy> copies, Pin pin, const Fence& ready,
                   const std::shared_ptr<const void>& owner,
                   std::optional<cuda::EventRef> after) noexcept {
  try {
    MutexLock lock(mutex_);
    if (closed_) return Op::failed(*closed_);
    if (!waits_for(ready))
      return enqueue_later({name, std::move(copies), pin, after, nullptr}, ready, owner);
    if (after) after->wait(stream_);
    return enqueue(name, copies, pin, owner);
  } catch (...) {
    return Op::failed(to_error(std::current_exception(), Blame::Device).within(name));
  }
}

// The waiting copies belong to this object, because the flag's owner may keep the callback for
// ever.
Op CopyStream::enqueue_later(Later later, const Fence& ready,
                             const std::shared_ptr<const void>& owner) {
  later.completion = ending_of(Completion(later.pin), later.name);
  const Op op = later.completion->op();
  const std::uint64_t key = next_later_++;
  later_.emplace(key, std::move(later));
  if (const auto loop = loop_.lock()) {
    loop->when(ready, [this, weak = std::weak_ptr(owner), key] {
      if (const auto alive = weak.lock()) run_later(key, alive);
    });
  }
  return op;
}

void CopyStream::run_later(std::uint64_t key, const std::shared_ptr<const void>& owner) {
  std::optional<Later> later;
  {
    MutexLock lock(mutex_);
    const auto found = later_.find(key);
    if (found == later_.end()) return;
    later = std::move(found->second);
    later_.erase(found);
  }
  const Op made =
      run(later->name, std::move(later->copies), later->pin, Fence(), owner, later->after);
  made.on_ended([made, completion = later->completion] {
    if (const auto error = made.error()) {
      completion->fail(*error);
    } else {
      completion->finish();
    }
  });
}

void CopyStream::fail(const Error& why) noexcept {
  std::map<std::uint64_t, Later> later;
  {
    MutexLock lock(mutex_);
    later.swap(later_);
  }
  in_flight_.fail(why);
  for (auto& [key, waiting] : later) waiting.completion->fail(why);
}

void CopyStream::close(const Error& why) {
  MutexLock lock(mutex_);
  if (!closed_) closed_ = why;
}

Op CopyStream::enqueue(const std::string& name, const std::vector<Copy>& copies, const Pin& pin,
                       const std::shared_ptr<const void>& owner) {
  if (const auto lost = device_->lost()) throw *lost;
  const trace::Range range(copying, {.bytes = bytes_of(copies), .device = device_->index()});
  std::size_t enqueued = 0;
  try {
    cuda::Span shown = show(stream_, copies);
    for (; enqueued < copies.size(); ++enqueued)
      cuda::copy(stream_, copies[enqueued].to, copies[enqueued].from);
    shown.end(stream_);
    const Fence made = flags_.signal(stream_);
    const Completion completion(pin, made);
    in_flight_.add({name, completion, pin, Fence(), made}, owner);
    return completion.op();
  } catch (const Error& error) {
    if (enqueued == 0 || device_->lost()) throw;
    // The copies that were enqueued are made all the same.
    const Fence made = cuda::record(stream_);
    in_flight_.add({name, Completion(pin, made), pin, Fence(), made}, owner);
    throw;
  }
}

CopyStreams::CopyStreams(Stage& stage, const std::shared_ptr<EventLoop>& loop) {
  for (const auto& device : stage.devices()) {
    streams_.push_back(std::make_unique<CopyStream>(device, stage.flags(), loop));
  }
}

CopyStream& CopyStreams::on(int device) {
  for (const auto& stream : streams_) {
    if (stream->device() == device) return *stream;
  }
  broken("a slice lies on a device that the connection was not opened with");
}

void CopyStreams::close(const Error& why) {
  for (const auto& stream : streams_) stream->close(why);
}

void CopyStreams::fail(const Error& why) noexcept {
  for (const auto& stream : streams_) stream->fail(why);
}

}  // namespace weft::transport::staged
