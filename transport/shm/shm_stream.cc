// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstring>

#include <sys/epoll.h>
#include <sys/socket.h>

#include <weft/base/large_copy.h>
#include <weft/base/log.h>
#include <weft/base/make_error.h>
#include <weft/base/mutex.h>
#include <weft/transport/shm/copies.h>
#include <weft/transport/shm/shm_stream.h>
#include <weft/transport/unix_socket.h>

namespace weft::transport::shm {

namespace {

// Pause before trying again to connect while the listener's queue is full, and to pass the segment
// while too many descriptors of this user are in transit, as when many ranks of a host start at
// once.
constexpr auto kRetry = std::chrono::milliseconds(1);

// A connection rests after so many looks in turn that found nothing. A loop that has only this
// connection sleeps before.
constexpr int kLooksBeforeRest = 4096;

// The other end is sending if so many bytes wait to be read.
constexpr std::uint64_t kBusyBytes = 64 << 10;

std::size_t total_of(std::span<const ByteStream::Bytes> pieces) {
  std::size_t bytes = 0;
  for (const ByteStream::Bytes& piece : pieces) bytes += piece.size();
  return bytes;
}

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
        lender(segment.lent()),
        borrower(segment.borrowed()),
        mine(segment.mine()),
        theirs(segment.theirs()) {
    if (!may_copy_once()) return;
    let_siblings_read();
    for (std::size_t i = 0; i < proof.size(); ++i) mine.proof[i] = proof[i];
    mine.proof_address.store(reinterpret_cast<std::uintptr_t>(proof.data()),
                             std::memory_order_release);
  }

  Segment segment;
  const std::string peer;
  RingWriter writer;  // used by the thread that writes
  RingReader reader;  // used on the loop
  Lender lender;      // as writer
  Borrower borrower;  // as reader
  const Proof proof = make_proof();
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
  std::optional<Error> failure WEFT_GUARDED_BY(mutex);  // why this side has ended the connection
  bool parked = false;                                  // used on the loop
  // Used on the loop. A connection that rests stays parked, until a token comes, while the loop
  // spins for others.
  bool rests = false;
  int looks_in_vain = 0;
  Ending told_ending = Ending::None;  // used on the loop
  // Used on the loop: the position up to which readable() was called, and the last lent piece.
  std::uint64_t told = 0;
  std::uint64_t told_loan = 0;
  bool has_tried_to_borrow = false;   // used on the loop
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
  // Finds out whether this process can read what the peer lends.
  void try_to_borrow();
  bool look();
  bool find_news();
  bool is_resting() const noexcept { return rests && !hung_up && !broken; }
  bool park();
  void take_tokens();
  void wake_if_parked() noexcept;
  // True if there is room that a short write did not see. There is none before the connection is
  // made.
  bool may_write() const noexcept {
    if (lender.is_out()) return lender.is_back();
    return token_socket >= 0 && (!has_written || writer.has_more_room());
  }
  bool has_news() const noexcept {
    const std::uint64_t loan = borrower.lent();
    return reader.head() != told || (loan != 0 && loan != told_loan);
  }
  std::size_t write_to_ring(std::span<const Bytes> pieces) noexcept;
  void end_without_memory() noexcept;
  // As write(), for pieces of which one may be lent, or the first is.
  std::size_t write_and_lend(std::span<const Bytes> pieces) noexcept;
  bool may_lend(Bytes piece) const noexcept;
  bool is_returned() noexcept;
  std::size_t take_back() noexcept;
  // Returns bytes that precede a lent piece. If there are none, `is_lent` says whether one follows.
  Bytes peek_before_loan(std::size_t wanted, bool& is_lent) noexcept;
  Ending ending() const noexcept {
    if (hung_up || broken) return Ending::Over;
    return reader.closed() ? Ending::Closed : Ending::None;
  }
};

ShmStream::ShmStream(Segment segment, Descriptor socket, std::string peer)
    : shared_(std::make_shared<Shared>(std::move(segment), std::move(peer))) {
  shared_->segment.let_memory_go();
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
      self->segment.let_memory_go();
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
    self->failure = error;
    self->hung_up = true;
  }
}

void ShmStream::Shared::end_unless_accepted() {
  MutexLock lock(mutex);
  if (stopped || hung_up || !segment.give_up()) return;
  failure = Error(
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
  shared_->lender.withdraw();
  // The other process notices when it has read everything that was written.
  finish_writing();
  if (shared_->token_socket >= 0) ::shutdown(shared_->token_socket, SHUT_RDWR);
}

void ShmStream::Shared::try_to_borrow() {
  const std::uint64_t address = theirs.proof_address.load(std::memory_order_acquire);
  if (address == 0) return;  // the peer has not connected yet, or lends nothing
  has_tried_to_borrow = true;
  if (!may_copy_once()) return;
  int why = ESRCH;  // as for a process of another container, which has no number here
  try {
    MutexLock lock(mutex);
    const pid_t process = check_peer(socket, "shm");
    const PeerMemory memory(process, address, {theirs.proof[0], theirs.proof[1]});
    if (process > 0) why = memory.try_to_read();
    if (why == 0) {
      borrower.open(memory);
      mine.borrows.store(1, std::memory_order_release);
      return;
    }
  } catch (const Error&) {
    return;  // the socket has ended, which look() reports
  }
  static std::atomic<bool> is_told{false};
  if (is_told.exchange(true)) return;
  log::info("shm: this process cannot read memory of " + peer + " (" + std::strerror(why) +
            "), so payloads from it are copied twice; the kernel allows it to processes of one "
            "user and container that are dumpable (see ptrace(2), and Yama's ptrace_scope)");
}

// Called in every turn. Looking costs a few cache lines that the two processes share, which a loop
// with many connections cannot afford in each turn.
bool ShmStream::Shared::look() {
  if (is_resting()) return false;
  rests = false;
  if (find_news()) {
    looks_in_vain = 0;
    return true;
  }
  if (token_socket >= 0 && !stopped && ++looks_in_vain >= kLooksBeforeRest) {
    looks_in_vain = 0;
    rests = park();
  }
  return false;
}

// Reports bytes that have arrived since the last report. Bytes that the receiver leaves in the ring
// are not reported again.
bool ShmStream::Shared::find_news() {
  if (parked) {
    parked = false;
    mine.parked.store(0, std::memory_order_relaxed);
  }
  if (!has_tried_to_borrow && token_socket >= 0) try_to_borrow();
  bool found = false;
  if (wants_room.load(std::memory_order_relaxed) && may_write() && wants_room.exchange(false)) {
    mine.wants_room.store(0, std::memory_order_relaxed);
    found = true;
    if (!stopped) writable();
  }
  if (stopped) return found;
  if (has_news()) {
    told_loan = borrower.lent();
    told = reader.head();
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
  if (stopped || is_resting()) return true;
  parked = true;
  mine.parked.store(1, std::memory_order_relaxed);
  std::atomic_thread_fence(std::memory_order_seq_cst);
  const bool may_sleep = !has_news() && ending() <= told_ending &&
                         !(wants_room.load(std::memory_order_relaxed) && may_write());
  return may_sleep;
}

void ShmStream::Shared::take_tokens() {
  char tokens[256];
  for (;;) {
    const auto count = ::recv(token_socket, tokens, sizeof tokens, MSG_DONTWAIT);
    if (count > 0) rests = false;
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

// --- Writing

std::size_t ShmStream::write(std::span<const Bytes> pieces) noexcept {
  Shared& shared = *shared_;
  if (shared.stopped || shared.hung_up) return 0;
  if (shared.token_socket < 0) {
    shared.wants_room = true;
    return 0;
  }
  shared.has_written = true;
  const bool lends =
      shared.lender.is_out() || std::any_of(pieces.begin(), pieces.end(),
                                            [&](Bytes piece) { return shared.may_lend(piece); });
  return lends ? shared.write_and_lend(pieces) : shared.write_to_ring(pieces);
}

std::size_t ShmStream::Shared::write_to_ring(std::span<const Bytes> pieces) noexcept {
  const std::size_t wanted = total_of(pieces);
  std::size_t written = writer.write(pieces);
  while (written < wanted) {
    wants_room = true;
    mine.wants_room.store(1, std::memory_order_relaxed);
    // The reader may have made room and looked for this flag before it was set.
    std::atomic_thread_fence(std::memory_order_seq_cst);
    if (!writer.has_more_room()) break;
    const std::size_t more = writer.write(behind(pieces, written));
    if (more == 0) break;
    written += more;
  }
  if (writer.broken()) broken = true;
  if (writer.growth_error() != 0) end_without_memory();
  if (written > 0) wake_if_parked();
  return written;
}

// The ring cannot grow, so a long message would never arrive whole.
void ShmStream::Shared::end_without_memory() noexcept {
  if (hung_up) return;
  MutexLock lock(mutex);
  failure = system_error(Blame::Busy,
                         "shm: not enough memory for " + std::to_string(kRingBytes >> 10) +
                             " KiB more of memory shared with " + peer +
                             " (see the memory limit of the container)",
                         writer.growth_error());
  hung_up = true;
  ::shutdown(token_socket, SHUT_RDWR);  // wakes the loops of both sides
}

bool ShmStream::Shared::may_lend(Bytes piece) const noexcept {
  if (piece.size() <= kRingBytes || theirs.borrows.load(std::memory_order_relaxed) == 0 ||
      lender.has_failed() || lender.has_withdrawn())
    return false;
  const OneCopy faster = one_copy();
  const bool receives = reader.unread() >= kBusyBytes || borrower.lent() != 0;
  return faster.one_way || (faster.both_ways && receives);
}

std::size_t ShmStream::Shared::write_and_lend(std::span<const Bytes> pieces) noexcept {
  std::size_t taken = 0;
  if (lender.is_out()) {
    if (!is_returned()) return 0;
    taken = take_back();
  }
  while (!broken) {
    const std::vector<Bytes> rest = behind(pieces, taken);
    const auto lent =
        std::find_if(rest.begin(), rest.end(), [this](Bytes piece) { return may_lend(piece); });
    const std::span<const Bytes> before(rest.begin(), lent);
    const std::size_t written = write_to_ring(before);
    taken += written;
    if (written < total_of(before) || lent == rest.end()) break;
    lender.lend(*lent);
    wake_if_parked();
    if (!is_returned()) break;
    taken += take_back();
  }
  return taken;
}

// True if the lent piece is back; if not, look() reports when it is.
bool ShmStream::Shared::is_returned() noexcept {
  if (lender.is_back()) return true;
  wants_room = true;
  std::atomic_thread_fence(std::memory_order_seq_cst);
  return lender.is_back();
}

// Returns how many bytes of the piece the peer has read. The rest goes through the ring.
std::size_t ShmStream::Shared::take_back() noexcept {
  const auto read = lender.take_back();
  if (!read) broken = true;
  if (lender.has_failed())
    log::info("shm: " + peer +
              " could not read a payload in this process's memory; this one and "
              "further ones are copied twice");
  return read.value_or(0);
}

bool ShmStream::withdraw(const Error& /*why*/) noexcept {
  shared_->lender.withdraw();
  return true;
}

// --- Reading

ByteStream::Bytes ShmStream::Shared::peek_before_loan(std::size_t wanted, bool& is_lent) noexcept {
  is_lent = false;
  if (borrower.has_copied()) return borrower.peek();
  Bytes bytes = reader.peek(wanted);
  if (bytes.empty() && borrower.lent() != 0) {
    bytes = reader.peek(wanted);  // what was written before the piece was lent
    is_lent = bytes.empty();
  }
  if (reader.broken()) broken = true;
  return bytes;
}

ByteStream::Bytes ShmStream::peek(std::size_t wanted) noexcept {
  bool is_lent = false;
  const Bytes bytes = shared_->peek_before_loan(wanted, is_lent);
  if (!is_lent) return bytes;
  const Bytes copied = shared_->borrower.peek();
  if (shared_->borrower.take_returned()) shared_->wake_if_parked();
  return copied;
}

void ShmStream::consume(std::size_t bytes) noexcept {
  if (shared_->borrower.has_copied()) return shared_->borrower.consume(bytes);
  shared_->reader.consume(bytes);
  if (!shared_->reader.has_shown_room()) return;
  std::atomic_thread_fence(std::memory_order_seq_cst);
  if (shared_->theirs.wants_room.load(std::memory_order_relaxed) != 0) shared_->wake_if_parked();
}

std::size_t ShmStream::read(std::span<std::byte> to) noexcept {
  std::size_t copied = 0;
  while (copied < to.size()) {
    bool is_lent = false;
    const Bytes come = shared_->peek_before_loan(1, is_lent);
    if (is_lent) {
      copied += shared_->borrower.read(to.subspan(copied));
      if (shared_->borrower.take_returned()) shared_->wake_if_parked();
      break;
    }
    const std::size_t count = std::min(come.size(), std::min(to.size() - copied, kRingBytes / 32));
    if (count == 0) break;
    copy_part(to.data() + copied, come.data(), count, to.size());
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
    if (shared.failure) return shared.failure;
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
