// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <array>
#include <atomic>
#include <cerrno>
#include <cinttypes>
#include <cstdio>
#include <cstring>
#include <functional>
#include <optional>
#include <random>
#include <set>
#include <sstream>

#include <fcntl.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <weft/base/end_of_process.h>
#include <weft/base/log.h>
#include <weft/base/make_error.h>
#include <weft/engine/membership/awaited_ranks.h>
#include <weft/engine/membership/membership.h>
#include <weft/engine/store/address.h>
#include <weft/engine/store/backoff.h>
#include <weft/profiling/trace/dump.h>

namespace weft::group {

namespace {

constexpr auto kHelloPatience = std::chrono::seconds(10);
constexpr auto kRest = std::chrono::milliseconds(100);
// Bytes that may wait for a slow peer. A thousand ranks that leave a dozen groups at once send
// about 30 MiB.
constexpr std::size_t kMostUnsent = std::size_t{64} << 20;
// Connections without a Hello so far, beyond the number of ranks that may connect.
constexpr std::size_t kMaxStrangers = 64;

// The kernel notices a peer that vanishes (cable, power), or that reads nothing, after about 15 s.
void keep_alive(int socket) {
  const auto set = [socket](int level, int name, int value) {
    setsockopt(socket, level, name, &value, sizeof value);
  };
  set(SOL_SOCKET, SO_KEEPALIVE, 1);
  set(IPPROTO_TCP, TCP_KEEPIDLE, 5);
  set(IPPROTO_TCP, TCP_KEEPINTVL, 3);
  set(IPPROTO_TCP, TCP_KEEPCNT, 3);
  set(IPPROTO_TCP, TCP_USER_TIMEOUT, 15'000);
  set(IPPROTO_TCP, TCP_NODELAY, 1);
}

// Tells jobs apart without revealing the token.
std::string name_of_job(const std::string& token) {
  std::array<char, 17> text{};
  std::snprintf(text.data(), text.size(), "%016" PRIx64,
                static_cast<std::uint64_t>(std::hash<std::string>()(token)));
  return text.data();
}

// True if the frame is for one rank, named by `number`.
bool names_recipient(const Frame& frame) {
  return frame.type == FrameType::Completed || frame.type == FrameType::Answer ||
         frame.type == FrameType::Speak || frame.type == FrameType::Called;
}

std::string random_token() {
  std::random_device device;
  std::string token;
  for (int i = 0; i < 4; ++i) token += std::to_string(device()) + "-";
  return token;
}

std::string member_key(int rank) { return "weft/member/" + std::to_string(rank); }

// The value of a rank's member key.
struct Published {
  std::string host;
  int port = 0;
  std::string token;
  int size = 0;  // of the job, as that rank was told
};

std::optional<Published> address_in(const std::string& text) {
  std::istringstream fields(text);
  Published one;
  if (!(fields >> one.host >> one.port >> one.token >> one.size)) return std::nullopt;
  return one;
}

std::vector<std::string> member_keys(int size) {
  std::vector<std::string> keys;
  for (int rank = 0; rank < size; ++rank) keys.push_back(member_key(rank));
  return keys;
}

}  // namespace

// One connection to another rank.
struct Membership::Peer {
  Peer(int number, int ranks) : socket(number), end(number), reader(ranks) {}
  ~Peer() {
    watch.reset();
    end.reset();
    ::close(socket);
  }
  Peer(const Peer&) = delete;
  Peer& operator=(const Peer&) = delete;

  const int socket;
  std::optional<EndOfProcess> end;  // a death is seen by the connection's end
  int rank = -1;                    // -1 until its Hello
  FrameReader reader;
  std::string unsent;
  bool said_goodbye = false;
  bool given_up = false;
  EventLoop::Registration watch;
  EventLoop::Registration patience;  // timer: for its Hello, later for unsent bytes
};

struct Membership::State : std::enable_shared_from_this<State> {
  int rank = 0;
  int size = 1;
  std::string token;      // of this rank; a Hello that it accepts has this text
  std::string hub_token;  // of the hub, if that is another rank
  std::shared_ptr<StoreBootstrap> store;
  std::shared_ptr<EventLoop> loop;
  std::string address;  // on which this rank listens
  int listening = -1;
  int hub = -1;               // set once, before any connection is watched
  std::vector<bool> members;  // known after connect()
  // Ranks that look_for_published() has seen; used by the thread that calls it.
  std::set<int> seen;

  // Used on the loop only.
  EventLoop::Registration accepting;
  EventLoop::Registration resting;  // timer that runs instead of accepting
  // By rank: at the hub all members, elsewhere only the hub.
  std::map<int, std::unique_ptr<Peer>> peers;
  std::set<std::unique_ptr<Peer>> strangers;  // accepted connections without a Hello so far
  std::shared_ptr<AwaitedRanks> awaited;      // at rank 0, if it is the hub
  std::map<std::string, Listener> listeners;
  std::function<void(const Frame& frame)> listens_to_waits;
  std::map<int, std::string> lost;
  std::set<int> left;        // ranks that said goodbye
  std::set<int> came;        // at the hub: ranks that have sent a Hello
  std::size_t expected = 0;  // at the hub: how many ranks will
  std::string missed;        // at the hub: frames for ranks that have yet to connect
  // At the hub: ranks that have sent their second Hello, so they no longer need the store to join.
  std::set<int> joined;
  std::atomic<bool> all_joined{false};
  std::atomic<bool> closed{false};
  std::atomic<bool> alone{false};  // the hub's connection has ended
  // At the hub: errno of the last accept() if it failed for lack of resources, else 0.
  std::atomic<int> lacks{0};

  ~State() {
    if (listening >= 0) ::close(listening);
  }

  bool is_hub() const { return hub == rank; }
  // At the hub: the error that names the members that have not connected in time.
  Error not_connected();

  void open_listener(const std::string& host);
  void watch(Peer& peer);
  void on_readable(Peer& peer);
  void on_ended(Peer& peer, const std::string& how);
  void handle(Peer& peer, const Frame& frame);
  void dispatch(const Frame& frame);
  void note_lost(int who, const std::string& how);
  void send_to(Peer& peer, const std::string& bytes);
  void flush(Peer& peer);
  void give_up(Peer& peer);
  void broadcast(const Frame& frame, int except);
  void pass_on(const Frame& frame, int from);
  void accept_strangers();
  void take_in(Peer& stranger, const Frame& hello);
  void expect(std::size_t ranks);
  void become_hub();
  void dial(int rank, const std::string& published, Deadline deadline);
  void await(int rank, const std::string& published);
};

std::shared_ptr<Membership> Membership::make(int rank, int size, const std::string& local_address,
                                             std::shared_ptr<StoreBootstrap> store,
                                             std::shared_ptr<EventLoop> loop) {
  auto state = std::make_shared<State>();
  state->rank = rank;
  state->size = size;
  state->expected = static_cast<std::size_t>(size - 1);
  state->token = random_token();
  state->store = std::move(store);
  state->loop = std::move(loop);
  if (size > 1) state->open_listener(local_address.empty() ? default_address() : local_address);
  return std::shared_ptr<Membership>(new Membership(std::move(state)));
}

Membership::Membership(std::shared_ptr<State> state) : state_(std::move(state)) {}

Membership::~Membership() {
  // The sockets close on the loop, after the goodbye.
  state_->loop->post([state = state_] {
    state->closed = true;
    for (auto& [rank, peer] : state->peers) {
      if (state->is_hub() || rank == state->hub)
        state->send_to(*peer, encode({FrameType::Goodbye, state->rank, 0, "", ""}));
    }
    state->accepting.reset();
    state->resting.reset();
    state->strangers.clear();
    state->awaited.reset();
    state->peers.clear();
    state->listeners.clear();
    state->listens_to_waits = nullptr;
  });
}

void Membership::State::open_listener(const std::string& host) {
  address = host;
  const bool six = host.find(':') != std::string::npos;
  listening = ::socket(six ? AF_INET6 : AF_INET, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
  const SocketAddress any = socket_address(host, 0);
  if (listening < 0 || ::bind(listening, any.get(), any.length) != 0 ||
      ::listen(listening, 1024) != 0) {
    throw system_error(is_shortage(errno) ? Blame::Busy : Blame::Caller,
                       "listening on " + host + "; WEFT_SOCKET_IFNAME chooses another interface",
                       errno);
  }
  store->set(member_key(rank), to_bytes(host + " " + std::to_string(port_of(listening)) + " " +
                                        token + " " + std::to_string(size)));
}

void Membership::connect_to_first(const std::function<bool()>& stop, Deadline deadline) {
  State& state = *state_;
  if (state.size == 1 || state.hub >= 0) return;
  if (state.rank == 0) return state.become_hub();
  Backoff pause;
  while (!state.store->exists(member_key(0))) {
    if (stop() || deadline.passed()) return;
    pause.wait(deadline);
  }
  state.dial(0, to_text(state.store->get(member_key(0), deadline)), deadline);
}

void Membership::look_for_published() {
  State& state = *state_;
  if (state.rank != 0 || !state.is_hub()) return;
  for (int one = 1; one < state.size; ++one) {
    if (state.seen.contains(one) || !state.store->exists(member_key(one))) continue;
    state.seen.insert(one);
    state.loop->post([self = state_, one,
                      text = to_text(state.store->get(member_key(one), Deadline::in(kRest)))] {
      if (!self->closed && !self->came.contains(one)) self->await(one, text);
    });
  }
}

void Membership::State::await(int one, const std::string& published) {
  if (!awaited) {
    const auto weak = weak_from_this();
    const auto greets = [weak] {
      const auto self = weak.lock();
      return self && !self->strangers.empty();
    };
    const auto died = [weak](int who) {
      const auto self = weak.lock();
      if (self) self->note_lost(who, "its process ended before it had connected to rank 0");
    };
    awaited = std::make_shared<AwaitedRanks>(loop, greets, died);
  }
  const auto is_loopback = [](const std::string& host) {
    return host.starts_with("127.") || host == "::1";
  };
  const auto there = address_in(published);
  // A loopback address may be another machine's.
  if (!there || (is_loopback(there->host) && !is_loopback(address))) return;
  try {
    awaited->watch(one, there->host, there->port);
  } catch (const Error& error) {
    log::debug("rank " + std::to_string(one) + ": " + error.text());
  }
}

void Membership::connect(const std::function<void()>& check, Deadline deadline) {
  State& state = *state_;
  if (state.size == 1) return;
  state.members.assign(static_cast<std::size_t>(state.size), true);
  int lowest = 0;
  if (!state.store->exist(member_keys(state.size))) {  // one query in the usual case
    lowest = -1;
    for (int rank = state.size; rank-- > 0;) {
      const bool is_member = state.store->exists(member_key(rank));
      state.members[static_cast<std::size_t>(rank)] = is_member;
      if (is_member) lowest = rank;
    }
  }
  if (lowest == state.rank) {
    if (state.hub < 0) state.become_hub();
    trace::joined_job(name_of_job(state.token));
    return wait_for_hellos(check, deadline);
  }
  if (state.hub < 0)
    state.dial(lowest, to_text(state.store->get(member_key(lowest), deadline)), deadline);
  trace::joined_job(name_of_job(state.hub_token));
  state.loop->post([self = state_] {
    const auto hub = self->peers.find(self->hub);
    if (hub != self->peers.end())
      self->send_to(*hub->second, encode({FrameType::Hello, self->rank, 0, "", self->token}));
  });
}

// All ranks have published, so each is connecting or has connected long ago. (Once joined, this
// process may leave, and the store may go with it.)
void Membership::wait_for_hellos(const std::function<void()>& check, Deadline deadline) {
  State& state = *state_;
  const auto members =
      static_cast<std::size_t>(std::count(state.members.begin(), state.members.end(), true));
  state.loop->post([self = state_, members] { self->expect(members - 1); });
  const Deadline patience = Deadline::sooner(deadline, Deadline::in(kHelloPatience));
  const auto complete = [&] { return state.all_joined.load(); };
  while (!state.loop->drive(complete, Deadline::sooner(patience, Deadline::in(kRest)))) {
    check();
    if (state.lacks == EMFILE || (state.lacks != 0 && patience.passed())) {
      throw system_error(
          Blame::Busy,
          "rank " + std::to_string(state.rank) + " cannot accept the others' connections",
          state.lacks);
    }
    if (patience.passed()) throw state.not_connected();
  }
}

Error Membership::State::not_connected() {
  const auto missing = std::make_shared<std::vector<int>>();
  const auto known = std::make_shared<std::atomic<bool>>(false);
  loop->post([self = shared_from_this(), missing, known] {
    for (int one = 0; one < self->size; ++one) {
      const bool is_member = self->members[static_cast<std::size_t>(one)];
      if (is_member && one != self->rank && !self->joined.contains(one)) missing->push_back(one);
    }
    *known = true;
  });
  // The loop turns here if no other thread turns it.
  const bool names = loop->drive([&] { return known->load(); }, Deadline::in(kHelloPatience));
  const std::vector<int> ranks = names ? *missing : std::vector<int>();
  return Error(Blame::PeerLost,
               (ranks.empty() ? "not all ranks have" : ranks_have(ranks) + " not") +
                   " connected to rank " + std::to_string(rank) +
                   " in time; WEFT_SOCKET_IFNAME chooses another network interface")
      .with_ranks(ranks);
}

void Membership::wait_for_all(Deadline deadline) {
  for (int rank = 0; rank < state_->size && state_->size > 1; ++rank)
    state_->store->get(member_key(rank), deadline);
}

bool Membership::has(int rank) const {
  return state_->size == 1
             ? rank == 0
             : !state_->members.empty() && state_->members[static_cast<std::size_t>(rank)];
}

void Membership::State::become_hub() {
  hub = rank;
  loop->post([self = shared_from_this()] {
    self->accepting =
        self->loop->watch(self->listening, EPOLLIN, [weak = std::weak_ptr(self)](std::uint32_t) {
          if (const auto alive = weak.lock()) alive->accept_strangers();
        });
  });
}

void Membership::State::dial(int to, const std::string& published, Deadline deadline) {
  const std::string who = "rank " + std::to_string(to);
  const auto there = address_in(published);
  if (!there) throw Error(Blame::PeerLost, who + " published no address").with_ranks({to});
  if (there->size != size) {
    throw Error(Blame::Caller, who + " gives the world size " + std::to_string(there->size) +
                                   ", rank " + std::to_string(rank) + " gives " +
                                   std::to_string(size) +
                                   "; start all ranks with the same world size");
  }
  std::unique_ptr<Peer> peer;
  try {
    peer = std::make_unique<Peer>(connect_to(there->host, there->port, deadline), size);
  } catch (const Error& error) {
    throw error.within(who + " is lost: it published its address, but").with_ranks({to});
  }
  ::close(std::exchange(listening, -1));
  hub = to;
  hub_token = there->token;
  peer->rank = to;
  keep_alive(peer->socket);
  const std::string hello = encode({FrameType::Hello, rank, 0, "", hub_token});
  loop->post([self = shared_from_this(),
              peer = std::make_shared<std::unique_ptr<Peer>>(std::move(peer)), hello] {
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
    if (socket < 0 && is_shortage(errno)) {
      lacks = errno;
      // The listening socket stays readable while accept() fails, so stop watching it for a while.
      accepting.reset();
      resting = loop->at(Deadline::in(kRest), [weak = weak_from_this()] {
        if (const auto self = weak.lock()) self->become_hub();
      });
    }
    if (socket < 0) return;
    lacks = 0;
    keep_alive(socket);
    auto peer = std::make_unique<Peer>(socket, size);
    if (strangers.size() >= static_cast<std::size_t>(size) + kMaxStrangers)
      // Too many connections that have sent nothing: close this one.
      continue;
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
    if (peer.rank >= 0) {
      handle(peer, frame);
    } else {
      const bool known = frame.type == FrameType::Hello && frame.text == token &&
                         frame.rank != rank && !peers.contains(frame.rank);
      if (!known) return on_ended(peer, "not of this job");
      take_in(peer, frame);
    }
    if (closed) return;
  }
}

void Membership::State::take_in(Peer& stranger, const Frame& hello) {
  stranger.patience.reset();
  stranger.rank = hello.rank;
  for (auto it = strangers.begin(); it != strangers.end(); ++it) {
    if (it->get() != &stranger) continue;
    peers[hello.rank] = std::move(strangers.extract(it).value());
    break;
  }
  came.insert(hello.rank);
  if (awaited) awaited->came(hello.rank);
  send_to(stranger, missed);
  expect(expected);
}

void Membership::State::expect(std::size_t ranks) {
  expected = ranks;
  if (came.size() >= expected) missed.clear();
  if (joined.size() >= expected) all_joined = true;
}

void Membership::State::handle(Peer& peer, const Frame& given) {
  Frame frame = given;
  if (is_hub()) frame.rank = peer.rank;  // only the hub speaks for other ranks
  switch (frame.type) {
    case FrameType::Hello: joined.insert(frame.rank); return expect(expected);
    case FrameType::Lost: return is_hub() ? void() : note_lost(frame.rank, frame.text);
    case FrameType::Goodbye: {
      if (frame.rank == peer.rank) peer.said_goodbye = true;
      left.insert(frame.rank);
      const auto told = listeners;
      for (const auto& [group, listener] : told) listener.gone(frame.rank);
      break;
    }
    default: dispatch(frame);
  }
  if (is_hub()) pass_on(frame, peer.rank);
}

// Sends an answer for one rank only to that rank: a thousand ranks that leave at once send a
// million of them.
void Membership::State::pass_on(const Frame& frame, int from) {
  if (!is_hub() || !names_recipient(frame)) return broadcast(frame, from);
  const auto recipient = frame.number < static_cast<std::uint64_t>(size)
                             ? peers.find(static_cast<int>(frame.number))
                             : peers.end();
  if (recipient != peers.end() && recipient->first != from)
    send_to(*recipient->second, encode(frame));
}

void Membership::State::dispatch(const Frame& frame) {
  if (frame.type >= FrameType::Asking) {
    const bool is_meant =
        !names_recipient(frame) || frame.number == static_cast<std::uint64_t>(rank);
    const auto told = listens_to_waits;
    return is_meant && told ? told(frame) : void();
  }
  const auto found = listeners.find(frame.group);
  if (found == listeners.end()) return;
  const Listener listener = found->second;
  switch (frame.type) {
    case FrameType::Abort: return listener.aborted(frame);
    case FrameType::Leaving: return listener.leaving(frame);
    case FrameType::Completed:
      return listener.completed(frame.rank, static_cast<int>(frame.number));
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
  if (who == hub && !closed) alone = true;
  if (!clean) note_lost(who, how);
  if (!alone || who != hub) return;
  const auto told = listeners;
  for (const auto& [group, listener] : told) listener.alone();
}

void Membership::State::note_lost(int who, const std::string& how) {
  if (who == rank || !lost.emplace(who, how).second) return;
  log::debug("rank " + std::to_string(who) + " is lost: " + how);
  if (is_hub()) broadcast({FrameType::Lost, who, 0, "", how}, who);
  const auto told = listeners;  // a copy: a listener may forget itself
  for (const auto& [group, listener] : told) listener.lost(who, how);
}

void Membership::State::broadcast(const Frame& frame, int except) {
  const std::string bytes = encode(frame);
  if (is_hub() && came.size() < expected && missed.size() <= kMostUnsent) missed += bytes;
  std::vector<int> ranks;
  for (const auto& [who, peer] : peers) ranks.push_back(who);
  for (const int who : ranks) {
    const auto found = peers.find(who);
    if (who != except && found != peers.end()) send_to(*found->second, bytes);
  }
}

void Membership::State::send_to(Peer& peer, const std::string& bytes) {
  if (peer.given_up) return;
  if (peer.unsent.size() + bytes.size() > kMostUnsent) return give_up(peer);
  peer.unsent += bytes;
  flush(peer);
}

// Ends the connection on a later turn of the loop: the caller may be reading from the peer, or
// iterating over all peers.
void Membership::State::give_up(Peer& peer) {
  peer.given_up = true;
  peer.patience =
      loop->at(Deadline::in(std::chrono::milliseconds(0)), [weak = weak_from_this(), &peer] {
        if (const auto self = weak.lock())
          self->on_ended(peer, "it reads too slowly: 64 MiB of messages wait for it");
      });
}

// Sends as much as the socket takes now, and the rest when it takes more.
void Membership::State::flush(Peer& peer) {
  while (!peer.given_up && !peer.unsent.empty()) {
    const auto count = ::send(peer.socket, peer.unsent.data(), peer.unsent.size(), MSG_NOSIGNAL);
    if (count < 0 && errno == EINTR) continue;
    if (count < 0) {
      if (errno != EAGAIN) return;  // reading from it will show how it ended
      peer.patience =
          loop->at(Deadline::in(std::chrono::milliseconds(5)), [weak = weak_from_this(), &peer] {
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
    for (const int who : state->left) listener.gone(who);
    if (state->alone) listener.alone();
  });
}

void Membership::listen_to_waits(std::function<void(const Frame& frame)> told) {
  state_->loop->post([state = state_, told = std::move(told)]() mutable {
    state->listens_to_waits = std::move(told);
  });
}

bool Membership::is_alone() const { return state_->alone; }

void Membership::forget(const std::string& group) {
  state_->loop->post([state = state_, group] { state->listeners.erase(group); });
}

void Membership::send(Frame frame) {
  frame.rank = state_->rank;
  state_->loop->post([state = state_, frame = std::move(frame)] {
    state->pass_on(frame, -1);  // from the hub to all; from other ranks to the hub
  });
}

}  // namespace weft::group
