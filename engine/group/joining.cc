// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <atomic>
#include <cerrno>
#include <charconv>
#include <map>
#include <system_error>
#include <thread>
#include <utility>

#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include <weft/base/log.h>
#include <weft/base/make_error.h>
#include <weft/base/shortage.h>
#include <weft/engine/group/backends.h>
#include <weft/engine/group/core.h>
#include <weft/engine/group/joining.h>
#include <weft/engine/group/secret.h>
#include <weft/engine/group/store_meeting.h>
#include <weft/engine/store/backoff.h>
#include <weft/engine/tensor/tensor.h>
#include <weft/profiling/trace/dump.h>
#include <weft/profiling/trace/transports.h>

namespace weft::group {

namespace {

constexpr const char* kFailedKey = "weft/failed";

constexpr const char* kHere = "weft/here/";
std::string here_key(int rank) { return kHere + std::to_string(rank); }

// The failure that tell_failure() has left in the store.
Error could_not_join(const std::string& told) {
  int rank = -1;
  const auto number = std::from_chars(told.data(), told.data() + told.size(), rank);
  const std::string text(number.ptr, told.data() + told.size());
  return Error(Blame::PeerLost, "rank " + std::to_string(rank) + " could not join:" + text)
      .with_ranks({rank});
}

const char* device_prefix(c10::DeviceType type) { return type == c10::kCUDA ? "cuda/" : "cpu/"; }

// The ranks of `group`, as ranks of the group `parent`.
std::vector<int> ranks_in(const CoreOptions& parent, const CoreOptions& group) {
  std::map<int, int> by_global;
  for (int rank = 0; rank < parent.size; ++rank)
    by_global[parent.global_ranks[static_cast<std::size_t>(rank)]] = rank;
  std::vector<int> ranks;
  for (const int global : group.global_ranks) ranks.push_back(by_global.at(global));
  return ranks;
}

// Ranks that are threads of one process and share a GPU may hang where processes would not: a
// stream that waits for another rank holds up the driver for the whole process, and so that rank's
// work.
void warn_of_shared_gpu(transport::Bootstrap& store, const c10::Device& gpu) {
  if (store.add("threads on " + gpu.str() + "/" + trace::process_identity(), 1) != 2) return;
  log::warn("two ranks of a group are threads of one process and share " + gpu.str() +
            "; where one's stream waits for the other, both may wait for ever: start each rank as "
            "a process (weft-run, "
            "weft::spawn), or give each a GPU of its own");
}

}  // namespace

void tell_failure(const CoreOptions& options, const Error& error) {
  const StoreCallBounds bounds({}, kStoreAnswers);
  try {
    // could_not_join() reads it.
    signed_store_of(options).set(kFailedKey,
                                 to_bytes(std::to_string(options.rank) + " " + error.text()));
  } catch (const Error& second) {
    log::debug("cannot tell the other ranks: " + second.text());
  }
}

void tell_given_up(const CoreOptions& options, const Error& error) {
  const auto tell_members = [&](std::uint64_t how, const std::string& text) {
    options.job->membership->send({FrameType::Abort, 0, how, options.name, text});
  };
  switch (error.blame()) {
    case Blame::PeerLost:   // meet() tells them itself
    case Blame::Protocol:   // so it does here
    case Blame::Cancelled:  // all ranks are told of these
      break;
    case Blame::Timeout:
      // Not in the store: it may end with this rank, and the same ranks may meet there again.
      tell_members(kGaveUp, encode_reason(error));
      break;
    default:  // they would wait for this rank
      tell_failure(options, error);
      // The store may end with this rank before they look there.
      tell_members(kLeftByException, "could not join: " + error.text());
  }
}

Joining::Joining(const CoreOptions& options, const trace::Member& member, StoreBootstrap& store,
                 Ledger& ledger, Failure& failure, Carriers& carriers)
    : options_(options),
      member_(member),
      store_(store),
      ledger_(ledger),
      failure_(failure),
      carriers_(carriers) {}

void Joining::join(Core* parent) {
  parent_ = parent;
  try {
    if (carriers_.carries(c10::kCPU)) {
      communicator(c10::Device(c10::kCPU));
    } else if (options_.size > 1) {
      options_.job->connected ? await_members() : meet_members();
    }
  } catch (...) {
    ledger_.on_joined();
    throw;
  }
  ledger_.on_joined();
  parent_ = nullptr;
  has_joined_ = true;
}

// Tells the other ranks that this one is here, and which backends it has; in the first group
// together with the next key that `with` sets, if it is not null.
void Joining::announce(StoreBootstrap* with) {
  failure_.by_the_store([&] {
    if (is_first()) return options_.job->membership->publish(carriers_.names(), with);
    Meeting joining(options_.job->waits, options_.name, what(), options_.rank, hint(), absent());
    const StoreCallBounds bounds(while_waiting(joining));
    try {
      store_.set(here_key(options_.rank), to_bytes(carriers_.names()));
    } catch (const Error& error) {
      if (error.blame() != Blame::Timeout) throw;
      throw error.within("joining " + options_.place());
    }
  });
}

// For calls to a store whose keeper does not answer, beside what the store itself looks at.
std::function<void()> Joining::while_waiting(Meeting& joining) const {
  return [this, &joining] {
    if (parent_ != nullptr) parent_->failure.throw_if_aborted();
    joining.look();
  };
}

// Until the ranks of the job have met, the keys of their memberships announce them.
bool Joining::is_first() const { return !options_.job->connected; }

// If no backend meets the other ranks before the first operation, the job's ranks meet here. Python
// ranks do not announce themselves, so this waits only for kMoment for ranks that may be Python's.
// They know no secret.
void Joining::meet_members() {
  constexpr auto kMoment = std::chrono::seconds(60);
  constexpr auto kTurn = std::chrono::milliseconds(500);
  const auto& membership = options_.job->membership;
  const auto limit = options_.secret.empty()
                         ? std::min<std::chrono::milliseconds>(options_.timeout, kMoment)
                         : options_.timeout;
  announce();
  const Deadline deadline = Deadline::in(limit);
  Meeting joining(options_.job->waits, options_.name, what(), options_.rank, hint(), absent());
  const auto have_come = [&] {
    try {
      const Deadline turn = Deadline::sooner(deadline, Deadline::in(kTurn));
      failure_.by_the_store([&] { membership->wait_for_all(turn); });
    } catch (const Error& error) {
      if (error.blame() != Blame::Timeout) throw;
      return false;
    }
    return true;
  };
  while (!have_come()) {
    throw_if_hopeless();
    joining.look();
    if (!deadline.passed()) continue;
    const std::vector<int> missing = missing_ranks();
    if (options_.timeout <= limit) throw not_come(missing);
    log::warn("joining " + options_.place() + ": " + ranks_text(missing) + " did not come within " +
              describe(kMoment) + "; this is expected of Python's ranks, and this rank goes on");
    return;
  }
  on_all_met(true);
}

void Joining::on_all_met(bool all_run_weft) {
  try {
    options_.job->membership->connect([this] { throw_if_hopeless(); },
                                      Deadline::in(options_.timeout), all_run_weft);
  } catch (const Error& error) {
    // The store has ended with its host, which is named once that is known.
    const bool is_of_store = error.blame() == Blame::PeerLost && error.ranks().empty();
    if (is_of_store && failure_.is_broken(kLossIsTold)) failure_.throw_if_broken();
    throw;
  }
  options_.job->connected = true;
  options_.job->waits->rounds().on_connected();
}

// The same for a later group: before a member tells something about the group, for example that it
// leaves, the others must be listening.
void Joining::await_members() {
  announce();
  const Deadline deadline = Deadline::in(options_.timeout);
  Meeting joining(options_.job->waits, options_.name, what(), options_.rank, hint(), absent());
  const StoreCallBounds bounds(while_waiting(joining));
  for (int rank = 0; rank < options_.size; ++rank) {
    const bool is_told =
        options_.job->membership->has(options_.global_ranks[static_cast<std::size_t>(rank)]);
    if (rank == options_.rank || !is_told) continue;
    for (Backoff pause; !store_.exists(here_key(rank)); pause.wait(deadline)) {
      throw_if_hopeless();
      joining.look();
      if (!deadline.passed()) continue;
      throw not_come(missing_ranks());
    }
  }
}

// --- Making communicators ---

transport::Communicator& Joining::communicator(c10::Device device) {
  const Carrier& carrier = carriers_.of(device);
  MutexLock making(making_mutex_);
  if (carrier.communicator && carrier.device != device) {
    throw Error(Blame::Caller, "this rank " + options_.place() + " uses " + carrier.device.str() +
                                   ", and this tensor is on " + device.str() +
                                   "; a group carries tensors of one GPU (set LOCAL_RANK or "
                                   "ProcessGroupOptions::device, or make a group for the other: "
                                   "new_group(ranks, {.device = …}))");
  }
  if (carrier.communicator) return *carrier.communicator;
  if (failure_.is_broken()) {
    if (!has_joined_) throw_if_hopeless();
    failure_.throw_if_broken();
  }
  options_.job->devices->refuse_capture(
      device, "the first operation " + options_.place(),
      "the ranks connect for it; run one collective of the group before the capture");
  try {
    make_communicator(carrier, device);
  } catch (...) {
    // At the first operation on a device the group exists, and the others wait in that operation.
    if (has_joined_) {
      const Error error = to_error(std::current_exception(), Blame::Busy);
      tell_given_up(options_, error);
      failure_.fail(error);
    }
    throw;
  }
  return *carrier.communicator;
}

void Joining::make_communicator(const Carrier& carrier, const c10::Device& device) {
  transport::JoinOptions join;
  join.rank = options_.rank;
  join.size = options_.size;
  join.group_name = options_.name;
  const auto store =
      c10::make_intrusive<c10d::PrefixStore>(device_prefix(device.type()), options_.own_store);
  const auto gives_up = std::make_shared<std::atomic<bool>>(false);
  const auto bootstrap = std::make_shared<StoreBootstrap>(
      store,
      [gives_up] {
        if (*gives_up) throw Error(Blame::Cancelled, "this rank no longer joins the group");
      },
      is_first() ? StoreBootstrap::Lives::WithJob : StoreBootstrap::Lives::WithGroup);
  join.store = bootstrap;
  join.device = carrier.staged ? Device::host() : tensor::device_of(device);
  if (device.is_cuda()) join.cuda = options_.job->devices->open(device.index());
  join.timeout = options_.timeout;
  join.loop = options_.job->loop;
  join.interface_address = options_.job->local_address;
  join.secret = options_.secret;
  guard(join, *carrier.transport, device_prefix(device.type()));
  join.max_connections = options_.max_connections;
  const auto parent = parent_ == nullptr ? nullptr : parent_->carriers.communicator(device.type());
  if (parent) {
    join.parent = parent;
    join.parent_ranks = ranks_in(parent_->options, options_);
  }
  // Backends of Weft's own soon publish this rank's address.
  if (options_.size > 1) announce(carrier.transport->asks_for_secret() ? bootstrap.get() : nullptr);
  std::shared_ptr<transport::Communicator> made;
  try {
    made = meet(carrier, device.type(), join);
  } catch (...) {
    *gives_up = true;
    throw;
  }
  if (carrier.staged) {
    warn_of_shared_gpu(*join.store, device);
    made = options_.job->devices->stage_over(std::move(made), device.index(), options_.job->loop);
  }
  // All ranks of the job have come this far, so it is known now which of them run Weft. Others do
  // not know a backend of Weft's own, nor a secret.
  if (is_first()) on_all_met(carrier.transport->asks_for_secret() || !options_.secret.empty());
  carriers_.set(device, made);
  trace::record_transports(member_, carriers_.transports());
  failure_.abort_on_failure(made);
}

struct Joining::Attempt : HostFlag {
  std::shared_ptr<transport::Communicator> made;
  std::exception_ptr error;
};

// Joins the communicator on a thread of its own. If this rank gives up, waits of that thread on the
// store end. A backend that waits for a rank elsewhere cannot be told, and may wait for the whole
// timeout: the thread is then left to it.
std::shared_ptr<transport::Communicator> Joining::meet(const Carrier& carrier, c10::DeviceType type,
                                                       const transport::JoinOptions& join) {
  if (options_.size == 1) return carrier.transport->join(join);
  const auto attempt = std::make_shared<Attempt>();
  failure_.raise_on_failure(attempt);
  begin(attempt, carrier, join);
  await(*attempt, type);
  if (failure_.is_broken()) throw_if_hopeless();
  try {
    if (attempt->error) std::rethrow_exception(attempt->error);
  } catch (const Error& error) {
    // A lost rank's connections may break before this rank hears of the loss.
    if (error.blame() == Blame::PeerLost) static_cast<void>(failure_.is_broken(kLossIsTold));
    throw_if_hopeless();
    static_cast<void>(agrees_with_first(type));
    if (ends_connection(error.blame())) tell_failure(options_, error);
    if (error.blame() != Blame::Timeout) throw;
    throw not_connected(error);
  }
  return std::move(attempt->made);
}

void Joining::begin(const std::shared_ptr<Attempt>& attempt, const Carrier& carrier,
                    const transport::JoinOptions& join) const {
  auto work = [attempt, transport = carrier.transport,
               join = transport::JoinOptions(join)]() mutable {
    try {
      attempt->made = transport->join(join);
    } catch (...) {
      attempt->error = std::current_exception();
    }
    // This thread may end long after the group, so it releases everything first (a FileStore counts
    // its holders).
    join = {};
    transport.reset();
    attempt->raise();
  };
  try {
    std::thread(std::move(work)).detach();
  } catch (const std::system_error& error) {
    throw system_error(Blame::Busy, "joining " + options_.place() + ": starting a thread",
                       error.code().value());
  }
}

// Returns when the attempt has ended, or throws the error that ends it early.
void Joining::await(const Attempt& attempt, c10::DeviceType type) {
  constexpr std::chrono::milliseconds kTurn(100), kLongestTurn(2000), kLongestPause(5000);
  const Deadline deadline = Deadline::in(options_.timeout);
  if (is_first()) {
    Deadline turn = Deadline::in(kTurn);
    const auto is_over = [&] {
      if (turn.passed()) {
        throw_if_hopeless();
        turn = Deadline::in(kTurn);
      }
      return attempt.query();
    };
    try {
      options_.job->membership->connect_early(is_over, deadline);
    } catch (const Error& error) {
      // The rank may have told in the store why it has ended.
      if (error.blame() == Blame::PeerLost) throw_if_hopeless();
      throw;
    }
  }
  Meeting joining(options_.job->waits, options_.name, what(), options_.rank, hint(), absent());
  const StoreCallBounds bounds(while_waiting(joining));
  bool agreed = false;
  auto pause = kTurn;  // until ranks are looked for again
  Deadline look = Deadline::in(pause);
  auto turn = kTurn;  // longer if the store's host is slow to answer
  while (!attempt.synchronize(Deadline::in(turn))) {
    const auto begin = std::chrono::steady_clock::now();
    throw_if_hopeless();
    throw_if_out_of_reach();
    if (is_first() && look.passed()) {
      options_.job->membership->look_for_published();
      look = Deadline::in(pause = std::min(2 * pause, kLongestPause));
    }
    failure_.by_the_store([&] { agreed = agreed || agrees_with_first(type); });
    joining.look();
    turn = std::clamp(std::chrono::duration_cast<std::chrono::milliseconds>(
                          8 * (std::chrono::steady_clock::now() - begin)),
                      kTurn, kLongestTurn);
  }
}

// `timeout`: the backend's. Names the ranks that did not come.
Error Joining::not_connected(const Error& timeout) {
  const std::vector<int> missing = missing_ranks();
  return timeout
      .with_text("joining " + options_.place() + ": " +
                 (missing.empty() ? "all ranks came, but were not connected"
                                  : ranks_text(missing) + " did not come") +
                 " within " + describe(options_.timeout) +
                 (missing.empty() ? ": " + timeout.text() +
                                        "; WEFT_SOCKET_IFNAME chooses another network (for NCCL: "
                                        "NCCL_SOCKET_IFNAME), ProcessGroupOptions::backend another "
                                        "way (weft-info lists them)"
                                  : "; " + hint()))
      .with_ranks(missing.empty() ? timeout.ranks() : missing);
}

// Throws the error that ends joining early, if there is one. A rank that could not join writes the
// reason into the store and leaves right after that, perhaps with the store.
void Joining::throw_if_hopeless() {
  std::optional<std::string> told;
  std::optional<Error> unreachable;
  // Checked first: a rank writes into the store before it leaves.
  const bool was_broken = failure_.is_broken();
  try {
    if (auto value = store_.find(kFailedKey))
      told = to_text(signed_store_of(options_).unsealed(kFailedKey, std::move(*value)));
  } catch (const Error& error) {
    if (error.blame() == Blame::Caller) throw error.within("joining " + options_.place());
    unreachable = error;
    static_cast<void>(failure_.is_broken(kLossIsTold));
  }
  if (told) throw could_not_join(*told).within("joining " + options_.place());
  if (parent_ != nullptr) parent_->failure.throw_if_aborted();
  if (parent_ != nullptr && !unreachable) {
    parent_->ledger->throw_if_left_without([this](int rank) {
      const auto& all = options_.global_ranks;
      const auto member = std::find(all.begin(), all.end(),
                                    parent_->options.global_ranks[static_cast<std::size_t>(rank)]);
      return member == all.end() || store_.exists(here_key(static_cast<int>(member - all.begin())));
    });
  }
  if (was_broken || unreachable) failure_.throw_if_broken();
  if (unreachable) throw Error(*unreachable);
}

// A rank whose connection the store's host cannot accept never learns why.
void Joining::throw_if_out_of_reach() {
  if (!options_.job->hosts_store || options_.job->connected || descriptors_left(1) > 0) return;
  const std::vector<int> missing = missing_ranks();
  if (missing.empty()) return;
  throw Error(Blame::Busy,
              "joining " + options_.place() +
                  ": this process, which hosts the job's store, has no file descriptor left for " +
                  ranks_text(missing) + remedy_for(EMFILE),
              EMFILE)
      .with_ranks(missing);
}

// True if rank 0 has announced its backends; throws Caller if this rank has other ones.
bool Joining::agrees_with_first(c10::DeviceType type) {
  if (options_.rank == 0) return true;
  std::optional<std::string> said;
  if (is_first()) {
    said = options_.job->membership->backends_of(0);
  } else if (const auto value = store_.find(here_key(0))) {
    said = to_text(*value);
  }
  if (!said) return false;
  const auto name = [type](const std::string& backends) {
    const auto all = parse_backends(backends);
    const auto found = all.find(type);
    return found == all.end() ? "none" : "'" + found->second + "'";
  };
  if (name(*said) == name(carriers_.names())) return true;
  throw Error(Blame::Caller,
              "joining " + options_.place() + ": rank 0 has backend " + name(*said) + " for " +
                  c10::DeviceTypeName(type, /*lower_case=*/true) + " tensors, rank " +
                  std::to_string(options_.rank) + " has " + name(carriers_.names()) +
                  "; give all ranks the same (ProcessGroupOptions::backend, WEFT_BACKEND)");
}

Meeting::Missing Joining::absent() const {
  return absent_from(options_, is_first() ? Membership::key_of_ranks() : kHere);
}

std::vector<int> Joining::missing_ranks() const { return absent()(); }

std::string Joining::what() const {
  return parent_ == nullptr ? "init_process_group" : "the making";
}

std::string Joining::hint() const {
  if (parent_ != nullptr) return "all its ranks must make it, in the same order of groups";
  const std::string own =
      "rank " + std::to_string(options_.rank) + " of " + std::to_string(options_.size);
  return "all ranks must be started with the same address and world size" +
         (options_.said_by.empty() ? "" : "; this one is " + own + " by " + options_.said_by);
}

Error Joining::not_come(const std::vector<int>& ranks) const {
  return Error(Blame::Timeout, "joining " + options_.place() + ": " + ranks_text(ranks) +
                                   " did not come within " + describe(options_.timeout))
      .with_ranks(ranks);
}

}  // namespace weft::group
