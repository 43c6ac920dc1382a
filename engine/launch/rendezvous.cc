// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <system_error>
#include <utility>

#include <weft/base/log.h>
#include <weft/base/make_error.h>
#include <weft/base/patience.h>
#include <weft/engine/launch/rendezvous.h>
#include <weft/engine/store/backoff.h>

namespace weft::launch {

using std::chrono::milliseconds;

namespace {

constexpr auto kBetweenAttempts = milliseconds(50);  // of join()

// For example "1 of 2 to 4 nodes have come".
std::string describe_coming(const RendezvousState& state, const RendezvousLimits& limits) {
  const std::string count = std::to_string(state.nodes.size());
  if (state.is_running) {
    const bool has_room = static_cast<int>(state.nodes.size()) < limits.most;
    return "the job runs with " + count + (state.nodes.size() == 1 ? " node" : " nodes") +
           (has_room ? ", and will continue with this one" : ", its maximum; this one waits");
  }
  std::string wanted = std::to_string(limits.least);
  if (limits.most > limits.least) wanted += " to " + std::to_string(limits.most);
  return count + " of " + wanted + " nodes have come";
}

}  // namespace

Rendezvous::Rendezvous(std::shared_ptr<SharedStore> store, Settings settings, Node self)
    : store_(std::move(store)), settings_(settings), self_(std::move(self)) {
  if (settings_.limits.most == 1) return;  // a job of one node needs no heartbeats
  store_->beat(self_.id);
  try {
    heart_ = std::thread([this] { beat(); });
  } catch (const std::system_error& error) {
    throw system_error(Blame::Busy,
                       "the rendezvous cannot start a thread for its heartbeats; allow this user, "
                       "or the container, more threads (ulimit -u, pids.max)",
                       error.code().value());
  }
}

Rendezvous::~Rendezvous() {
  {
    MutexLock lock(mutex_);
    stops_ = true;
  }
  wakes_.notify_all();
  if (heart_.joinable()) heart_.join();
}

void Rendezvous::beat() {
  UniqueLock lock(mutex_);
  while (!wakes_.wait_for(lock, settings_.keep_alive_interval,
                          [this]() WEFT_REQUIRES(mutex_) { return stops_; })) {
    lock.unlock();
    try {
      store_->beat(self_.id);
    } catch (const Error& error) {
      log::debug(error.text());  // the next access to the state reports it too
    }
    lock.lock();
  }
}

RendezvousState Rendezvous::update(Deadline deadline,
                                   const std::function<void(RendezvousState&)>& change) {
  // A thousand nodes may change the state at the same moment, and only one of them succeeds at a
  // time.
  for (group::Backoff pause;; pause.wait(deadline)) {
    const std::string before = store_->get();
    RendezvousState state = before.empty() ? RendezvousState() : decode(before);
    change(state);
    const std::string after = encode(state);
    if (after == before) return state;
    if (store_->compare_set(before, after) == after) return state;
    if (deadline.passed()) {
      throw Error(Blame::Timeout,
                  "the rendezvous did not accept this node within " +
                      describe(settings_.join_timeout) +
                      " (--rdzv-conf join_timeout=SECONDS): another node was always faster");
    }
  }
}

std::vector<std::string> Rendezvous::lost(const RendezvousState& state) {
  if (settings_.limits.most == 1) return {};
  const auto now = Clock::now();
  const auto since_last = now - last_watch_;
  if (since_last < settings_.keep_alive_interval / 2) return {};
  last_watch_ = now;
  // This process may have been stopped meanwhile, so heartbeats that it has not seen prove nothing.
  if (since_last > 2 * settings_.keep_alive_interval) pulses_.clear();
  std::vector<std::string> ids = all_ids(state);
  std::erase(ids, self_.id);
  const std::vector<std::int64_t> counts = store_->beats(ids);
  std::vector<std::string> silent;
  for (std::size_t i = 0; i < ids.size(); ++i) {
    const auto [pulse, is_new] = pulses_.try_emplace(ids[i], Pulse{counts[i], now});
    if (!is_new && counts[i] != pulse->second.count) pulse->second = {counts[i], now};
    if (now - pulse->second.since > patience()) silent.push_back(ids[i]);
  }
  return silent;
}

Rendezvous::Assignment Rendezvous::place_of(const RendezvousState& state) const {
  Assignment place;
  place.round = state.round;
  place.nodes = static_cast<int>(state.nodes.size());
  place.restarts = state.restarts;
  place.cause = state.cause;
  place.world_size = 0;
  for (const Node& node : state.nodes) {
    if (node.id == self_.id) {
      place.node_rank = static_cast<int>(&node - state.nodes.data());
      place.first_rank = place.world_size;
    }
    place.world_size += node.ranks;
  }
  place.master_address = state.nodes.front().address;
  place.master_port = state.nodes.front().port;
  return place;
}

std::optional<Rendezvous::Assignment> Rendezvous::join(
    int port, const std::function<bool()>& goes_on,
    const std::function<void(const std::string&)>& tell) {
  self_.port = port;
  const Deadline deadline = Deadline::in(settings_.join_timeout);
  std::optional<Clock::time_point> enough_since;
  std::string told;
  Patience patience(settings_.wait_reports);
  for (RendezvousState state;;) {
    if (!goes_on()) return std::nullopt;
    const bool is_last_call_over =
        enough_since && Clock::now() - *enough_since >= settings_.last_call_timeout;
    const std::vector<std::string> silent = lost(state);
    state = update(deadline, [&](RendezvousState& next) {
      if (next.end) return;
      agree(next, settings_.limits);
      for (const std::string& id : silent) remove(next, settings_.limits, id, "is lost");
      come(next, self_, settings_.limits);
      run_if_ready(next, settings_.limits, is_last_call_over);
    });
    if (state.end) {
      end_ = state.end;
      return std::nullopt;
    }
    if (state.is_running && find(state, self_.id) != nullptr) {
      round_ = state.round;
      return place_of(state);
    }
    if (!is_enough(state, settings_.limits)) {
      enough_since.reset();
    } else if (!enough_since) {
      enough_since = Clock::now();
    }
    const std::string has_come = describe_coming(state, settings_.limits);
    if (deadline.passed()) {
      throw Error(Blame::Timeout, "no rendezvous within " + describe(settings_.join_timeout) +
                                      " (--rdzv-conf join_timeout=SECONDS): " + has_come);
    }
    if (std::exchange(told, has_come) != has_come) tell(has_come);
    if (patience.is_over()) {
      tell("after " + describe_wait(patience.waited()) + ", " + has_come +
           (state.is_running ? ""
                             : "; start weft-run with the same --nnodes and --rdzv-endpoint on the "
                               "other machines"));
    }
    std::this_thread::sleep_for(kBetweenAttempts);
  }
}

Rendezvous::News Rendezvous::look() {
  const auto now = Clock::now();
  if (end_) return News::End;
  if (settings_.limits.most == 1 || now < next_look_) return News::None;
  // Looks at least twice per keep-alive interval: a node that looks seldom cannot tell which nodes
  // are silent, see lost().
  next_look_ = now + std::min<Clock::duration>(settings_.monitor_interval,
                                               settings_.keep_alive_interval / 2);
  RendezvousState state = decode(store_->get());
  const std::vector<std::string> silent = lost(state);
  if (state.round == round_ && !state.end &&
      (!silent.empty() || has_room_for_more(state, settings_.limits))) {
    state = update([&](RendezvousState& next) {
      for (const std::string& id : silent) {
        if (!next.end) remove(next, settings_.limits, id, "is lost");
      }
      if (!next.end && next.round == round_ && has_room_for_more(next, settings_.limits)) {
        begin_next(next, settings_.limits, "a node has come");
      }
    });
  }
  if (state.end) {
    end_ = state.end;
    return News::End;
  }
  return state.round == round_ ? News::None : News::NextRound;
}

void Rendezvous::finished() {
  const RendezvousState state = update([&](RendezvousState& next) {
    if (!next.end && next.round == round_) finish(next, self_.id);
  });
  end_ = state.end;
}

bool Rendezvous::failed(const std::string& why, int code) {
  const RendezvousState state = update([&](RendezvousState& next) {
    if (!next.end && next.round == round_) fail(next, settings_.limits, why, code);
  });
  end_ = state.end;
  return !state.end;
}

void Rendezvous::leave(const std::function<bool()>& goes_on) noexcept {
  if (settings_.limits.most == 1) return;
  try {
    RendezvousState state = update(Deadline::in(patience()), [&](RendezvousState& next) {
      remove(next, settings_.limits, self_.id, "has left");
    });
    if (!store_->is_hosted_here() || !state.end) return;
    for (const Deadline deadline = Deadline::in(patience()); !deadline.passed() && goes_on();) {
      if (all_ids(state).empty()) return;
      std::this_thread::sleep_for(kBetweenAttempts);
      state = decode(store_->get());
    }
  } catch (const std::exception& error) {
    log::debug(std::string("leaving the rendezvous: ") + error.what());
  }
}

}  // namespace weft::launch
