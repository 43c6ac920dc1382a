// SPDX-License-Identifier: Apache-2.0
#include <map>
#include <mutex>
#include <utility>

#include <sys/epoll.h>

#include <weft/base/log.h>
#include <weft/transport/mesh/mesh.h>
#include <weft/transport/registry.h>
#include <weft/transport/shm/shm_stream.h>
#include <weft/transport/stream/stream_connection.h>
#include <weft/transport/unix_socket.h>

namespace weft::transport::shm {

namespace {

// Time for a process that has connected to pass its segment.
constexpr auto kHandshake = std::chrono::seconds(10);
// Pause before accepting again after descriptors ran out.
constexpr auto kPause = std::chrono::milliseconds(50);
constexpr std::size_t kMaxHandshakes = 256;

Capabilities capabilities_of_rings() {
  Capabilities capabilities;
  capabilities.inline_bytes = 64 << 10;
  return capabilities;
}

class ShmListener final : public Listener {
 public:
  explicit ShmListener(const ListenOptions& options) : inner_(std::make_shared<Inner>(options)) {
    Inner::watch(inner_);
  }
  ~ShmListener() override { inner_->close(); }
  std::string address() const override { return inner_->address.text(); }

 private:
  struct Handshake {
    Descriptor socket;
    EventLoop::Registration watch;
    EventLoop::Registration timer;
  };

  struct Inner {
    explicit Inner(const ListenOptions& options)
        : loop(options.loop),
          accepted(options.accepted),
          tell(options.short_of_something),
          address(Address::here()),
          listening(listen_for_this_user("shm")) {
      address.descriptor = listening.name.get();
    }

    static void watch(const std::shared_ptr<Inner>& self);
    static void accept(const std::shared_ptr<Inner>& self);
    void say_short(const Error& why);
    static void rest(const std::shared_ptr<Inner>& self, EventLoop& loop, const Error& why);
    static void receive(const std::shared_ptr<Inner>& self, int key);
    void close();

    const std::weak_ptr<EventLoop> loop;
    const std::function<void(std::shared_ptr<Connection>)> accepted;
    const std::function<void(const Error&)> tell;
    Address address;

    // Guards the members that follow. `accepted` is called with it locked, and may end the
    // listener.
    std::recursive_mutex mutex;
    ListeningSocket listening;
    bool closed = false;
    bool is_short_of_something = false;    // and has reported it
    EventLoop::Registration registration;  // of accepting, or of the pause
    std::map<int, Handshake> handshakes;
  };

  std::shared_ptr<Inner> inner_;
};

void ShmListener::Inner::watch(const std::shared_ptr<Inner>& self) {
  std::lock_guard lock(self->mutex);
  const auto loop = self->loop.lock();
  if (self->closed || !loop) return;
  try {
    self->registration = loop->watch(self->listening.socket.get(), EPOLLIN,
                                     [self](std::uint32_t) { Inner::accept(self); });
  } catch (const Error& error) {
    rest(self, *loop, error);
  }
}

void ShmListener::Inner::say_short(const Error& why) {
  if (std::exchange(is_short_of_something, true)) return;
  log::warn(why.text() + "; trying again");
  if (tell) tell(why);
}

// Stops watching for a while: a waiting peer keeps the socket readable, so the loop would spin.
void ShmListener::Inner::rest(const std::shared_ptr<Inner>& self, EventLoop& loop,
                              const Error& why) {
  self->say_short(why);
  self->registration = loop.at(Deadline::in(kPause), [self] { watch(self); });
}

void ShmListener::Inner::accept(const std::shared_ptr<Inner>& self) {
  std::lock_guard lock(self->mutex);
  const auto loop = self->loop.lock();
  if (self->closed || !loop) return;
  try {
    if (self->handshakes.size() >= kMaxHandshakes)
      throw Error(Blame::Busy, "shm: " + std::to_string(kMaxHandshakes) +
                                   " processes have connected to this one and not passed a "
                                   "segment yet; others wait until they have, or are dropped");
    Descriptor socket = accept_from(self->listening.socket, "shm");
    if (!socket) return;
    const int key = socket.get();
    check_peer(socket, "shm");
    Handshake& handshake = self->handshakes[key];
    handshake.socket = std::move(socket);
    handshake.timer = loop->at(Deadline::in(kHandshake), [self, key] {
      std::lock_guard guard(self->mutex);
      self->handshakes.erase(key);
    });
    try {
      handshake.watch =
          loop->watch(key, EPOLLIN, [self, key](std::uint32_t) { receive(self, key); });
    } catch (const Error&) {
      self->handshakes.erase(key);
      throw;
    }
    self->is_short_of_something = false;
  } catch (const Error& error) {
    if (error.blame() == Blame::Busy) return rest(self, *loop, error);
    log::warn(error.what());
  }
}

void ShmListener::Inner::receive(const std::shared_ptr<Inner>& self, int key) {
  std::lock_guard lock(self->mutex);
  const auto found = self->handshakes.find(key);
  const auto loop = self->loop.lock();
  if (self->closed || !loop || found == self->handshakes.end()) return;
  try {
    auto segment = Segment::take_from(found->second.socket);
    if (!segment) return;
    const pid_t process = check_peer(found->second.socket, "shm");
    if (!segment->accept()) {
      log::debug("shm: process " + std::to_string(process) + " gave up waiting to be accepted");
      self->handshakes.erase(found);
      return;
    }
    found->second.watch.reset();
    Descriptor socket = std::move(found->second.socket);
    self->handshakes.erase(found);
    auto stream = std::make_unique<ShmStream>(std::move(*segment), std::move(socket),
                                              "process " + std::to_string(process));
    self->accepted(connect_over(std::move(stream), capabilities_of_rings(), "shm", loop));
  } catch (const Error& error) {
    error.blame() == Blame::Busy ? self->say_short(error) : log::warn(error.what());
    self->handshakes.erase(key);
  }
}

void ShmListener::Inner::close() {
  std::lock_guard lock(mutex);
  closed = true;
  registration.reset();
  handshakes.clear();
  listening = {};  // later connections are refused at once
}

class Shm final : public Transport, public Connector {
 public:
  explicit Shm(Address here) : here_(std::move(here)) {}

  std::string_view name() const override { return "shm"; }
  Connector* connector() override { return this; }
  bool reaches(DeviceType type) const override { return type == DeviceType::Host; }
  std::shared_ptr<Communicator> join(const JoinOptions& options) override {
    return mesh::join(*this, options, mesh::choose_in_cache);
  }

  Capabilities capabilities() const override { return capabilities_of_rings(); }
  int preference() const override { return 300; }

  std::optional<std::string> why_unreachable(const std::string& text) const override {
    try {
      const Address address = Address::parse(text);
      if (address.host != here_.host) return "it is on another host";
      if (address.processes != here_.processes)
        return "it is in another container: the process namespaces differ";
      return why_closed_to_this_one(address.process, address.descriptor);
    } catch (const Error& error) {
      return error.text();
    }
  }

  std::string host_of(const std::string& text) const override {
    try {
      const Address address = Address::parse(text);
      const bool is_here = address.host == here_.host && address.processes == here_.processes;
      if (is_here && why_unreachable(text)) return {};
      return address.host + "/" + address.processes;
    } catch (const Error&) {
      return {};
    }
  }

  std::unique_ptr<Listener> listen(const ListenOptions& options) override {
    return std::make_unique<ShmListener>(options);
  }

  std::shared_ptr<Connection> connect(const std::string& text,
                                      const ConnectOptions& options) override {
    if (const auto why = why_unreachable(text)) {
      throw Error(Blame::Caller, "shm: cannot connect to " + text + ": " + *why +
                                     "; tcp connects processes that share no memory");
    }
    auto stream = std::make_unique<ShmStream>(Address::parse(text), options.deadline);
    return connect_over(std::move(stream), capabilities_of_rings(), "shm", options.loop);
  }

 private:
  const Address here_;
};

}  // namespace

Result<std::shared_ptr<Transport>> open() {
  try {
    return std::shared_ptr<Transport>(std::make_shared<Shm>(Address::here()));
  } catch (const Error& error) {
    return error;
  }
}

}  // namespace weft::transport::shm
