// SPDX-License-Identifier: Apache-2.0
#include <array>
#include <atomic>
#include <cerrno>
#include <cstring>

#include <sys/epoll.h>
#include <sys/socket.h>
#include <sys/uio.h>

#include <weft/base/make_error.h>
#include <weft/base/mutex.h>
#include <weft/transport/tcp/dial.h>
#include <weft/transport/tcp/receive_buffer.h>
#include <weft/transport/tcp/silence.h>
#include <weft/transport/tcp/tcp_stream.h>

namespace weft::transport::tcp {

namespace {

// Read-ahead for headers and small messages; longer payloads are read directly to their
// destinations.
constexpr std::size_t kWindow = 64 << 10;
constexpr std::size_t kLong = 16 << 10;  // pieces this long are worth a system call of their own
// Read-ahead behind such pieces: a header, because the next message is as long.
constexpr std::size_t kLittle = 4 << 10;
constexpr std::size_t kPieces = 64;  // in one system call

}  // namespace

// State shared by the stream and its handlers on the loop. Used by at most three threads: the
// writer's, the reader's and the loop's.
class TcpStream::Core : public std::enable_shared_from_this<Core> {
 public:
  Core(const std::shared_ptr<EventLoop>& loop, std::string peer, const Settings& settings,
       const Stripe& stripe)
      : loop_(loop),
        settings_(settings),
        which_(stripe.text()),
        peer_(std::move(peer)),
        silence_(settings.silence) {}

  ~Core();
  Core(const Core&) = delete;
  Core& operator=(const Core&) = delete;

  void await(const std::shared_ptr<Dial>& dial);
  void connected(tls::Socket socket, const std::string& peer);
  void failed(const Error& error);
  void start(EventLoop& loop, std::function<void()> readable, std::function<void()> writable);
  void stop() noexcept;
  void finish_writing() noexcept;

  std::size_t write(std::span<const Bytes> pieces) noexcept;
  Bytes peek(std::size_t wanted) noexcept;
  void consume(std::size_t bytes) noexcept;
  std::size_t read(std::span<std::byte> to) noexcept;
  std::optional<Error> end() const noexcept;
  std::optional<Error> write_end() const noexcept;
  void rest() noexcept;
  void read_through() noexcept { hung_up_ = true; }
  void write_on() noexcept;
  std::optional<Error> cut() noexcept;
  std::string peer() const;

 private:
  struct Handlers {
    std::function<void()> readable;
    std::function<void()> writable;
  };

  // The loop's part; the reader and the writer call look_after() as well.
  void watch(EventLoop& loop) WEFT_REQUIRES(mutex_);
  void on_events(std::uint32_t events);
  void call(std::function<void()> Handlers::*which);
  void look_after() noexcept;
  void look();
  // The reader's part.
  std::size_t receive(std::span<const iovec> pieces, std::size_t room) noexcept;
  void lost(int number) noexcept;
  // Called on any of the three threads.
  void break_off(int number) noexcept;
  Error reason(int number) const WEFT_REQUIRES(mutex_);

  const std::weak_ptr<EventLoop> loop_;
  const Settings settings_;
  const std::string which_;  // names this socket of the connection, for messages

  mutable Mutex mutex_;  // of members that change rarely
  std::string peer_ WEFT_GUARDED_BY(mutex_);
  std::shared_ptr<Handlers> handlers_ WEFT_GUARDED_BY(mutex_);
  EventLoop::Registration registration_ WEFT_GUARDED_BY(mutex_);
  EventLoop::Registration next_look_ WEFT_GUARDED_BY(mutex_);
  std::shared_ptr<Dial> dial_ WEFT_GUARDED_BY(mutex_);
  std::optional<Error> end_ WEFT_GUARDED_BY(mutex_);
  bool finished_ WEFT_GUARDED_BY(mutex_) = false;
  bool stopped_ WEFT_GUARDED_BY(mutex_) = false;

  tls::Socket socket_ WEFT_GUARDED_BY(mutex_);  // set once, then published by open_
  std::atomic<tls::Socket*> open_{nullptr};
  // A write took less than it was given and `writable` has not been called since.
  std::atomic<bool> short_{false};
  // errno of the end, as the writer or the loop saw it; the reader can no longer see it.
  std::atomic<int> broken_{0};
  std::atomic<bool> looking_{false};
  Silence silence_;  // used on the loop only

  // Counts events of the watch, and those after which the reader has read everything: while they
  // are equal there is nothing to read.
  std::atomic<std::uint64_t> edges_{1};
  std::uint64_t seen_ = 0;
  // The end may follow the bytes that have arrived: read on until it shows.
  std::atomic<bool> hung_up_{false};
  std::atomic<bool> idle_{false};    // the buffer's memory is not needed for now
  std::uint64_t edges_at_look_ = 0;  // used on the loop only
  ReceiveBuffer buffer_{kWindow};
  std::size_t ahead_ = kWindow;     // bytes to read ahead; they are copied once more
  bool closed_ = false;             // the reader has seen the end of the socket
  std::atomic<bool> ended_{false};  // the reader has seen the end and all bytes before it
};

// Reads the bytes that have arrived, as many as a receive buffer may hold: a socket that is closed
// with unread bytes discards the bytes that it has not sent yet.
TcpStream::Core::~Core() {
  if (!socket_ || closed_ || broken_ != 0) return;
  socket_.flush();
  std::array<std::byte, 32 << 10> nowhere;
  for (int i = 0;
       i < 256 && ::recv(socket_.get(), nowhere.data(), nowhere.size(), MSG_DONTWAIT) > 0; ++i) {
  }
}

void TcpStream::Core::await(const std::shared_ptr<Dial>& dial) {
  MutexLock lock(mutex_);
  dial_ = dial;
}

void TcpStream::Core::connected(tls::Socket socket, const std::string& peer) {
  const auto loop = loop_.lock();  // released after mutex_: it may be the last reference
  MutexLock lock(mutex_);
  if (stopped_) return;
  dial_.reset();
  peer_ = peer;
  socket_ = std::move(socket);
  tune(socket_.descriptor(), settings_);
  open_ = &socket_;
  if (finished_) socket_.finish_writing();
  if (loop && handlers_) watch(*loop);
}

void TcpStream::Core::failed(const Error& error) {
  {
    MutexLock lock(mutex_);
    dial_.reset();
    end_ = error;
    ended_ = true;
  }
  // The socket is connected, but the loop cannot watch it. End it, because nobody would report
  // room, and the connection's other sockets would not learn of the end.
  if (open_ != nullptr) break_off(error.native_code() != 0 ? error.native_code() : EIO);
  call(&Handlers::readable);
}

void TcpStream::Core::start(EventLoop& loop, std::function<void()> readable,
                            std::function<void()> writable) {
  MutexLock lock(mutex_);
  if (stopped_) return;
  handlers_ = std::make_shared<Handlers>(Handlers{std::move(readable), std::move(writable)});
  if (socket_) return watch(loop);
  if (end_) loop.post([self = shared_from_this()] { self->call(&Handlers::readable); });
}

// The first event arrives at once and reports the socket's bytes and room.
void TcpStream::Core::watch(EventLoop& loop) {
  registration_ =
      loop.watch(socket_.get(), EPOLLIN | EPOLLOUT | EPOLLRDHUP | EPOLLET,
                 [self = shared_from_this()](std::uint32_t events) { self->on_events(events); });
  // Bytes that arrived with the end of a TLS handshake have no event of their own.
  if (socket_.is_encrypted())
    loop.post([self = shared_from_this()] { self->call(&Handlers::readable); });
}

void TcpStream::Core::on_events(std::uint32_t events) {
  if ((events & (EPOLLIN | EPOLLRDHUP | EPOLLHUP | EPOLLERR)) != 0) {
    if ((events & ~static_cast<std::uint32_t>(EPOLLIN | EPOLLOUT)) != 0) hung_up_ = true;
    ++edges_;
    call(&Handlers::readable);
  }
  // Encrypted bytes that wait go first; an event tells when there is room for the rest of them.
  tls::Socket* const socket = open_;
  const bool is_open = (events & EPOLLOUT) != 0 && socket != nullptr && socket->flush();
  const bool has_room = is_open && short_.exchange(false);
  if (has_room || (events & (EPOLLHUP | EPOLLERR)) != 0) call(&Handlers::writable);
}

void TcpStream::Core::call(std::function<void()> Handlers::*which) {
  std::shared_ptr<Handlers> handlers;
  {
    MutexLock lock(mutex_);
    handlers = handlers_;
  }
  if (handlers) ((*handlers).*which)();
}

std::size_t TcpStream::Core::write(std::span<const Bytes> pieces) noexcept {
  // Set before looking for room: an event that arrives meanwhile must see it.
  short_ = true;
  tls::Socket* const socket = open_;
  if (socket == nullptr || broken_ != 0) return 0;
  std::size_t written = 0;
  while (!pieces.empty()) {
    std::array<iovec, kPieces> vectors;
    const std::size_t count = std::min(pieces.size(), kPieces);
    std::size_t bytes = 0;
    for (std::size_t i = 0; i < count; ++i) {
      vectors[i] = {const_cast<std::byte*>(pieces[i].data()), pieces[i].size()};
      bytes += pieces[i].size();
    }
    const ssize_t took = socket->send({vectors.data(), count});
    if (took < 0 && errno != EAGAIN && errno != EWOULDBLOCK) break_off(errno);
    if (took > 0) written += static_cast<std::size_t>(took);
    if (took < 0 || static_cast<std::size_t>(took) < bytes) break;
    pieces = pieces.subspan(count);
  }
  if (pieces.empty()) short_ = false;
  if (written > 0) look_after();
  return written;
}

std::size_t TcpStream::Core::receive(std::span<const iovec> pieces, std::size_t room) noexcept {
  tls::Socket* const socket = open_;
  const std::uint64_t edges = edges_;
  if (socket == nullptr || closed_ || (edges == seen_ && !hung_up_)) return 0;
  const ssize_t got = socket->receive(pieces);
  if (got < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) {
    seen_ = edges;
    return 0;
  }
  if (got <= 0) {
    lost(got == 0 ? 0 : errno);
    return 0;
  }
  // Less than there was room for: everything that had arrived.
  if (static_cast<std::size_t>(got) < room) seen_ = edges;
  return static_cast<std::size_t>(got);
}

TcpStream::Bytes TcpStream::Core::peek(std::size_t wanted) noexcept {
  while (buffer_.content().size() < std::max<std::size_t>(wanted, 1) &&
         buffer_.content().size() < kWindow) {
    if (closed_ || (edges_ == seen_ && !hung_up_)) break;
    auto room = buffer_.room(wanted);
    room = room.first(std::min(room.size(), std::max(wanted, ahead_)));
    const iovec piece{room.data(), room.size()};
    const std::size_t got = receive({&piece, 1}, room.size());
    if (got == 0) break;
    if (got == room.size()) ahead_ = std::min(ahead_ * 2, kWindow);  // small messages after all
    buffer_.filled(got);
  }
  rest();
  if (buffer_.has_memory()) look_after();
  if (closed_ && buffer_.content().size() < std::max<std::size_t>(wanted, 1)) ended_ = true;
  return buffer_.content();
}

void TcpStream::Core::rest() noexcept {
  if (idle_ && buffer_.empty() && idle_.exchange(false)) buffer_.release();
}

void TcpStream::Core::consume(std::size_t bytes) noexcept {
  buffer_.consume(bytes);
  if (closed_ && buffer_.empty()) ended_ = true;
}

std::size_t TcpStream::Core::read(std::span<std::byte> to) noexcept {
  if (to.size() >= kLong) ahead_ = kLittle;
  std::size_t moved = buffer_.take(to);
  if (moved < to.size()) {
    // Read the bytes behind it ahead in the same call, if the buffer has memory.
    const auto rest = to.subspan(moved);
    const auto room = buffer_.has_memory() ? buffer_.room(kWindow) : std::span<std::byte>();
    const auto ahead = room.first(std::min(room.size(), ahead_));
    const std::array<iovec, 2> pieces{{{rest.data(), rest.size()}, {ahead.data(), ahead.size()}}};
    const std::size_t got =
        receive(std::span(pieces).first(ahead.empty() ? 1 : 2), rest.size() + ahead.size());
    moved += std::min(got, rest.size());
    if (got > rest.size()) buffer_.filled(got - rest.size());
  }
  if (closed_ && buffer_.empty()) ended_ = true;
  return moved;
}

void TcpStream::Core::lost(int number) noexcept {
  closed_ = true;
  int none = 0;
  broken_.compare_exchange_strong(none, number);
  MutexLock lock(mutex_);
  end_ = reason(broken_);
}

// Ends the connection with this errno. The reader finds the end after the bytes that have arrived.
void TcpStream::Core::break_off(int number) noexcept {
  int none = 0;
  broken_.compare_exchange_strong(none, number);
  hung_up_ = true;
  ::shutdown(open_.load()->get(), SHUT_RDWR);
}

Error TcpStream::Core::reason(int number) const {
  const std::string connection = "the connection to " + peer_ + " (tcp" + which_ + ")";
  switch (number) {
    case 0:
    case EPIPE:
      return Error(Blame::PeerLost,
                   connection + " was closed by the peer, or its process has ended", number);
    case ECONNRESET:
      return Error(
          Blame::PeerLost,
          connection + " was reset by the peer: its process was killed or knows nothing of it",
          number);
    case ETIMEDOUT:
      return Error(Blame::PeerLost,
                   connection + " is lost: no answer from its machine for " +
                       describe(settings_.silence) + "; it is down, or the network between is cut",
                   number);
    case EPROTO:
      return Error(Blame::PeerLost, connection + " is lost: " + socket_.failure(), number);
    default: return system_error(Blame::PeerLost, connection + " is lost", number);
  }
}

std::optional<Error> TcpStream::Core::end() const noexcept {
  if (!ended_) return std::nullopt;
  MutexLock lock(mutex_);
  return end_;
}

std::optional<Error> TcpStream::Core::write_end() const noexcept {
  const int number = broken_;
  MutexLock lock(mutex_);
  if (number != 0) return end_ ? *end_ : reason(number);
  // A peer that has only ended its writing may still read.
  return socket_ ? std::nullopt : end_;
}

void TcpStream::Core::write_on() noexcept {
  short_ = true;
  const auto loop = loop_.lock();
  if (!loop) return;
  loop->post([weak = weak_from_this()] {
    const auto self = weak.lock();
    if (self && self->short_.exchange(false)) self->call(&Handlers::writable);
  });
}

std::optional<Error> TcpStream::Core::cut() noexcept {
  tls::Socket* const socket = open_;
  if (hung_up_ && broken_ == 0 && socket != nullptr) {
    int number = 0;
    socklen_t bytes = sizeof number;
    if (::getsockopt(socket->get(), SOL_SOCKET, SO_ERROR, &number, &bytes) == 0 && number != 0)
      break_off(number);
  }
  // Takes no lock while the connection is healthy.
  return broken_ != 0 || (ended_ && socket == nullptr) ? write_end() : std::nullopt;
}

std::string TcpStream::Core::peer() const {
  MutexLock lock(mutex_);
  return peer_;
}

// Makes the loop look at the connection soon, and again while there is a reason to.
void TcpStream::Core::look_after() noexcept {
  if (looking_ || looking_.exchange(true)) return;
  const auto loop = loop_.lock();
  if (!loop) return;
  MutexLock lock(mutex_);
  next_look_ = loop->at(Deadline::in(silence_.pause()), [weak = weak_from_this()] {
    if (const auto self = weak.lock()) self->look();
  });
}

void TcpStream::Core::look() {
  looking_ = false;  // reset before looking: a later write must ask for the next look
  const tls::Socket* const socket = open_;
  if (socket == nullptr) return;
  const auto finding = silence_.look(socket->get());
  if (finding == Silence::Finding::Lost) return break_off(ETIMEDOUT);
  if (finding == Silence::Finding::Underway) look_after();
  // Nothing has arrived since the last look. Call the reader: it finds nothing and frees its
  // memory.
  const bool nothing_came = edges_at_look_ == edges_;
  edges_at_look_ = edges_;
  if (!nothing_came) return look_after();
  idle_ = true;
  edges_at_look_ = ++edges_;
  call(&Handlers::readable);
}

void TcpStream::Core::finish_writing() noexcept {
  MutexLock lock(mutex_);
  if (std::exchange(finished_, true)) return;
  if (socket_) socket_.finish_writing();
}

void TcpStream::Core::stop() noexcept {
  const auto loop = loop_.lock();
  std::shared_ptr<Handlers> ended;  // destroyed without mutex_, like `loop`: both own other objects
  MutexLock lock(mutex_);
  if (std::exchange(stopped_, true)) return;
  ended = std::move(handlers_);
  registration_.reset();
  if (dial_) dial_->cancel();
  // The socket is closed when the loop drops the watch, in its next turn: make that turn come.
  if (loop) loop->post([] {});
}

TcpStream::TcpStream(const std::shared_ptr<EventLoop>& loop, tls::Socket socket,
                     const std::string& peer, const Settings& settings, const Stripe& stripe)
    : core_(std::make_shared<Core>(loop, peer, settings, stripe)) {
  core_->connected(std::move(socket), peer);
}

std::vector<std::unique_ptr<TcpStream>> TcpStream::dial(const std::shared_ptr<EventLoop>& loop,
                                                        const Address& address, Deadline deadline,
                                                        const Settings& settings,
                                                        bool refusal_ends) {
  std::vector<std::unique_ptr<TcpStream>> streams;
  std::vector<std::weak_ptr<Core>> waiting;
  for (std::size_t i = 0; i < settings.sockets; ++i) {
    const Stripe stripe{0, static_cast<std::uint16_t>(i),
                        static_cast<std::uint16_t>(settings.sockets)};
    const auto core =
        std::make_shared<Core>(loop, Address{address.hosts, {}}.text(), settings, stripe);
    streams.push_back(std::unique_ptr<TcpStream>(new TcpStream(core)));
    waiting.push_back(core);
  }
  const auto done = [waiting](Result<Dial::Made> made) {
    for (std::size_t i = 0; i < waiting.size(); ++i) {
      const auto core = waiting[i].lock();
      if (!core) continue;
      try {
        core->connected(std::move(made.value().sockets[i]), made.value().peer);
      } catch (const Error& error) {
        core->failed(error);
      }
    }
  };
  const auto call = Dial::make(loop, address, deadline, refusal_ends, settings, done);
  for (const auto& stream : streams) stream->core_->await(call);
  call->begin();
  return streams;
}

TcpStream::~TcpStream() { core_->stop(); }
std::string TcpStream::peer() const { return core_->peer(); }
void TcpStream::start(EventLoop& loop, std::function<void()> readable,
                      std::function<void()> writable) {
  core_->start(loop, std::move(readable), std::move(writable));
}
void TcpStream::stop() noexcept { core_->stop(); }
std::size_t TcpStream::write(std::span<const Bytes> pieces) noexcept {
  return core_->write(pieces);
}
TcpStream::Bytes TcpStream::peek(std::size_t wanted) noexcept { return core_->peek(wanted); }
void TcpStream::consume(std::size_t bytes) noexcept { core_->consume(bytes); }
std::size_t TcpStream::read(std::span<std::byte> to) noexcept { return core_->read(to); }
std::size_t TcpStream::window() const { return kWindow; }
std::optional<Error> TcpStream::end() const noexcept { return core_->end(); }
std::optional<Error> TcpStream::write_end() const noexcept { return core_->write_end(); }
void TcpStream::finish_writing() noexcept { core_->finish_writing(); }
void TcpStream::rest() noexcept { core_->rest(); }
void TcpStream::read_through() noexcept { core_->read_through(); }
void TcpStream::write_on() noexcept { core_->write_on(); }
std::optional<Error> TcpStream::cut() noexcept { return core_->cut(); }

}  // namespace weft::transport::tcp
