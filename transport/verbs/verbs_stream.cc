// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <array>
#include <atomic>
#include <limits>

#include <endian.h>

#include <sys/epoll.h>

#include <weft/base/log.h>
#include <weft/base/make_error.h>
#include <weft/base/mutex.h>
#include <weft/transport/verbs/alarm.h>
#include <weft/transport/verbs/ring_reader.h>
#include <weft/transport/verbs/verbs_stream.h>

namespace weft::transport::verbs {

namespace {

constexpr int kSends = 128;
constexpr int kReceives = 256;
constexpr int kInlineBytes = Note::kBytes;  // a device must support at least this
constexpr int kBatch = 32;                  // completions
constexpr int kBatches = 16;                // batches in one turn
// How long withdraw() waits for posted ring writes and notes: enough for 16 MiB of a put before
// them on a fast network.
constexpr auto kLastWords = std::chrono::milliseconds(20);
constexpr std::byte kReady{'R'};  // sent over TCP once the queue pair can receive

// Therefore one turn takes all completions that were in the queue when it began.
static_assert(kBatch * kBatches >= kSends + kReceives);

}  // namespace

struct VerbsStream::Shared : std::enable_shared_from_this<Shared> {
  Shared(const Path& path, const std::shared_ptr<RegistrationCache>& cache,
         std::shared_ptr<Connection> connection, Deadline until, Pin ticket)
      : registrations(cache),
        completions(path.device, kSends + kReceives),
        pair(path, completions, {kSends, kReceives, kInlineBytes}),
        alarm(path.device, pair.handle(), completions.queue()),
        writer(pair, cache, connection->peer()),
        reader(pair, cache, writer),
        deadline(until),
        until_met(std::move(ticket)),
        meeting(std::move(connection)) {}
  // Destroys the queue pair before the memory that it reads and writes. If the pair cannot be
  // destroyed, the memory is never freed.
  static void end(Shared* shared) {
    shared->pair.destroy();
    shared->pair.is_stuck() ? keep_for_good(Pin(shared, [](const void*) {})) : delete shared;
  }

  const std::shared_ptr<RegistrationCache> registrations;
  Completions completions;
  QueuePair pair;
  Alarm alarm;
  RingWriter writer;
  RingReader reader;  // used on the loop only, like the next two
  std::optional<Hello> hello;
  bool has_news = false;  // readable() must be called
  const Deadline deadline;
  Pin until_met;
  const std::string& peer = writer.peer();

  std::function<void()> readable;
  std::function<void()> writable;
  // How the connection has ended. `told` is the end that readable() and writable() have reported.
  enum class Ending { None, Finished, Over };
  std::atomic<Ending> told{Ending::None};
  std::atomic<bool> is_open{false};
  std::atomic<bool> hung_up{false};  // the TCP connection has ended
  std::atomic<bool> stopped{false};
  mutable Mutex mutex;
  std::shared_ptr<Connection> meeting WEFT_GUARDED_BY(mutex);
  EventLoop::Registration poller WEFT_GUARDED_BY(mutex);
  EventLoop::Registration watch WEFT_GUARDED_BY(mutex);
  EventLoop::Registration events WEFT_GUARDED_BY(mutex);
  EventLoop::Registration bell WEFT_GUARDED_BY(mutex);
  EventLoop::Registration patience WEFT_GUARDED_BY(mutex);
  std::optional<Error> failure WEFT_GUARDED_BY(mutex);
  bool was_flushed WEFT_GUARDED_BY(mutex) = false;  // `failure` is only a flush, a consequence
  std::optional<Error> why_hung_up WEFT_GUARDED_BY(mutex);

  void meet(Connection& connection);
  void hear(Connection& connection, const Arrival& arrival);
  void join(Connection& connection, const Hello& theirs);
  void fail(const Error& why);
  bool look();
  bool park();
  bool drain();
  void take(const ibv_wc& completion);
  void hear_alarm();
  void let_words_out();
  Ending ending() const;
  std::optional<Error> why_ended() const;
};

VerbsStream::VerbsStream(const Path& path, const std::shared_ptr<RegistrationCache>& registrations,
                         std::shared_ptr<Connection> meeting, Deadline deadline, Pin until_met)
    : shared_(new Shared(path, registrations, std::move(meeting), deadline, std::move(until_met)),
              Shared::end) {}

VerbsStream::~VerbsStream() { stop(); }

std::string VerbsStream::peer() const { return shared_->peer; }

// --- Meeting ---

void VerbsStream::start(EventLoop& loop, std::function<void()> readable,
                        std::function<void()> writable) {
  shared_->readable = std::move(readable);
  shared_->writable = std::move(writable);
  MutexLock lock(shared_->mutex);
  shared_->watch =
      loop.watch(shared_->completions.descriptor(), EPOLLIN,
                 [shared = shared_](std::uint32_t) { shared->completions.take_event(); });
  shared_->events = loop.watch(shared_->alarm.events(), EPOLLIN, [shared = shared_](std::uint32_t) {
    shared->pair.path().device->take_events();
  });
  shared_->bell = loop.watch(shared_->alarm.bell(), EPOLLIN,
                             [shared = shared_](std::uint32_t) { shared->hear_alarm(); });
  shared_->poller = loop.poll([shared = shared_] { return shared->look(); },
                              [shared = shared_] { return shared->park(); });
  if (!shared_->deadline.is_never()) {
    shared_->patience = loop.at(shared_->deadline, [shared = shared_] {
      if (!shared->is_open) {
        shared->fail(Error(Blame::Timeout, "verbs: " + shared->peer + " sent no hello in time"));
      }
    });
  }
  shared_->meet(*shared_->meeting);
}

void VerbsStream::Shared::meet(Connection& connection) {
  const Path& path = pair.path();
  Hello mine;
  mine.fabric = *path.choice.port.fabric;
  mine.gid = path.choice.gid.bytes;
  mine.lid = path.choice.port.lid;
  mine.queue_pair = pair.number();
  mine.packet = pair.first_packet();
  mine.mtu_bytes = static_cast<std::uint32_t>(path.choice.port.mtu_bytes);
  mine.receives = reader.receives();
  mine.ring_bytes = kRingBytes;
  mine.ring_key = reader.ring_key();
  mine.ring_address = reader.ring_address();
  mine.max_write_bytes = path.choice.port.max_message;
  connection.send(encode(mine), {}, nullptr, {});  // before the loop can answer the peer's hello
  const std::weak_ptr<Shared> weak = weak_from_this();
  connection.receive({[weak, on = &connection](const Arrival& arrival) {
                        if (const auto self = weak.lock()) self->hear(*on, arrival);
                      },
                      [weak](const Error& why) {
                        const auto self = weak.lock();
                        if (!self) return;
                        if (!self->is_open) self->fail(why);
                        MutexLock lock(self->mutex);
                        self->why_hung_up = why;
                        self->hung_up =
                            true;  // look() reports it, after the bytes that have arrived
                      }});
}

// Handles a message over TCP: first the peer's hello, then kReady. Others are errors.
void VerbsStream::Shared::hear(Connection& connection, const Arrival& arrival) {
  if (stopped) return;
  const bool is_ready =
      hello && !is_open && arrival.header.size() == 1 && arrival.header[0] == kReady;
  try {
    if (!arrival.sizes.empty() || (hello && !is_ready)) {
      throw Error(Blame::Protocol, "verbs: " + peer + " sent an invalid message over TCP");
    }
    if (is_ready) {
      writer.open(*hello);
      until_met.reset();
      is_open = true;
    } else {
      const auto theirs = decode_hello(arrival.header);
      if (!theirs) throw theirs.error().within(peer);
      join(connection, theirs.value());
    }
  } catch (const Error& error) {
    fail(error);
  }
  connection.accept({}, nullptr, {});
}

void VerbsStream::Shared::join(Connection& connection, const Hello& theirs) {
  pair.join(theirs);
  hello = theirs;
  connection.send({&kReady, 1}, {}, nullptr, {});
}

void VerbsStream::stop() noexcept {
  Shared& shared = *shared_;
  if (shared.stopped.exchange(true)) return;
  withdraw(Error(Blame::Cancelled, "the connection ended"));
  std::shared_ptr<Connection> meeting;
  {
    MutexLock lock(shared.mutex);
    shared.poller.reset();
    shared.watch.reset();
    shared.events.reset();
    shared.bell.reset();
    shared.patience.reset();
    meeting.swap(shared.meeting);
  }
  if (meeting)
    meeting->close(
        shared.why_ended().value_or(Error(Blame::Cancelled, "the verbs connection ended")));
}

// --- Completions ---

bool VerbsStream::Shared::look() {
  if (stopped) return false;
  // The completions of everything that arrived before the hang-up are in the queue by now.
  const bool hears_last = hung_up;
  bool found = drain();
  if (std::exchange(has_news, false) && !stopped) {
    found = true;
    readable();
  }
  if (!stopped && writer.take_room()) {
    found = true;
    writable();
  }
  const Ending known = hung_up && !hears_last ? Ending::None : ending();
  if (!stopped && known > told) {
    told = known;
    found = true;
    readable();
    if (!stopped) writable();
  }
  return found;
}

// Arms the descriptor, then polls once more, because a completion may have arrived just before.
bool VerbsStream::Shared::park() {
  if (stopped) return true;
  if (!completions.arm() || drain()) return false;
  return !has_news && !writer.has_room() && ending() <= told;
}

bool VerbsStream::Shared::drain() {
  std::array<ibv_wc, kBatch> room;
  bool found = false;
  for (int batch = 0; batch < kBatches; ++batch) {
    try {
      const auto come = completions.poll(room);
      for (const ibv_wc& completion : come) take(completion);
      found |= !come.empty();
      if (come.size() < room.size()) break;
    } catch (const Error& error) {
      fail(error);
      break;
    }
  }
  return found;
}

void VerbsStream::Shared::take(const ibv_wc& completion) {
  if (completion.status != IBV_WC_SUCCESS) {
    const Error error = error_of(pair.path().device->library(), completion, peer);
    if (completion.status != IBV_WC_WR_FLUSH_ERR) return fail(error);
    // A flush is a consequence; its cause may follow in the queue.
    MutexLock lock(mutex);
    if (!failure) was_flushed = true;
    if (!failure) failure = error;
    return;
  }
  const char* why = nullptr;
  switch (completion.opcode) {
    case IBV_WC_RECV_RDMA_WITH_IMM:
      why = reader.wrote(completion.wr_id, be32toh(completion.imm_data));
      break;
    case IBV_WC_RECV: why = reader.noted(completion.wr_id, completion.byte_len); break;
    default: writer.sent(); return;
  }
  has_news = true;
  if (why != nullptr) fail(Error(Blame::Protocol, "verbs: " + peer + " sent " + why));
}

void VerbsStream::Shared::fail(const Error& why) {
  {
    MutexLock lock(mutex);
    if (failure && !was_flushed) return;
    failure = why;
    was_flushed = false;
  }
  log::debug(why.text());
  pair.cut();
}

void VerbsStream::Shared::hear_alarm() {
  if (const auto why = alarm.why()) fail(why->within("verbs: the connection to " + peer));
  MutexLock lock(mutex);
  events.reset();  // both stay readable for ever once the device has been removed
  watch.reset();
}

// Waits for posted ring writes and notes: they were reported done, and destroying the queue pair
// would lose them.
void VerbsStream::Shared::let_words_out() {
  if (!reader.is_placing() && !writer.is_writing()) return;
  const Deadline until = Deadline::in(kLastWords);
  while (writer.has_words_underway() && ending() != Ending::Over && !until.passed()) drain();
}

VerbsStream::Shared::Ending VerbsStream::Shared::ending() const {
  MutexLock lock(mutex);
  if (hung_up || failure || writer.failure()) return Ending::Over;
  return reader.has_finished() ? Ending::Finished : Ending::None;
}

std::optional<Error> VerbsStream::Shared::why_ended() const {
  MutexLock lock(mutex);
  if (failure) return failure;
  if (auto why = writer.failure()) return why;
  if (stopped || told == Ending::Finished)
    return Error(Blame::PeerLost, "verbs: " + peer + " closed the connection");
  if (told == Ending::Over)
    return Error(Blame::PeerLost, "verbs: " + peer + " is gone: " + why_hung_up->text());
  return std::nullopt;
}

// --- Bytes ---

std::size_t VerbsStream::write(std::span<const Bytes> pieces) noexcept {
  return shared_->stopped || shared_->hung_up ? 0 : shared_->writer.write(pieces);
}

ByteStream::Bytes VerbsStream::peek(std::size_t) noexcept { return shared_->reader.peek(); }

void VerbsStream::consume(std::size_t bytes) noexcept { shared_->reader.consume(bytes); }

std::size_t VerbsStream::read(std::span<std::byte> to) noexcept { return shared_->reader.read(to); }

// Payloads that carries() accepts must be too long for peek().
std::size_t VerbsStream::window() const { return kDirectBytes - 1; }

// The returned function keeps the registrations alive, not the queue pair.
ByteStream::Reach VerbsStream::reach() const {
  return [registrations = shared_->registrations](const Slice& memory,
                                                  cuda::Device& gpu) -> Result<Pin> {
    try {
      return Pin(registrations->gpus().of(memory, gpu));
    } catch (...) {
      return to_error(std::current_exception(), Blame::Busy);
    }
  };
}

bool VerbsStream::carries(const Slice& memory) const noexcept {
  return memory.bytes >= kDirectBytes &&
         shared_->registrations->gpus().at(memory.data, memory.bytes) != nullptr;
}

// Does not use the cache, because a shared registration may cover more memory than this.
Result<std::shared_ptr<MemoryRegion>> VerbsStream::expose(const Slice& memory) {
  if (memory.bytes == 0) return std::make_shared<MemoryRegion>(memory, RegionKey(), nullptr);
  try {
    auto registration = std::make_shared<const Registration>(shared_->pair.path().device, memory,
                                                             Access::RemoteWrite);
    const RegionKey key{reinterpret_cast<std::uintptr_t>(memory.data), memory.bytes,
                        registration->remote_key()};
    return std::make_shared<MemoryRegion>(memory, key, std::move(registration));
  } catch (const Error& error) {
    return error;
  }
}

Result<bool> VerbsStream::put(const RegionKey& to, std::uint64_t offset, Bytes piece) noexcept {
  if (to.token > std::numeric_limits<std::uint32_t>::max()) {
    return Error(Blame::Caller, "this is not the key of a verbs memory region");
  }
  if (shared_->stopped || shared_->hung_up) return false;
  return shared_->writer.put(to.address + offset, static_cast<std::uint32_t>(to.token), piece);
}

bool VerbsStream::withdraw(const Error& why) noexcept {
  shared_->let_words_out();
  bool was_destroyed = shared_->writer.withdraw();
  was_destroyed |= shared_->reader.withdraw();
  if (was_destroyed) shared_->fail(why);  // the peer learns of it over TCP
  return !shared_->pair.is_stuck();
}

std::optional<Error> VerbsStream::end() const noexcept { return shared_->why_ended(); }

std::optional<Error> VerbsStream::write_end() const noexcept {
  return shared_->told == Shared::Ending::Over ? shared_->why_ended() : std::nullopt;
}

void VerbsStream::finish_writing() noexcept { shared_->writer.finish(); }

}  // namespace weft::transport::verbs
