// SPDX-License-Identifier: Apache-2.0
#include <atomic>
#include <chrono>
#include <map>
#include <set>

#include <pthread.h>

#include <weft/base/fork_mutex.h>
#include <weft/base/make_error.h>
#include <weft/base/mutex.h>
#include <weft/profiling/trace/flight_recorder.h>
#include <weft/profiling/trace/host_time.h>
#include <weft/profiling/trace/nvtx.h>
#include <weft/profiling/trace/operation.h>
#include <weft/profiling/trace/progress.h>
#include <weft/profiling/trace/timeline.h>

namespace weft::trace {

namespace {

constinit ForkMutex names_mutex(ForkOrder::Names);

// Never destroyed, because operations end while the process ends.
using Parties = std::map<MemberIdentity, std::uint32_t>;
Parties*& own_parties() {
  static auto* made = new Parties();
  return made;
}
Parties& parties() WEFT_REQUIRES(names_mutex) { return *own_parties(); }
std::set<std::string>& texts() WEFT_REQUIRES(names_mutex) {
  static auto* const made = new std::set<std::string>();
  return *made;
}

std::atomic<Observer*> observer{nullptr};

// A forked process has not run the recorded operations, is none of the members, and has no reader
// for an observer's counts. The parties stay in memory, because members that it has inherited point
// to them.
void forget_in_child() {
  flight_recorder().forget();
  observer.store(nullptr);
  own_parties() = new Parties();
}

constinit Name training_step{Layer::Engine, "step"};

}  // namespace

std::int64_t now() noexcept {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(
             std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

const char* name(Kind kind) noexcept {
  switch (kind) {
    case Kind::Collective: return "collective";
    case Kind::Send: return "send";
    case Kind::Receive: return "receive";
    case Kind::Call: return "call";
    case Kind::Served: return "served";
    case Kind::Reference: return "reference";
    case Kind::Backward: return "backward";
    case Kind::Gradient: return "gradient";
    case Kind::Meeting: return "meeting";
  }
  broken("no such trace::Kind");
}

const char* name(Layer layer) noexcept {
  switch (layer) {
    case Layer::Base: return "base";
    case Layer::Cuda: return "cuda";
    case Layer::Kernels: return "kernels";
    case Layer::Transport: return "transport";
    case Layer::Engine: return "engine";
    case Layer::User: return "user";
  }
  broken("no such trace::Layer");
}

Member Member::join(const MemberIdentity& party) {
  static const int registered = ::pthread_atfork(nullptr, nullptr, forget_in_child);
  static_cast<void>(registered);
  MutexLock lock(names_mutex);
  const auto found = parties().try_emplace(party, 0).first;
  return known(&found->first, found->second++);
}

void Member::withdraw() const {
  if (party_ == nullptr) return;
  MutexLock lock(names_mutex);
  const auto found = parties().find(*party_);
  if (found == parties().end() || &found->first != party_)
    return;  // it belongs to the process from which this one was forked
  if (found->second == generation_ + 1) found->second = generation_;
}

std::pmr::vector<Member> members(std::pmr::memory_resource* memory) {
  MutexLock lock(names_mutex);
  // If the only member of a party has withdrawn, includes it, because its operations are on record.
  std::pmr::vector<Member> newest(memory);
  for (const auto& [party, joined] : parties())
    newest.push_back(Member::known(&party, joined > 0 ? joined - 1 : 0));
  return newest;
}

const char* keep(const std::string& text) {
  MutexLock lock(names_mutex);
  return texts().insert(text).first->c_str();
}

Operation Operation::begin(const Member& member, Kind kind, const About& about) noexcept {
  Operation made;
  if (member.party() == nullptr) return made;
  made.open_ = true;
  made.kind_ = kind;
  made.name_ = about.name;
  made.bytes_ = about.bytes;
  made.begun_ = now();
  made.ticket_ = flight_recorder().begin(member, kind, about, made.begun_);
  made.range_ = nvtx::start(member, kind, about);
  if (timeline::on()) timeline::begin(made.ticket_, member, kind, about, made.begun_);
  if (auto* watching = observer.load(std::memory_order_acquire)) {
    watching->begun(member, kind, about.name, about.bytes);
    made.watched_ = true;
  }
  return made;
}

void Operation::end(int peer, std::uint64_t sequence) noexcept { finish(nullptr, peer, sequence); }

void Operation::fail(const Error& error) noexcept { finish(&error, -1, 0); }

void Operation::finish(const Error* error, int peer, std::uint64_t sequence) noexcept {
  if (!open_) return;
  open_ = false;
  const std::int64_t time = now();
  flight_recorder().end(ticket_, time, error, peer, sequence);
  nvtx::stop(range_);
  if (timeline::on()) timeline::end(ticket_, time, error, peer, sequence);
  if (auto* watching = observer.load(std::memory_order_acquire); watching != nullptr && watched_) {
    watching->ended(kind_, name_, static_cast<double>(time - begun_) * 1e-9, error, more_);
  }
  Progress& done = progress();
  done.operations.fetch_add(1, std::memory_order_relaxed);
  done.bytes.fetch_add(bytes_ + more_, std::memory_order_relaxed);
  if (error != nullptr) done.failures.fetch_add(1, std::memory_order_relaxed);
}

void Operation::runs_here() const noexcept {
  if (ticket_ == 0) return;
  if (kind_ == Kind::Served) flight_recorder().run(ticket_);
  if (timeline::on()) timeline::arrive_from(ticket_);
}

void observe(Observer& watching) noexcept {
  Observer* none = nullptr;
  if (!observer.compare_exchange_strong(none, &watching))
    broken("two trace::observe in one process");
}

void step(int rank) noexcept {
  progress().steps.fetch_add(1, std::memory_order_relaxed);
  count_step();
  const Payload payload{.rank = rank};
  nvtx::mark(training_step, &payload);
  if (timeline::on()) timeline::mark({"step", Layer::Engine, 0, rank});
}

}  // namespace weft::trace
