// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <atomic>
#include <chrono>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <utility>

#include <netinet/in.h>
#include <sys/socket.h>

#include <weft/base/log.h>
#include <weft/base/make_error.h>
#include <weft/base/mutex.h>
#include <weft/engine/membership/membership.h>
#include <weft/engine/membership/neighbours.h>
#include <weft/engine/membership/published.h>
#include <weft/engine/membership/tree.h>
#include <weft/engine/store/address.h>
#include <weft/engine/store/backoff.h>
#include <weft/profiling/trace/dump.h>
#include <weft/transport/signed_bootstrap.h>

namespace weft::group {

namespace {

constexpr auto kHelloPatience = std::chrono::seconds(10);
constexpr auto kRest = std::chrono::milliseconds(100);
// How long a rank that joins waits for its parent before it connects to the parent's parent.
constexpr auto kParentComes = std::chrono::seconds(1);

}  // namespace

struct Membership::State : std::enable_shared_from_this<State> {
  int rank = 0;
  int size = 1;
  std::shared_ptr<StoreBootstrap> store;
  std::optional<transport::SignedBootstrap> seal;  // of the addresses, if there is a secret
  std::shared_ptr<EventLoop> loop;
  std::shared_ptr<Neighbours> neighbours;  // null for a job of one rank
  Published own;
  // By the threads that join.
  bool has_dialled = false;
  std::map<int, Published> published;  // addresses that find() has read
  std::vector<bool> members;           // known after connect()
  std::set<int> seen;                  // ranks that look_for_published() has seen

  // Used on the loop only.
  std::map<std::string, std::shared_ptr<const Listener>> listeners;
  std::set<std::string> left_groups;  // for which this rank listens no more
  std::function<void(const Frame&)> listens_to_waits, listens_to_stores;
  bool closed = false;

  std::atomic<bool> has_left{false};
  std::atomic<bool> is_placed{false};
  std::atomic<bool> all_joined{false};
  mutable Mutex mutex;
  std::map<int, Gone> gone WEFT_GUARDED_BY(mutex);

  void begin_to_leave();  // on the loop
  std::optional<Published> find(int which);
  Published published_by(int which);
  // Throws Caller if that rank was given another world size.
  Published of_this_job(int which, const Published& there) const;
  void dial(int to, const Published& there);
  void dispatch(const Frame& frame);
  void note_gone(int who, const Gone& how);
  void on_placed();
  // The error that names the members that have not joined in time.
  Error not_joined();
};

namespace {

// Opens the socket on which this rank listens at `host`.
Descriptor open_port(const std::string& host) {
  const bool six = host.find(':') != std::string::npos;
  Descriptor socket(
      ::socket(six ? AF_INET6 : AF_INET, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0));
  const SocketAddress any = socket_address(host, 0);
  if (!socket || ::bind(socket.get(), any.get(), any.length) != 0 ||
      ::listen(socket.get(), 1024) != 0) {
    throw system_error(is_shortage(errno) ? Blame::Busy : Blame::Caller,
                       "listening on " + host + "; WEFT_SOCKET_IFNAME chooses another interface",
                       errno);
  }
  return socket;
}

}  // namespace

std::shared_ptr<Membership> Membership::make(int rank, int size, const std::string& local_address,
                                             std::shared_ptr<StoreBootstrap> store,
                                             std::shared_ptr<EventLoop> loop,
                                             const std::string& secret) {
  auto state = std::make_shared<State>();
  state->rank = rank;
  state->size = size;
  state->store = std::move(store);
  state->loop = std::move(loop);
  if (!secret.empty()) state->seal.emplace(state->store, secret, "membership");
  state->own.size = size;
  if (size > 1) {
    const std::string host = local_address.empty() ? default_address() : local_address;
    Descriptor listening = open_port(host);
    state->own = {host, port_of(listening.get()), random_token(), size};
    const std::weak_ptr<State> weak = state;
    state->neighbours =
        std::make_shared<Neighbours>(state->loop, rank, state->own, std::move(listening), secret,
                                     Neighbours::Events{.frame =
                                                            [weak](const Frame& frame) {
                                                              if (const auto alive = weak.lock())
                                                                alive->dispatch(frame);
                                                            },
                                                        .placed =
                                                            [weak] {
                                                              if (const auto alive = weak.lock())
                                                                alive->on_placed();
                                                            }});
    state->loop->post([state] { state->neighbours->start(); });
  }
  return std::shared_ptr<Membership>(new Membership(std::move(state)));
}

void Membership::publish(const std::string& backends, StoreBootstrap* with) {
  State& state = *state_;
  if (state.size == 1) return;
  state.own.backends = backends;
  const std::string key = member_key(state.rank);
  auto value = to_bytes(encode(state.own));
  if (state.seal) value = state.seal->sealed(key, value);
  with == nullptr ? state.store->set(key, value) : with->set_with_next(*state.store, key, value);
}

std::optional<std::string> Membership::backends_of(int rank) {
  const auto there = state_->find(rank);
  return there ? std::optional(there->backends) : std::nullopt;
}

const char* Membership::key_of_ranks() { return kMemberKeys; }

Membership::Membership(std::shared_ptr<State> state) : state_(std::move(state)) {}

Membership::~Membership() {
  state_->loop->post([state = state_] { state->begin_to_leave(); });
}

void Membership::leave() {
  state_->loop->post([state = state_] { state->begin_to_leave(); });
  state_->loop->drive([this] { return state_->has_left.load(); },
                      Deadline::in(2 * kLeavingPatience));
}

void Membership::State::begin_to_leave() {
  if (std::exchange(closed, true)) return;
  listeners.clear();
  listens_to_waits = nullptr;
  listens_to_stores = nullptr;
  if (!neighbours) {
    has_left = true;
    return;
  }
  neighbours->leave(kLeavingPatience, [weak = weak_from_this()](bool) {
    if (const auto self = weak.lock()) self->has_left = true;
  });
}

// --- Joining ---

// Returns nothing if the rank has not published.
std::optional<Published> Membership::State::find(int which) {
  if (const auto known = published.find(which); known != published.end()) return known->second;
  const std::string key = member_key(which);
  auto value = store->find(key);
  if (!value) return std::nullopt;
  if (seal) {
    value = seal->unsealed(key, std::move(*value));
  } else if (transport::is_signed(*value)) {
    throw Error(Blame::Caller, "rank " + std::to_string(which) + " was given a secret, and rank " +
                                   std::to_string(rank) +
                                   " none: give all ranks the same ProcessGroupOptions::secret, or "
                                   "none")
        .with_ranks({which});
  }
  if (const auto there = decode_published(to_text(*value))) return published[which] = *there;
  throw Error(Blame::PeerLost, "rank " + std::to_string(which) + " published no valid address")
      .with_ranks({which});
}

// The rank has published.
Published Membership::State::published_by(int which) {
  if (which == rank) return own;
  const auto there = find(which);
  if (there) return of_this_job(which, *there);
  throw Error(Blame::PeerLost, "rank " + std::to_string(which) + " published no address")
      .with_ranks({which});
}

Published Membership::State::of_this_job(int which, const Published& there) const {
  if (there.size == size) return there;
  const std::string who = "rank " + std::to_string(which);
  throw Error(Blame::Caller, who + " gives the world size " + std::to_string(there.size) +
                                 ", rank " + std::to_string(rank) + " gives " +
                                 std::to_string(size) +
                                 "; start all ranks with the same world size");
}

void Membership::State::dial(int to, const Published& there) {
  auto socket = std::make_shared<Descriptor>();
  try {
    *socket = dial_socket(there);
  } catch (const Error& error) {
    if (error.blame() == Blame::Busy) throw;
    throw error.within("rank " + std::to_string(to) + " is lost").with_ranks({to});
  }
  has_dialled = true;
  loop->post([self = shared_from_this(), to, there, socket] {
    self->neighbours->adopt_parent(to, there, std::move(*socket));
  });
}

void Membership::connect_early(const std::function<bool()>& stop, Deadline deadline) {
  State& state = *state_;
  if (state.size == 1 || state.rank == 0 || state.has_dialled) return;
  const Deadline parent_comes = Deadline::in(kParentComes);
  for (Backoff pause;; pause.wait(deadline)) {
    for (int one = state.rank; one > 0;) {
      one = static_parent(one);
      if (const auto there = state.find(one))
        return state.dial(one, state.of_this_job(one, *there));
      if (!parent_comes.passed()) break;
    }
    if (stop() || deadline.passed()) return;
  }
}

void Membership::look_for_published() {
  State& state = *state_;
  for (int one = kChildren * state.rank + 1;
       one <= kChildren * (state.rank + 1) && one < state.size; ++one) {
    if (state.seen.contains(one)) continue;
    const auto there = state.find(one);
    if (!there) continue;
    state.seen.insert(one);
    state.loop->post([self = state_, one, there = *there] {
      if (!self->closed) self->neighbours->await(one, there);
    });
  }
}

void Membership::connect(const std::function<void()>& check, Deadline deadline,
                         bool all_take_part) {
  State& state = *state_;
  if (state.size == 1) return;
  state.members.assign(static_cast<std::size_t>(state.size), true);
  if (!all_take_part && !state.store->exist(member_keys(state.size))) {
    for (int rank = 0; rank < state.size; ++rank)
      state.members[static_cast<std::size_t>(rank)] = state.store->exists(member_key(rank));
  }
  const auto lowest = static_cast<int>(std::find(state.members.begin(), state.members.end(), true) -
                                       state.members.begin());
  const int parent = parent_of(state.rank, [&](int one) { return has(one); });
  const Published first = state.published_by(lowest);
  std::map<int, Published> addresses{{lowest, first}};
  if (parent >= 0 && parent != lowest) addresses[parent] = state.published_by(parent);
  trace::joined_job(name_of_job(first.token));
  state.loop->post([self = state_, addresses] {
    if (self->closed) return;
    self->neighbours->settle(addresses);
    self->neighbours->send({FrameType::Joined, 0, 0, "", ""});
  });
  // Once the root has joined, its process may leave, and the store may end with it.
  const bool is_root = parent < 0;
  const Deadline patience =
      is_root ? Deadline::sooner(deadline, Deadline::in(kHelloPatience)) : deadline;
  const auto complete = [&] { return (is_root ? state.all_joined : state.is_placed).load(); };
  while (!state.loop->drive(complete, Deadline::sooner(patience, Deadline::in(kRest)))) {
    check();
    const int lacks = state.neighbours->lacks();
    if (lacks == EMFILE || (lacks != 0 && patience.passed())) {
      throw system_error(
          Blame::Busy,
          "rank " + std::to_string(state.rank) + " cannot accept the others' connections", lacks);
    }
    if (patience.passed()) throw state.not_joined();
  }
}

void Membership::State::on_placed() {
  is_placed = neighbours->is_placed();
  if (!neighbours->is_root()) return;
  bool all = true;
  for (int one = 0; one < size; ++one) {
    const bool is_member = members[static_cast<std::size_t>(one)];
    all = all && (!is_member || neighbours->joined().contains(one));
  }
  if (all) all_joined = true;
}

Error Membership::State::not_joined() {
  const auto missing = std::make_shared<std::vector<int>>();
  const auto known = std::make_shared<std::atomic<bool>>(false);
  loop->post([self = shared_from_this(), missing, known] {
    for (int one = 0; one < self->size; ++one) {
      const bool is_member = self->members[static_cast<std::size_t>(one)];
      if (is_member && !self->neighbours->joined().contains(one)) missing->push_back(one);
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
  if (state_->size == 1) return;
  static_cast<void>(state_->store->get_all(member_keys(state_->size), deadline));
}

bool Membership::has(int rank) const {
  return state_->size == 1
             ? rank == 0
             : !state_->members.empty() && state_->members[static_cast<std::size_t>(rank)];
}

// --- News ---

void Membership::State::dispatch(const Frame& frame) {
  // Listeners are held while they are called, since one may forget itself.
  switch (frame.type) {
    case FrameType::Lost:
      note_gone(frame.rank, {"is lost: " + frame.text, frame.number == kCut,
                             neighbours->known().address_of(frame.rank)});
      for (const auto& [group, listener] : std::map(listeners))
        listener->lost(frame.rank, frame.text);
      return;
    case FrameType::Goodbye:
      note_gone(frame.rank, {"has left the job"});
      for (const auto& [group, listener] : std::map(listeners)) listener->gone(frame.rank);
      return;
    case FrameType::Abort:
    case FrameType::Leaving:
    case FrameType::Completed: break;
    default: {
      const bool is_of_store =
          frame.type == FrameType::StoreRequest || frame.type == FrameType::StoreReply;
      const auto listens = is_of_store ? listens_to_stores : listens_to_waits;
      return listens ? listens(frame) : void();
    }
  }
  const auto found = listeners.find(frame.group);
  if (found == listeners.end()) {
    // The earlier answer was lost on its way.
    if (frame.type == FrameType::Leaving && left_groups.contains(frame.group)) {
      neighbours->send(
          {FrameType::Completed, 0, static_cast<std::uint64_t>(frame.rank), frame.group, ""});
    }
    return;
  }
  const auto listener = found->second;
  switch (frame.type) {
    case FrameType::Abort: return listener->aborted(frame);
    case FrameType::Leaving: return listener->leaving(frame);
    default: return listener->completed(frame.rank, static_cast<int>(frame.number));
  }
}

void Membership::listen(const std::string& group, Listener listener) {
  state_->loop->post([state = state_, group, listener = std::move(listener)] {
    state->listeners[group] = std::make_shared<const Listener>(listener);
    state->left_groups.erase(group);
    if (!state->neighbours) return;
    // A rank that could not join may have said so, and have ended, before this one came.
    for (const Frame& abort : state->neighbours->known().aborts(group)) {
      if (abort.rank != state->rank) listener.aborted(abort);
    }
    for (const auto& [who, how] : state->neighbours->known().lost()) listener.lost(who, how);
    for (const int who : state->neighbours->known().left()) listener.gone(who);
  });
}

void Membership::listen_to_waits(std::function<void(const Frame& frame)> told) {
  state_->loop->post([state = state_, told = std::move(told)]() mutable {
    state->listens_to_waits = std::move(told);
  });
}

void Membership::listen_to_stores(std::function<void(const Frame& frame)> told) {
  state_->loop->post([state = state_, told = std::move(told)]() mutable {
    state->listens_to_stores = std::move(told);
  });
}

void Membership::State::note_gone(int who, const Gone& how) {
  MutexLock lock(mutex);
  gone.emplace(who, how);
}

std::optional<Membership::Gone> Membership::gone(int rank) const {
  MutexLock lock(state_->mutex);
  const auto found = state_->gone.find(rank);
  return found == state_->gone.end() ? std::nullopt : std::optional(found->second);
}

std::optional<Published> Membership::address_of(int rank) const {
  if (!state_->neighbours) return std::nullopt;
  struct Answer {
    std::optional<Published> address;
    std::atomic<bool> is_here{false};
  };
  const auto answer = std::make_shared<Answer>();
  state_->loop->post([state = state_, rank, answer] {
    answer->address = state->neighbours->known().address_of(rank);
    answer->is_here = true;
  });
  const bool has_answered =
      state_->loop->drive([&] { return answer->is_here.load(); }, Deadline::in(kHelloPatience));
  return has_answered ? answer->address : std::nullopt;
}

bool Membership::is_whole() const {
  MutexLock lock(state_->mutex);
  return state_->gone.empty();
}

void Membership::forget(const std::string& group) {
  state_->loop->post([state = state_, group] {
    if (state->listeners.erase(group) > 0) state->left_groups.insert(group);
  });
}

void Membership::send(Frame frame) {
  frame.rank = state_->rank;
  state_->loop->post([state = state_, frame = std::move(frame)] {
    if (state->neighbours && !state->closed) state->neighbours->send(frame);
  });
}

}  // namespace weft::group
