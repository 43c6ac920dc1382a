#include <atomic>
#include <cerrno>
#include <cstring>
#include <random>
#include <set>

#include <fcntl.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <weft/base/log.h>
#include <weft/engine/group/address.h>
#include <weft/engine/group/membership.h>
#include <weft/engine/group/store.h>

namespace weft::group {

namespace {

constexpr auto kHelloPatience = std::chrono::seconds(10);
constexpr std::size_t kMaxUnsent = 4u << 20;  // a peer that does not read for so long is gone

// A peer that vanishes without a word (cable, power) is noticed after about 15 s.
void keep_alive(int socket) {
  const auto set = [socket](int level, int name, int value) { setsockopt(socket, level, name, &value, sizeof value); };
  set(SOL_SOCKET, SO_KEEPALIVE, 1);
  set(IPPROTO_TCP, TCP_KEEPIDLE, 5);
  set(IPPROTO_TCP, TCP_KEEPINTVL, 3);
  set(IPPROTO_TCP, TCP_KEEPCNT, 3);
  set(IPPROTO_TCP, TCP_USER_TIMEOUT, 15'000);
  set(IPPROTO_TCP, TCP_NODELAY, 1);
}

std::string random_token() {
  std::random_device device;
  std::string token;
  for (int i = 0; i < 4; ++i) token += std::to_string(device()) + "-";
  return token;
}

std::string member_key(int rank) { return "weft/member/" + std::to_string(rank); }

}  // namespace

// One connection.
struct Membership::Peer {
  Peer(int number, int ranks) : socket(number), reader(ranks) {}
  ~Peer() {
    watch.reset();
    ::close(socket);
  }
  Peer(const Peer&) = delete;
  Peer& operator=(const Peer&) = delete;

  const int socket;
  int rank = -1;  // unknown until its Hello
  FrameReader reader;
  std::string unsent;
  bool said_goodbye = false;
  EventLoop::Registration watch;
  EventLoop::Registration patience;  // for its Hello
};

struct Membership::State : std::enable_shared_from_this<State> {
  int rank = 0;
  int size = 1;
  std::string token;  // of the hub: what a Hello must say
  std::shared_ptr<transport::Bootstrap> store;
  std::shared_ptr<EventLoop> loop;
  int listening = -1;

  // On the loop from connect on.
  int hub = -1;
  std::vector<bool> members;
  EventLoop::Registration accepting;
  std::map<int, std::unique_ptr<Peer>> peers;  // by rank: all members at the hub, only the hub elsewhere
  std::set<std::unique_ptr<Peer>> strangers;   // accepted, no Hello yet
  std::map<std::string, Listener> listeners;
  std::map<int, std::string> lost;
  std::atomic<bool> closed{false};

  ~State() {
    if (listening >= 0) ::close(listening);
  }

  bool is_hub() const { return hub == rank; }

  void open_listener(const std::string& address);
  void watch(Peer& peer);
  void on_readable(Peer& peer);
  void on_ended(Peer& peer, const std::string& how);
  void handle(Peer& peer, const Frame& frame);
  void dispatch(const Frame& frame);
  void note_lost(int who, const std::string& how);
  void send_to(Peer& peer, const std::string& bytes);
  void flush(Peer& peer);
  void broadcast(const Frame& frame, int except);
  void accept_strangers();
  void dial_hub(Deadline deadline);
};

std::shared_ptr<Membership> Membership::make(int rank, int size, const std::string& local_address,
                                             std::shared_ptr<transport::Bootstrap> store, std::shared_ptr<EventLoop> loop) {
  auto state = std::make_shared<State>();
  state->rank = rank;
  state->size = size;
  state->token = random_token();
  state->store = std::move(store);
  state->loop = std::move(loop);
  if (size > 1) state->open_listener(local_address);
  return std::shared_ptr<Membership>(new Membership(std::move(state)));
}

Membership::Membership(std::shared_ptr<State> state) : state_(std::move(state)) {}

Membership::~Membership() {
  // The sockets close on the loop, behind the goodbye.
  state_->closed = true;
  state_->loop->post([state = state_] {
    for (auto& [rank, peer] : state->peers) {
      if (state->is_hub() || rank == state->hub)
        state->send_to(*peer, encode({FrameType::Goodbye, state->rank, 0, "", ""}));
    }
    state->accepting.reset();
    state->strangers.clear();
    state->peers.clear();
    state->listeners.clear();
  });
}

void Membership::State::open_listener(const std::string& address) {
  const std::string host = address.empty() ? default_address() : address;
  const bool six = host.find(':') != std::string::npos;
  listening = ::socket(six ? AF_INET6 : AF_INET, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
  const SocketAddress any = socket_address(host, 0);
  if (listening < 0 || ::bind(listening, any.get(), any.length) != 0 || ::listen(listening, 1024) != 0) {
    throw system_error(Blame::Caller, "listening on " + host + "; WEFT_SOCKET_IFNAME chooses another interface", errno);
  }
  store->set(member_key(rank), to_bytes(host + " " + std::to_string(port_of(listening)) + " " + token));
}

void Membership::connect(Deadline deadline) {
  State& state = *state_;
  if (state.size == 1) return;
  std::vector<bool> members(static_cast<std::size_t>(state.size));
  int hub = -1;
  for (int rank = state.size; rank-- > 0;) {
    members[static_cast<std::size_t>(rank)] = state.store->exists(member_key(rank));
    if (members[static_cast<std::size_t>(rank)]) hub = rank;
  }
  state.members = members;
  state.hub = hub;
  if (state.is_hub()) {
    state.loop->post([state = state_] {
      state->accepting = state->loop->watch(state->listening, EPOLLIN, [weak = std::weak_ptr(state)](std::uint32_t) {
        if (const auto alive = weak.lock()) alive->accept_strangers();
      });
    });
  } else {
    ::close(std::exchange(state.listening, -1));
    state.dial_hub(deadline);
  }
}

bool Membership::has(int rank) const {
  return state_->size == 1 ? rank == 0 : !state_->members.empty() && state_->members[static_cast<std::size_t>(rank)];
}

void Membership::State::dial_hub(Deadline deadline) {
  const std::string text = to_text(store->get(member_key(hub), deadline));
  const auto first = text.find(' ');
  const auto second = text.find(' ', first + 1);
  if (first == std::string::npos || second == std::string::npos)
    throw Error(Blame::PeerLost, "rank " + std::to_string(hub) + " published no address");
  const std::string host = text.substr(0, first);
  const int port = std::atoi(text.substr(first + 1, second - first - 1).c_str());
  const int socket = connect_to(host, port, deadline);
  auto peer = std::make_unique<Peer>(socket, size);
  peer->rank = hub;
  keep_alive(socket);
  const std::string hello = encode({FrameType::Hello, rank, 0, "", text.substr(second + 1)});
  loop->post([self = shared_from_this(), peer = std::make_shared<std::unique_ptr<Peer>>(std::move(peer)), hello] {
    Peer& one = **peer;
    self->peers[self->hub] = std::move(*peer);
    self->watch(one);
    self->send_to(one, hello);
  });
}

void Membership::State::watch(Peer& peer) {
  peer.watch = loop->watch(peer.socket, EPOLLIN, [weak = weak_from_this(), &peer](std::uint32_t) {
    if (const auto self = weak.lock()) self->on_readable(peer);
  });
}

void Membership::State::accept_strangers() {
  for (;;) {
    const int socket = ::accept4(listening, nullptr, nullptr, SOCK_NONBLOCK | SOCK_CLOEXEC);
    if (socket < 0) return;
    keep_alive(socket);
    auto peer = std::make_unique<Peer>(socket, size);
    Peer& one = *peer;
    strangers.insert(std::move(peer));
    watch(one);
    one.patience = loop->at(Deadline::in(kHelloPatience), [weak = weak_from_this(), &one] {
      if (const auto self = weak.lock()) self->on_ended(one, "no hello");
    });
  }
}

void Membership::State::on_readable(Peer& peer) {
  char buffer[16384];
  const auto count = ::recv(peer.socket, buffer, sizeof buffer, 0);
  if (count < 0 && (errno == EAGAIN || errno == EINTR)) return flush(peer);
  if (count <= 0) return on_ended(peer, count == 0 ? "its process ended" : std::strerror(errno));
  peer.reader.append({buffer, static_cast<std::size_t>(count)});
  for (;;) {
    Frame frame;
    const auto complete = peer.reader.next(frame);
    if (!complete) return on_ended(peer, complete.error().text());
    if (!complete.value()) return;
    const bool was_stranger = peer.rank < 0;
    if (was_stranger) {
      const bool known =
          frame.type == FrameType::Hello && frame.text == token && frame.rank != rank && !peers.contains(frame.rank);
      if (!known) return on_ended(peer, "not of this job");
      peer.patience.reset();
      peer.rank = frame.rank;
      for (auto it = strangers.begin(); it != strangers.end(); ++it) {
        if (it->get() != &peer) continue;
        peers[frame.rank] = std::move(strangers.extract(it).value());
        break;
      }
      for (const auto& [who, how] : lost) send_to(peer, encode({FrameType::Lost, who, 0, "", how}));
      continue;
    }
    handle(peer, frame);
    if (closed) return;
  }
}

void Membership::State::handle(Peer& peer, const Frame& frame) {
  if (frame.type == FrameType::Goodbye) {
    if (frame.rank == peer.rank) peer.said_goodbye = true;
    const auto told = listeners;
    for (const auto& [group, listener] : told) listener.gone(frame.rank);
    if (is_hub()) broadcast({FrameType::Goodbye, peer.rank, 0, "", ""}, peer.rank);
    return;
  }
  if (frame.type == FrameType::Hello) return;
  if (frame.type == FrameType::Lost) return note_lost(frame.rank, frame.text);
  if (is_hub()) {
    Frame passed = frame;
    passed.rank = peer.rank;  // nobody speaks for another
    broadcast(passed, peer.rank);
    return dispatch(passed);
  }
  dispatch(frame);
}

void Membership::State::dispatch(const Frame& frame) {
  const auto found = listeners.find(frame.group);
  if (found == listeners.end()) return;
  const Listener listener = found->second;
  switch (frame.type) {
    case FrameType::Abort: return listener.aborted(frame.rank, frame.text);
    case FrameType::Leaving: return listener.leaving(frame);
    case FrameType::Completed: return listener.completed(frame.rank, static_cast<int>(frame.number));
    default: return;
  }
}

void Membership::State::on_ended(Peer& peer, const std::string& how) {
  peer.watch.reset();
  peer.patience.reset();
  const int who = peer.rank;
  const bool clean = peer.said_goodbye || closed;
  if (who < 0) {
    log::debug("a connection to the group's port was closed: " + how);
    std::erase_if(strangers, [&](const auto& one) { return one.get() == &peer; });
    return;
  }
  peers.erase(who);
  if (!clean) note_lost(who, how);
  if (who != hub || closed) return;
  const auto told = listeners;
  for (const auto& [group, listener] : told) listener.alone();
}

void Membership::State::note_lost(int who, const std::string& how) {
  if (who == rank || !lost.emplace(who, how).second) return;
  log::debug("rank " + std::to_string(who) + " is lost: " + how);
  if (is_hub()) broadcast({FrameType::Lost, who, 0, "", how}, who);
  const auto told = listeners;  // a listener may forget itself
  for (const auto& [group, listener] : told) listener.lost(who, how);
}

void Membership::State::broadcast(const Frame& frame, int except) {
  const std::string bytes = encode(frame);
  std::vector<int> ranks;
  for (const auto& [who, peer] : peers) ranks.push_back(who);
  for (const int who : ranks) {
    const auto found = peers.find(who);
    if (who != except && found != peers.end()) send_to(*found->second, bytes);
  }
}

void Membership::State::send_to(Peer& peer, const std::string& bytes) {
  peer.unsent += bytes;
  flush(peer);
}

// What does not fit now is sent when the peer's socket takes more.
void Membership::State::flush(Peer& peer) {
  while (!peer.unsent.empty()) {
    const auto count = ::send(peer.socket, peer.unsent.data(), peer.unsent.size(), MSG_NOSIGNAL);
    if (count < 0 && errno == EINTR) continue;
    if (count < 0) {
      if (errno != EAGAIN || peer.unsent.size() > kMaxUnsent) return;  // its end shows when it is read
      peer.patience = loop->at(Deadline::in(std::chrono::milliseconds(5)), [weak = weak_from_this(), &peer] {
        if (const auto self = weak.lock()) self->flush(peer);
      });
      return;
    }
    peer.unsent.erase(0, static_cast<std::size_t>(count));
  }
}

void Membership::listen(const std::string& group, Listener listener) {
  state_->loop->post([state = state_, group, listener = std::move(listener)] {
    state->listeners[group] = listener;
    for (const auto& [who, how] : state->lost) listener.lost(who, how);
  });
}

void Membership::forget(const std::string& group) {
  state_->loop->post([state = state_, group] { state->listeners.erase(group); });
}

void Membership::send(Frame frame) {
  frame.rank = state_->rank;
  state_->loop->post([state = state_, frame = std::move(frame)] {
    state->broadcast(frame, -1);  // at the hub to all, elsewhere to the hub
  });
}

}  // namespace weft::group
