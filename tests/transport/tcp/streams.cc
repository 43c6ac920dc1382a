// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cerrno>
#include <csignal>
#include <span>

#include <arpa/inet.h>
#include <netinet/in.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <weft/base/make_error.h>
#include <weft/tests/transport/tcp/streams.h>

namespace weft::transport::tcp {

std::string pattern(std::size_t bytes, unsigned seed) {
  std::string made(bytes, '\0');
  std::uint32_t state = seed * 2654435761u + 1;
  for (char& letter : made) {
    state = state * 1664525u + 1013904223u;
    letter = static_cast<char>(state >> 24);
  }
  return made;
}

void wait_until(EventLoop& loop, const std::function<bool()>& so, const std::string& what) {
  if (!loop.drive(so, patience())) throw Error(Blame::Timeout, "did not happen: " + what);
}

void End::Core::write() {
  std::lock_guard lock(mutex);
  while (!unsent.empty()) {
    std::vector<ByteStream::Bytes> pieces;
    std::size_t offered = 0;
    for (std::size_t i = 0; i < unsent.size() && i < 1000; ++i) {
      const std::size_t skip = i == 0 ? offset : 0;
      pieces.push_back(std::as_bytes(std::span(unsent[i])).subspan(skip));
      offered += pieces.back().size();
    }
    std::size_t written = stream->write(pieces);
    const bool all = written == offered;
    while (written > 0 && written >= unsent.front().size() - offset) {
      written -= unsent.front().size() - offset;
      offset = 0;
      unsent.pop_front();
    }
    offset += written;
    if (!all) return;
  }
}

void End::Core::read() {
  std::lock_guard lock(mutex);
  if (held || end) return;
  // Alternately, as headers and payloads are read.
  for (bool peeks = true;; peeks = !peeks) {
    if (peeks) {
      const auto seen = stream->peek(7);
      if (seen.empty()) break;
      const std::size_t some = std::min<std::size_t>(seen.size(), 1000);
      received.append(reinterpret_cast<const char*>(seen.data()), some);
      stream->consume(some);
    } else {
      std::string part(100'000, '\0');
      const std::size_t got = stream->read(std::as_writable_bytes(std::span(part)));
      if (got == 0) break;
      received.append(part, 0, got);
    }
  }
  if (!end) end = stream->end();
}

End::End(std::shared_ptr<EventLoop> loop, std::unique_ptr<ByteStream> stream)
    : loop_(std::move(loop)), core_(std::make_shared<Core>()) {
  core_->stream = std::move(stream);
  core_->stream->start(
      *loop_,
      [weak = std::weak_ptr(core_)] {
        if (const auto core = weak.lock()) core->read();
      },
      [weak = std::weak_ptr(core_)] {
        if (const auto core = weak.lock()) core->write();
      });
}

End::~End() { core_->stream->stop(); }

void End::send(const std::string& bytes, std::size_t piece) {
  {
    std::lock_guard lock(core_->mutex);
    for (std::size_t begin = 0; begin < bytes.size(); begin += piece == 0 ? bytes.size() : piece) {
      core_->unsent.push_back(bytes.substr(begin, piece == 0 ? std::string::npos : piece));
    }
  }
  core_->write();
}

void End::finish_writing() {
  wait_sent();
  core_->stream->finish_writing();
}

void End::hold(bool held) {
  {
    std::lock_guard lock(core_->mutex);
    core_->held = held;
  }
  if (!held) loop_->post([core = core_] { core->read(); });
}

std::size_t End::received() const {
  std::lock_guard lock(core_->mutex);
  return core_->received.size();
}

std::string End::take(std::size_t bytes) {
  wait_until(
      *loop_, [&] { return received() >= bytes || ended(); },
      std::to_string(bytes) + " bytes arrive");
  std::lock_guard lock(core_->mutex);
  const std::string taken = core_->received.substr(0, bytes);
  core_->received.erase(0, bytes);
  return taken;
}

void End::wait_sent() {
  const auto sent = [core = core_] {
    std::lock_guard lock(core->mutex);
    return core->unsent.empty();
  };
  wait_until(*loop_, sent, "everything is written");
}

bool End::ended() const {
  std::lock_guard lock(core_->mutex);
  return core_->end.has_value();
}

Error End::wait_end() {
  wait_until(
      *loop_, [this] { return ended(); }, "the stream ends");
  std::lock_guard lock(core_->mutex);
  return *core_->end;
}

Lobby::Lobby(std::shared_ptr<EventLoop> loop, const std::string& interface_address,
             const Settings& settings)
    : loop_(std::move(loop)), core_(std::make_shared<Core>()) {
  listener_ = std::make_unique<TcpListener>(loop_, interface_address, settings,
                                            [core = core_](std::unique_ptr<ByteStream> stream) {
                                              std::lock_guard lock(core->mutex);
                                              core->streams.push_back(std::move(stream));
                                            });
}

Lobby::~Lobby() = default;

int Lobby::port() const { return Address::parse(address()).hosts.front().port; }

std::size_t Lobby::waiting() const {
  std::lock_guard lock(core_->mutex);
  return core_->streams.size();
}

std::unique_ptr<ByteStream> Lobby::take() {
  wait_until(
      *loop_, [this] { return waiting() > 0; }, "a peer connects");
  std::lock_guard lock(core_->mutex);
  auto first = std::move(core_->streams.front());
  core_->streams.pop_front();
  return first;
}

std::unique_ptr<ByteStream> dial(const std::shared_ptr<EventLoop>& loop, const std::string& address,
                                 Deadline deadline, const Settings& settings, bool refusal_ends) {
  return as_one(TcpStream::dial(loop, Address::parse(address), deadline, settings, refusal_ends));
}

bool may_have_descriptors(std::size_t count) {
  rlimit limit{};
  ::getrlimit(RLIMIT_NOFILE, &limit);
  if (limit.rlim_cur >= count) return true;
  limit.rlim_cur = std::min<rlim_t>(limit.rlim_max, count);
  return ::setrlimit(RLIMIT_NOFILE, &limit) == 0 && limit.rlim_cur >= count;
}

std::pair<Descriptor, Descriptor> socket_pair() {
  int ends[2];
  if (::socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0, ends) != 0) {
    throw system_error(Blame::Busy, "socketpair", errno);
  }
  return {Descriptor(ends[0]), Descriptor(ends[1])};
}

std::pair<Descriptor, Descriptor> tcp_pair() {
  const Descriptor door = reserved_port();
  ::listen(door.get(), 1);
  Descriptor mine = raw_connect(local_end(door).port());
  Descriptor theirs(::accept4(door.get(), nullptr, nullptr, SOCK_NONBLOCK | SOCK_CLOEXEC));
  if (!theirs) throw system_error(Blame::Busy, "accept", errno);
  return {std::move(mine), std::move(theirs)};
}

Descriptor raw_connect(int port) {
  Descriptor socket(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  const auto address = numeric_address({"127.0.0.1", port});
  if (!socket || ::connect(socket.get(), address->get(), address->length) != 0) {
    throw system_error(Blame::PeerLost, "connect", errno);
  }
  return socket;
}

Descriptor reserved_port() {
  Descriptor socket(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  const auto address = numeric_address({"127.0.0.1", 0});
  if (!socket || ::bind(socket.get(), address->get(), address->length) != 0) {
    throw system_error(Blame::Busy, "bind", errno);
  }
  return socket;
}

Child::Child(const std::function<void(int)>& body) {
  int ends[2];
  if (::socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends) != 0)
    throw system_error(Blame::Busy, "socketpair", errno);
  process_ = ::fork();
  if (process_ < 0) throw system_error(Blame::Busy, "fork", errno);
  if (process_ == 0) {
    ::prctl(PR_SET_PDEATHSIG, SIGKILL);
    ::close(ends[0]);
    ::alarm(60);
    try {
      body(ends[1]);
    } catch (const std::exception& error) {
      std::fprintf(stderr, "child: %s\n", error.what());
      ::_exit(1);
    }
    ::_exit(testing::Test::HasFailure() ? 1 : 0);
  }
  ::close(ends[1]);
  socket_ = Descriptor(ends[0]);
}

Child::~Child() {
  if (process_ <= 0) return;
  signal(SIGKILL);
  ::waitpid(process_, nullptr, 0);
}

char Child::hear() const {
  char letter = 0;
  return ::read(socket_.get(), &letter, 1) == 1 ? letter : '\0';
}

void Child::say(char letter) const {
  [[maybe_unused]] const auto written = ::write(socket_.get(), &letter, 1);
}

void Child::signal(int number) const { ::kill(process_, number); }

int Child::wait() {
  int status = 0;
  ::waitpid(std::exchange(process_, -1), &status, 0);
  return WIFEXITED(status) ? WEXITSTATUS(status) : -WTERMSIG(status);
}

}  // namespace weft::transport::tcp
