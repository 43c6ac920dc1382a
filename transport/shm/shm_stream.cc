// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstring>

#include <sys/epoll.h>
#include <sys/socket.h>

#include <weft/base/make_error.h>
#include <weft/base/mutex.h>
#include <weft/transport/shm/shm_stream.h>
#include <weft/transport/unix_socket.h>

namespace weft::transport::shm {

namespace {

// Pause before trying again to connect while the listener's queue is full, and to pass the segment
// while too many descriptors of this user are in transit, as when many ranks of a host start at
// once.
constexpr auto kRetry = std::chrono::milliseconds(1);

// Returns the pieces without their first `skip` bytes.
std::vector<ByteStream::Bytes> behind(std::span<const ByteStream::Bytes> pieces, std::size_t skip) {
  std::vector<ByteStream::Bytes> rest;
  for (const ByteStream::Bytes& piece : pieces) {
    const std::size_t gone = std::min(skip, piece.size());
    skip -= gone;
    if (gone < piece.size()) rest.push_back(piece.subspan(gone));
  }
  return rest;
}

}  // namespace

struct ShmStream::Shared {
  // How the connection has ended. Closed: the peer writes no more. Over: the peer is gone, and
  // nothing can be written either.
  enum class Ending { None, Closed, Over };

  Shared(Segment made, std::string who)
      : segment(std::move(made)),
        peer(std::move(who)),
        writer(segment.writer()),
        reader(segment.reader()),
        mine(segment.mine()),
        theirs(segment.theirs()) {}

  const Segment segment;
  const std::string peer;
  RingWriter writer;  // used by the thread that writes
  RingReader reader;  // used on the loop
  SideControl& mine;
  SideControl& theirs;

  std::function<void()> readable;
  std::function<void()> writable;
  Mutex mutex;
  Descriptor socket WEFT_GUARDED_BY(mutex);
  EventLoop::Registration poller WEFT_GUARDED_BY(mutex);
  EventLoop::Registration watch WEFT_GUARDED_BY(mutex);
  // Of the next attempt to connect, then of the deadline for being accepted.
  EventLoop::Registration timer WEFT_GUARDED_BY(mutex);
  std::optional<Error> not_connected WEFT_GUARDED_BY(mutex);  // why connecting failed
  bool parked = false;                                        // used on the loop
  Ending told_ending = Ending::None;                          // used on the loop
  std::uint64_t told = 0;  // used on the loop: the position up to which readable() was called
  std::atomic<int> token_socket{-1};  // the socket's number, once it is connected
  std::atomic<bool> stopped{false};
  std::atomic<bool> wants_room{false};   // the last write took less than it was given
  std::atomic<bool> hung_up{false};      // the socket has ended
  std::atomic<bool> has_written{false};  // or tried to, since it was connected
  std::atomic<bool> broken{false};       // the peer's positions are impossible

  // Connects the socket if that is still to be done, passes the segment, and watches the socket.
  static void connect(const std::shared_ptr<Shared>& self, EventLoop& loop, const Address& address,
                      Deadline deadline) WEFT_REQUIRES(self->mutex);
  static void watch_socket(const std::shared_ptr<Shared>& self, EventLoop& loop)
      WEFT_REQUIRES(self->mutex);
  // Called when the deadline has passed.
  void end_unless_accepted();
  bool look();
  bool park();
  void take_tokens();
  void wake_if_parked() noexcept;
  // True if there is room that a short write did not see. There is none before the connection is
  // made.
  bool may_write() const noexcept {
    return token_socket >= 0 && (!has_written || writer.has_more_room());
  }
  Ending ending() const noexcept {
    if (hung_up || broken) return Ending::Over;
    return reader.closed() ? Ending::Closed : Ending::None;
  }
};

ShmStream::ShmStream(Segment segment, Descriptor socket, std::string peer)
    : shared_(std::make_shared<Shared>(std::move(segment), std::move(peer))) {
  shared_->socket = std::move(socket);
  shared_->token_socket = shared_->socket.get();
}

ShmStream::ShmStream(const Address& address, Deadline deadline)
    : shared_(
          std::make_shared<Shared>(Segment::make(), "process " + std::to_string(address.process))),
      address_(address),
      deadline_(deadline) {}

ShmStream::~ShmStream() { stop(); }

std::string ShmStream::peer() const { return shared_->peer; }

void ShmStream::start(EventLoop& loop, std::function<void()> readable,
                      std::function<void()> writable) {
  shared_->readable = std::move(readable);
  shared_->writable = std::move(writable);
  MutexLock lock(shared_->mutex);
  if (address_) {
    Shared::connect(shared_, loop, *address_, deadline_);
  } else {
    Shared::watch_socket(shared_, loop);
  }
  shared_->poller = loop.poll([shared = shared_] { return shared->look(); },
                              [shared = shared_] { return shared->park(); });
}

void ShmStream::Shared::connect(const std::shared_ptr<Shared>& self, EventLoop& loop,
                                const Address& address, Deadline deadline) {
  try {
    if (auto connected =
            self->socket ? std::nullopt : connect_to(address.process, address.descriptor, "shm")) {
      if (check_peer(*connected, "shm") != address.process) {
        throw Error(Blame::PeerLost, "shm: the socket of process " +
                                         std::to_string(address.process) +
                                         " belongs to another process by now");
      }
      self->socket = std::move(*connected);
    }
    if (self->socket && self->segment.pass_to(self->socket)) {
      self->token_socket = self->socket.get();
      watch_socket(self, loop);
      // The kernel has taken the segment, but a process that is stopped or has a stuck loop will
      // never accept it.
      if (!deadline.is_never())
        self->timer = loop.at(deadline, [self] { self->end_unless_accepted(); });
      return;
    }
    if (deadline.passed()) {
      throw Error(
          Blame::Timeout,
          "shm: " + self->peer +
              (self->socket ? " cannot be passed a segment: its socket is full, or too many "
                              "descriptors are in transit (raise ulimit -n of this process)"
                            : " accepts no connection: it is stopped, or its event loop is stuck"));
    }
    self->timer = loop.at(Deadline::in(kRetry), [self, &loop, address, deadline] {
      MutexLock lock(self->mutex);
      if (!self->stopped) connect(self, loop, address, deadline);
    });
  } catch (const Error& error) {
    self->not_connected = error;
    self->hung_up = true;
  }
}

void ShmStream::Shared::end_unless_accepted() {
  MutexLock lock(mutex);
  if (stopped || hung_up || !segment.give_up()) return;
  not_connected = Error(
      Blame::Timeout,
      "shm: " + peer + " listens, but has not accepted by the deadline; it is stopped or busy");
  hung_up = true;  // look() reports it
}

void ShmStream::Shared::watch_socket(const std::shared_ptr<Shared>& self, EventLoop& loop) {
  self->watch = loop.watch(self->socket.get(), EPOLLIN | EPOLLRDHUP,
                           [self](std::uint32_t) { self->take_tokens(); });
}

void ShmStream::stop() noexcept {
  if (shared_->stopped.exchange(true)) return;
  {
    MutexLock lock(shared_->mutex);
    shared_->poller.reset();
    shared_->watch.reset();
    shared_->timer.reset();
  }
  // The other process notices when it has read everything that was written.
  finish_writing();
  if (shared_->token_socket >= 0) ::shutdown(shared_->token_socket, SHUT_RDWR);
}

// Called in every turn. Reports bytes that have arrived since the last report. Bytes that the
// receiver leaves in the ring are not reported again.
bool ShmStream::Shared::look() {
  if (parked) {
    parked = false;
    mine.parked.store(0, std::memory_order_relaxed);
  }
  bool found = false;
  if (wants_room.load(std::memory_order_relaxed) && may_write() && wants_room.exchange(false)) {
    mine.wants_room.store(0, std::memory_order_relaxed);
    found = true;
    if (!stopped) writable();
  }
  if (stopped) return found;
  if (const std::uint64_t head = reader.head(); head != told) {
    told = head;
    found = true;
    readable();
  } else if (const Ending known = ending(); known > told_ending) {
    told_ending = known;
    found = true;
    readable();
    if (!stopped) writable();
  }
  return found;
}

// From here on the other side sends a byte. It may have checked just before, so look once more.
bool ShmStream::Shared::park() {
  if (stopped) return true;
  parked = true;
  mine.parked.store(1, std::memory_order_relaxed);
  std::atomic_thread_fence(std::memory_order_seq_cst);
  const bool may_sleep = reader.head() == told && ending() <= told_ending &&
                         !(wants_room.load(std::memory_order_relaxed) && may_write());
  return may_sleep;
}

void ShmStream::Shared::take_tokens() {
  char tokens[256];
  for (;;) {
    const auto count = ::recv(token_socket, tokens, sizeof tokens, MSG_DONTWAIT);
    if (count == static_cast<ssize_t>(sizeof tokens)) continue;
    if (count > 0 || (count < 0 && (errno == EAGAIN || errno == EINTR))) return;
    hung_up = true;  // look() reports it in the next turn
    MutexLock lock(mutex);
    watch.reset();  // otherwise an ended socket would be reported in every turn
    return;
  }
}

void ShmStream::Shared::wake_if_parked() noexcept {
  std::atomic_thread_fence(std::memory_order_seq_cst);
  if (theirs.parked.load(std::memory_order_relaxed) == 0 ||
      theirs.parked.exchange(0, std::memory_order_relaxed) == 0)
    return;
  const char token = 0;
  // A full socket means that tokens are waiting already; an ended one is noticed by the loop.
  [[maybe_unused]] const auto sent = ::send(token_socket, &token, 1, MSG_DONTWAIT | MSG_NOSIGNAL);
}

std::size_t ShmStream::write(std::span<const Bytes> pieces) noexcept {
  Shared& shared = *shared_;
  if (shared.stopped || shared.hung_up) return 0;
  if (shared.token_socket < 0) {
    shared.wants_room = true;
    return 0;
  }
  shared.has_written = true;
  std::size_t wanted = 0;
  for (const Bytes& piece : pieces) wanted += piece.size();
  std::size_t written = shared.writer.write(pieces);
  while (written < wanted) {
    shared.wants_room = true;
    shared.mine.wants_room.store(1, std::memory_order_relaxed);
    // The reader may have made room and looked for this flag before it was set.
    std::atomic_thread_fence(std::memory_order_seq_cst);
    if (!shared.writer.has_more_room()) break;
    const std::size_t more = shared.writer.write(behind(pieces, written));
    if (more == 0) break;
    written += more;
  }
  if (shared.writer.broken()) shared.broken = true;
  if (written > 0) shared.wake_if_parked();
  return written;
}

ByteStream::Bytes ShmStream::peek(std::size_t wanted) noexcept {
  const Bytes bytes = shared_->reader.peek(wanted);
  if (shared_->reader.broken()) shared_->broken = true;
  return bytes;
}

void ShmStream::consume(std::size_t bytes) noexcept {
  shared_->reader.consume(bytes);
  if (!shared_->reader.has_shown_room()) return;
  std::atomic_thread_fence(std::memory_order_seq_cst);
  if (shared_->theirs.wants_room.load(std::memory_order_relaxed) != 0) shared_->wake_if_parked();
}

std::size_t ShmStream::read(std::span<std::byte> to) noexcept {
  std::size_t copied = 0;
  while (copied < to.size()) {
    const Bytes come = peek(1);
    const std::size_t count = std::min(come.size(), std::min(to.size() - copied, kRingBytes / 32));
    if (count == 0) break;
    std::memcpy(to.data() + copied, come.data(), count);
    consume(count);
    copied += count;
  }
  return copied;
}

std::optional<Error> ShmStream::end() const noexcept {
  Shared& shared = *shared_;
  // The common case: end() is called after every message.
  if (!shared.stopped && shared.ending() == Shared::Ending::None) return std::nullopt;
  {
    MutexLock lock(shared.mutex);
    if (shared.not_connected) return shared.not_connected;
  }
  if (shared.broken) {
    return Error(Blame::Protocol,
                 "shm: " + shared.peer + " wrote impossible positions into the shared segment");
  }
  if (shared.stopped || shared.reader.closed())
    return Error(Blame::PeerLost, "shm: " + shared.peer + " closed the connection");
  if (shared.hung_up) return Error(Blame::PeerLost, "shm: " + shared.peer + " is gone");
  return std::nullopt;
}

std::optional<Error> ShmStream::write_end() const noexcept {
  return shared_->hung_up || shared_->broken ? end() : std::nullopt;
}

void ShmStream::finish_writing() noexcept {
  shared_->writer.close();
  shared_->wake_if_parked();
}

}  // namespace weft::transport::shm
