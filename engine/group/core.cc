#include <algorithm>
#include <cerrno>
#include <charconv>
#include <system_error>
#include <thread>

#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include <weft/base/log.h>
#include <weft/base/shortage.h>
#include <weft/engine/group/backends.h>
#include <weft/engine/group/core.h>
#include <weft/engine/group/joining.h>
#include <weft/engine/store/backoff.h>
#include <weft/engine/tensor/tensor.h>
#include <weft/profiling/trace/dump.h>
#include <weft/transport/registry.h>

namespace weft::group {

namespace {

constexpr std::size_t kMostCalls = 1024;  // length of another rank's text about differing calls
constexpr const char* kFailedKey = "weft/failed";

std::string here_key(int rank) { return "weft/here/" + std::to_string(rank); }

// The failure that tell_failure() has left in the store.
Error could_not_join(const std::string& told) {
  int rank = -1;
  const auto number = std::from_chars(told.data(), told.data() + told.size(), rank);
  const std::string text(number.ptr, told.data() + told.size());
  return Error(Blame::PeerLost, "rank " + std::to_string(rank) + " could not join:" + text)
      .with_ranks({rank});
}

const char* device_prefix(c10::DeviceType type) { return type == c10::kCUDA ? "cuda/" : "cpu/"; }

DeviceType to_weft(c10::DeviceType type) {
  return type == c10::kCUDA ? DeviceType::Cuda : DeviceType::Host;
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

// Tells the other ranks why this one could not join, as far as they need to know.
void tell_given_up(const CoreOptions& options, const Error& error) {
  const auto tell_members = [&](const std::string& how) {
    options.job->membership->send(
        {FrameType::Abort, 0, kLeftByException, options.name, how + error.text()});
  };
  switch (error.blame()) {
    case Blame::PeerLost:   // meet() tells them itself
    case Blame::Protocol:   // so it does here
    case Blame::Cancelled:  // all ranks are told of these
      break;
    case Blame::Timeout:
      // Not in the store: it may end with this rank, and the same ranks may meet there again.
      tell_members("it gave up: ");
      break;
    default:  // they would wait for this rank
      tell_failure(options, error);
      tell_members("it could not join: ");  // the store may end with this rank before they look
  }
}

// Throws if the backend cannot be used on this machine.
Carrier named_carrier(c10::DeviceType type, const std::string& backend) {
  Carrier carrier;
  carrier.named = backend;
  auto transport = transport::open(backend);
  carrier.staged = type == c10::kCUDA && !transport->reaches(DeviceType::Cuda) &&
                   transport->reaches(DeviceType::Host);
  if (carrier.staged || transport->reaches(to_weft(type))) {
    carrier.backend = backend;
    carrier.transport = std::move(transport);
  } else {
    carrier.why_not = "backend '" + backend + "' does not carry " +
                      c10::DeviceTypeName(type, /*lower_case=*/true) + " tensors";
  }
  return carrier;
}

// Like named_carrier(), but if a default backend cannot carry host memory, the fallback replaces
// it, so that host memory always has a carrier. Throws Busy if this process is short of a resource.
Carrier default_carrier(c10::DeviceType type, const std::string& backend) {
  try {
    return named_carrier(type, backend);
  } catch (const Error& error) {
    if (error.blame() == Blame::Busy) throw;  // the fallback would lack it too
    if (type == c10::kCPU) {
      static std::once_flag said;
      std::call_once(said, [&] {
        log::warn("groups of this process carry host memory over '" +
                  std::string(kFallbackBackend) + "': " + error.text() +
                  "; WEFT_BACKEND or ProcessGroupOptions::backend chooses another");
      });
      return named_carrier(type, kFallbackBackend);
    }
    Carrier none;
    none.named = backend;
    none.why_not = error.text();
    return none;
  }
}

}  // namespace

void tell_failure(const CoreOptions& options, const Error& error) {
  try {
    // could_not_join() reads it.
    StoreBootstrap(options.own_store)
        .set(kFailedKey, to_bytes(std::to_string(options.rank) + " " + error.text()));
  } catch (const Error& second) {
    log::debug("cannot tell the other ranks: " + second.text());
  }
}

Core::Core(CoreOptions given)
    : options(std::move(given)),
      bootstrap(std::make_shared<StoreBootstrap>(options.own_store,
                                                 [this] { failure.throw_if_broken(); })),
      ledger(std::make_shared<Ledger>(options.name, options.rank, options.global_ranks,
                                      [weak = std::weak_ptr(options.job->membership)](Frame frame) {
                                        if (const auto alive = weak.lock())
                                          alive->send(std::move(frame));
                                      })),
      failure(options, *ledger, *this),
      member_(trace::Member::join({"group", options.name, options.rank, options.global_ranks})) {
  const bool by_default = is_default_backend(options.backend);
  for (const auto& [type, name] : parse_backends(options.backend)) {
    try {
      carriers_[type] = by_default ? default_carrier(type, name) : named_carrier(type, name);
    } catch (const Error&) {
      member_.withdraw();  // see make()
      throw;
    }
    if (!carriers_[type].why_not.empty())
      log::debug(options.place() + ": " + carriers_[type].why_not);
  }
}

Core::~Core() {
  options.job->membership->forget(options.name);
  options.job->waits->remove(options.name);
}

// Shared by handles and Works: the group leaves when the last of them is destroyed. Until then the
// Core is whole, so that a loss ends the waits of leaving.
struct Core::LeaveOnDrop {
  std::shared_ptr<Core> core;
  std::shared_ptr<HostFlag> ended;  // raised when the Core is destroyed
  ~LeaveOnDrop() {
    if (core->made_in_.is_inherited()) {
      core->options.job->loop->close_inherited();
      keep_inherited(core);
      return;
    }
    try {
      core->leave_at_last();
    } catch (const std::exception& error) {
      log::warn("leaving " + core->options.place() + ": " + error.what());
    }
    // The loop may be telling this group of an event that it then passes on to other ranks. Let it
    // finish, since this process may end next. The Core is then destroyed here, not on the loop.
    finish_turn(*core->options.job->loop);
    // A callback may hold the Core for a moment, and then destroys it. Wait for that: the user
    // relies on the group's resources being released (a FileStore, a port).
    core.reset();
    static_cast<void>(ended->synchronize(Deadline::never()));
  }
};

ProcessGroup Core::make(const CoreOptions& options, Core* parent) {
  // The last reference may be dropped inside a turn of the loop, or where a backend ends an
  // operation (as a continuation's capture). Leaving waits for those threads, so it runs on another
  // one.
  const auto outside = [loop = std::weak_ptr(options.job->loop)](auto call) {
    const auto is_inside = [&] {
      const auto alive = loop.lock();
      return alive && alive->inside();
    };
    if (is_inside() || Op::ending()) {
      std::thread(std::move(call)).detach();
    } else {
      call();
    }
  };
  const auto ended = std::make_shared<HostFlag>();
  trace::Member member;
  try {
    std::shared_ptr<Core> core(new Core(options), [outside, ended](Core* last) {
      outside([last, ended] {
        delete last;
        ended->raise();
      });
    });
    member = core->member_;
    core->join(parent);
    const std::shared_ptr<LeaveOnDrop> stay(
        new LeaveOnDrop{std::move(core), ended},
        [outside](LeaveOnDrop* last) { outside([last] { delete last; }); });
    const std::shared_ptr<Core> handle(stay, stay->core.get());
    handle->handle_ = handle;
    return ProcessGroup(handle);
  } catch (...) {
    member.withdraw();  // the same ranks may meet again, as the same group
    tell_given_up(options, to_error(std::current_exception(), Blame::Busy));
    throw;
  }
}

void Core::join(Core* parent) {
  parent_ = parent;
  listen();
  try {
    if (carries(c10::kCPU)) {
      communicator(c10::Device(c10::kCPU));
    } else if (options.size > 1) {
      options.job->connected ? await_members() : meet_members();
    }
  } catch (...) {
    ledger->on_joined();
    throw;
  }
  ledger->on_joined();
  parent_ = nullptr;
}

// If no backend meets the other ranks before the first operation, the job's ranks meet here. Python
// ranks do not announce themselves, so this waits only for kMoment for ranks that may be Python's.
void Core::meet_members() {
  constexpr auto kMoment = std::chrono::seconds(60);
  const auto& membership = options.job->membership;
  bootstrap->set(here_key(options.rank), to_bytes(backends()));
  try {
    membership->wait_for_all(
        Deadline::in(std::min<std::chrono::milliseconds>(options.timeout, kMoment)));
  } catch (const Error& error) {
    if (error.blame() != Blame::Timeout) throw;
    const std::vector<int> missing = missing_ranks();
    if (options.timeout <= kMoment) throw not_come(missing);
    log::warn("joining " + options.place() + ": " + ranks_text(missing) + " did not come within " +
              describe(kMoment) + "; this is expected of Python's ranks, and this rank goes on");
    return;
  }
  membership->connect([this] { throw_if_hopeless(); }, Deadline::in(options.timeout));
  options.job->connected = true;
  options.job->waits->on_connected();
}

// The same for a later group: before a member tells something about the group, for example that it
// leaves, the others must be listening.
void Core::await_members() {
  bootstrap->set(here_key(options.rank), to_bytes(backends()));
  const Deadline deadline = Deadline::in(options.timeout);
  Waits::Meeting joining(options.job->waits, options.name, joining_what(), options.rank,
                         joining_hint(), [this] { return missing_ranks(); });
  for (int rank = 0; rank < options.size; ++rank) {
    const bool is_told =
        options.job->membership->has(options.global_ranks[static_cast<std::size_t>(rank)]);
    if (rank == options.rank || !is_told) continue;
    for (Backoff pause; !bootstrap->exists(here_key(rank)); pause.wait(deadline)) {
      throw_if_hopeless();
      joining.look();
      if (!deadline.passed()) continue;
      throw not_come(missing_ranks());
    }
  }
}

void Core::listen() {
  const auto& membership = options.job->membership;
  // Converts a rank of the job to one of this group; -1 if it is not a member.
  const auto rank_in_group = [ranks = options.global_ranks](int rank) {
    const auto found = std::find(ranks.begin(), ranks.end(), rank);
    return found == ranks.end() ? -1 : static_cast<int>(found - ranks.begin());
  };
  const auto lose = [ledger = ledger, weak = weak_from_this(), rank_in_group](
                        int rank, const std::string& how) {
    const int member = rank_in_group(rank);
    const auto core = weak.lock();
    if (member < 0 || !core) return;
    ledger->on_lost(rank);
    // All ranks are connected through the job's rank 0; without it new_group fails.
    const char* const fix =
        rank == 0 ? "; restart the job"
                  : "; make a group of the living ranks with new_group, or restart the job";
    core->failure.fail(
        Error(Blame::PeerLost, "rank " + std::to_string(member) + " is lost: " + how + fix)
            .with_ranks({member}));
  };
  const auto look_behind = [ledger = ledger, weak = weak_from_this()] {
    const auto core = weak.lock();
    const auto error = ledger->left_behind();
    if (core && error) core->failure.fail(*error);
  };
  Membership::Listener listener;
  listener.lost = [ledger = ledger, lose](int rank, const std::string& how) {
    ledger->on_gone(rank);
    lose(rank, how);
  };
  listener.aborted = [ledger = ledger, weak = weak_from_this(), rank_in_group,
                      lose](const Frame& abort) {
    if (abort.number == kLeftByException) {
      ledger->on_gone(abort.rank);  // it leaves, and does not wait for the others to complete
      return lose(abort.rank, abort.text);
    }
    if (abort.number == kCallsDiffer) {
      ledger->on_gone(abort.rank);  // it completes nothing more in this group
      const auto core = weak.lock();
      return core ? core->failure.fail(Error(Blame::Caller, abort.text.substr(0, kMostCalls)))
                  : void();
    }
    const std::string who = "rank " + std::to_string(rank_in_group(abort.rank));
    if (const auto core = weak.lock())
      core->failure.fail(Error(Blame::Cancelled, who + " aborted the group: " + abort.text));
  };
  listener.leaving = [ledger = ledger, look_behind](const Frame& frame) {
    ledger->on_leaving(frame);
    look_behind();
  };
  listener.completed = [ledger = ledger](int rank, int leaver) {
    ledger->on_completed(rank, leaver);
  };
  listener.gone = [ledger = ledger, lose](int rank) {
    ledger->on_gone(rank);
    if (!ledger->has_left(rank)) lose(rank, "it left the job after its group had broken");
  };
  listener.alone = [ledger = ledger] { ledger->on_alone(); };
  membership->listen(options.name, std::move(listener));
  Waits::Source source;
  source.members = options.global_ranks;
  source.rank = options.rank;
  source.pending = [weak = weak_from_this()] {
    const auto core = weak.lock();
    return core ? core->pending() : std::vector<Waits::Wait>();
  };
  source.progress = [weak = weak_from_this()] {
    const auto core = weak.lock();
    return core ? core->progress() : Waits::Progress{0, "no operation: it has left the group"};
  };
  source.call = [weak = weak_from_this()](std::uint64_t number) {
    const auto core = weak.lock();
    return core ? core->call(number) : std::nullopt;
  };
  source.differ = [weak = weak_from_this()](const std::string& how) {
    if (const auto core = weak.lock()) core->failure.differ(how);
  };
  options.job->waits->add(options.name, std::move(source));
}

// --- Joining ---

transport::Communicator& Core::communicator(c10::Device device) {
  static_cast<void>(carrier(device));
  std::lock_guard making(making_mutex_);
  Carrier& carrier = carriers_.at(device.type());
  if (carrier.communicator && carrier.device != device) {
    throw Error(Blame::Caller, "this rank " + options.place() + " uses " + carrier.device.str() +
                                   ", and this tensor is on " + device.str() +
                                   "; a group carries tensors of one GPU (set LOCAL_RANK or "
                                   "ProcessGroupOptions::device, or make a group for the other: "
                                   "new_group(ranks, {.device = …}))");
  }
  if (carrier.communicator) return *carrier.communicator;
  if (failure.is_broken()) {
    if (handle_.expired()) throw_if_hopeless();
    failure.throw_if_broken();
  }
  options.job->devices->refuse_capture(
      device, "the first operation " + options.place(),
      "the ranks connect for it; run one collective of the group before the capture");
  try {
    make_communicator(carrier, device);
  } catch (...) {
    // At the first operation on a device the group exists, and the others wait in that operation.
    if (!handle_.expired()) {
      const Error error = to_error(std::current_exception(), Blame::Busy);
      tell_given_up(options, error);
      failure.fail(error);
    }
    throw;
  }
  return *carrier.communicator;
}

void Core::make_communicator(Carrier& carrier, const c10::Device& device) {
  transport::JoinOptions join;
  join.rank = options.rank;
  join.size = options.size;
  join.group_name = options.name;
  join.store = std::make_shared<StoreBootstrap>(
      c10::make_intrusive<c10d::PrefixStore>(device_prefix(device.type()), options.own_store));
  join.device = carrier.staged ? Device::host() : tensor::device_of(device);
  if (device.is_cuda()) join.cuda = options.job->devices->open(device.index());
  join.timeout = options.timeout;
  join.loop = options.job->loop;
  join.interface_address = options.job->local_address;
  auto made = meet(carrier, device.type(), join);
  if (carrier.staged) {
    warn_of_shared_gpu(*join.store, device);
    made = options.job->devices->stage_over(std::move(made), device.index(), options.job->loop);
  }
  if (!options.job->connected) {
    // All ranks of the job have come this far, so it is known now which of them run Weft.
    options.job->membership->connect([this] { throw_if_hopeless(); },
                                     Deadline::in(options.timeout));
    options.job->connected = true;
    options.job->waits->on_connected();
  }
  {
    std::lock_guard lock(carriers_mutex_);
    carrier.communicator = std::move(made);
    carrier.device = device;
  }
  failure.abort_on_failure(carrier.communicator);
}

// Joins the communicator on a thread of its own. A backend that waits for a rank which has died
// waits for the whole timeout and cannot be told, so that thread is left to it.
std::shared_ptr<transport::Communicator> Core::meet(const Carrier& carrier, c10::DeviceType type,
                                                    const transport::JoinOptions& join) {
  if (options.size == 1) return carrier.transport->join(join);
  struct Attempt : HostFlag {
    std::shared_ptr<transport::Communicator> made;
    std::exception_ptr error;
  };
  const auto attempt = std::make_shared<Attempt>();
  failure.raise_on_failure(attempt);
  bootstrap->set(here_key(options.rank), to_bytes(backends()));
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
    throw system_error(Blame::Busy, "joining " + options.place() + ": starting a thread",
                       error.code().value());
  }
  const Deadline deadline = Deadline::in(options.timeout);
  if (!options.job->connected) {
    options.job->membership->connect_to_first([&] { return attempt->query(); }, deadline);
  }
  Waits::Meeting joining(options.job->waits, options.name, joining_what(), options.rank,
                         joining_hint(), [this] { return missing_ranks(); });
  bool agreed = false;
  while (!attempt->synchronize(Deadline::in(std::chrono::milliseconds(100)))) {
    throw_if_hopeless();
    throw_if_out_of_reach();
    agreed = agreed || agrees_with_first(type);
    joining.look();
  }
  if (failure.is_broken()) throw_if_hopeless();
  try {
    if (attempt->error) std::rethrow_exception(attempt->error);
  } catch (const Error& error) {
    // A lost rank's connections may break before this rank hears of the loss.
    if (error.blame() == Blame::PeerLost) static_cast<void>(failure.is_broken(kLossIsTold));
    throw_if_hopeless();
    static_cast<void>(agrees_with_first(type));
    if (ends_connection(error.blame())) tell_failure(options, error);
    if (error.blame() != Blame::Timeout) throw;
    const std::vector<int> missing = missing_ranks();
    throw error
        .with_text("joining " + options.place() + ": " +
                   (missing.empty() ? "all ranks came, but were not connected"
                                    : ranks_text(missing) + " did not come") +
                   " within " + describe(options.timeout) + ": " + error.text() +
                   (missing.empty() ? "; WEFT_SOCKET_IFNAME chooses another network, "
                                      "ProcessGroupOptions::backend another "
                                      "way (weft-info lists them)"
                                    : ""))
        .with_ranks(missing.empty() ? error.ranks() : missing);
  }
  return std::move(attempt->made);
}

// Throws the error that ends joining early, if there is one. A rank that could not join writes the
// reason into the store and leaves right after that, perhaps with the store.
void Core::throw_if_hopeless() {
  std::optional<std::string> told;
  std::optional<Error> unreachable;
  // Checked first: a rank writes into the store before it leaves.
  const bool was_broken = failure.is_broken();
  try {
    if (bootstrap->exists(kFailedKey))
      told = to_text(bootstrap->get(kFailedKey, Deadline::never()));
  } catch (const Error& error) {
    unreachable = error;
    static_cast<void>(failure.is_broken(kLossIsTold));
  }
  if (told) throw could_not_join(*told).within("joining " + options.place());
  if (parent_ != nullptr) parent_->failure.throw_if_aborted();
  if (parent_ != nullptr && !unreachable) {
    parent_->throw_if_left_without([this](int rank) {
      const auto& all = options.global_ranks;
      const auto member = std::find(all.begin(), all.end(),
                                    parent_->options.global_ranks[static_cast<std::size_t>(rank)]);
      return member == all.end() ||
             bootstrap->exists(here_key(static_cast<int>(member - all.begin())));
    });
  }
  if (was_broken || unreachable) failure.throw_if_broken();
  if (unreachable) throw Error(*unreachable);
}

// A rank whose connection the store's host cannot accept never learns why.
void Core::throw_if_out_of_reach() {
  if (!options.job->hosts_store || options.job->connected || descriptors_left(1) > 0) return;
  const std::vector<int> missing = missing_ranks();
  if (missing.empty()) return;
  throw Error(Blame::Busy,
              "joining " + options.place() +
                  ": this process, which hosts the job's store, has no file descriptor left for " +
                  ranks_text(missing) + remedy_for(EMFILE),
              EMFILE)
      .with_ranks(missing);
}

// `came` returns true if the rank has come, or need not come.
void Core::throw_if_left_without(const std::function<bool(int rank)>& came) const {
  for (const int rank : ledger->leavers()) {
    if (came(rank)) continue;
    throw Error(Blame::PeerLost,
                "rank " + std::to_string(rank) + " has left group '" + options.name +
                    "' and will not come; make a group of the other ranks with new_group")
        .with_ranks({rank});
  }
}

// True if rank 0 has announced its backends; throws Caller if this rank has other ones.
bool Core::agrees_with_first(c10::DeviceType type) {
  if (options.rank == 0) return true;
  if (!bootstrap->exists(here_key(0))) return false;
  const std::string said = to_text(bootstrap->get(here_key(0), Deadline::in(options.timeout)));
  const auto name = [type](const std::string& backends) {
    const auto all = parse_backends(backends);
    const auto found = all.find(type);
    return found == all.end() ? "none" : "'" + found->second + "'";
  };
  if (name(said) == name(backends())) return true;
  throw Error(Blame::Caller,
              "joining " + options.place() + ": rank 0 has backend " + name(said) + " for " +
                  c10::DeviceTypeName(type, /*lower_case=*/true) + " tensors, rank " +
                  std::to_string(options.rank) + " has " + name(backends()) +
                  "; give all ranks the same (ProcessGroupOptions::backend, WEFT_BACKEND)");
}

// The backends of this rank in the form of parse_backends(), with the fallback where it replaced a
// default.
std::string Core::backends() const {
  std::string text;
  for (const auto& [type, carrier] : carriers_) {
    text += (text.empty() ? "" : ",") +
            std::string(c10::DeviceTypeName(type, /*lower_case=*/true)) + ":" +
            (carrier.backend.empty() ? carrier.named : carrier.backend);
  }
  return text;
}

std::vector<int> Core::missing_ranks() {
  std::vector<int> ranks;
  for (int rank = 0; rank < options.size; ++rank) {
    if (!bootstrap->exists(here_key(rank))) ranks.push_back(rank);
  }
  return ranks;
}

std::string Core::joining_what() const {
  return parent_ == nullptr ? "init_process_group" : "the making";
}

std::string Core::joining_hint() const {
  if (parent_ != nullptr) return "all its ranks must make it, in the same order of groups";
  const std::string own =
      "rank " + std::to_string(options.rank) + " of " + std::to_string(options.size);
  return "all ranks must be started with the same address and world size" +
         (options.said_by.empty() ? "" : "; this one is " + own + " by " + options.said_by);
}

Error Core::not_come(const std::vector<int>& ranks) const {
  return Error(Blame::Timeout, "joining " + options.place() + ": " + ranks_text(ranks) +
                                   " did not come within " + describe(options.timeout))
      .with_ranks(ranks);
}

// --- Leaving ---

void Core::leave_at_last() {
  if (has_left_.exchange(true)) return;
  if (options.size > 1 && options.job->connected && !failure.is_broken() &&
      std::uncaught_exceptions() > 0) {
    return options.job->membership->send(
        {FrameType::Abort, 0, kLeftByException, options.name, "it left the group by an exception"});
  }
  if (const auto late = part(options.timeout)) log::error(late->text());
}

void Core::leave(std::chrono::milliseconds limit) {
  if (limit.count() <= 0) {
    throw Error(Blame::Caller, "leave " + options.place() + ": a limit of " + describe(limit) +
                                   "; it must be positive");
  }
  if (has_left_.exchange(true)) throw_if_left();
  if (const auto late = part(std::min(limit, kLongestTimeout))) throw Error(*late);
}

bool Core::has_left(int rank) const {
  const auto leavers = ledger->leavers();
  return std::find(leavers.begin(), leavers.end(), rank) != leavers.end();
}

void Core::throw_if_left() const {
  if (has_left_)
    throw Error(Blame::Caller,
                "this rank has left " + options.self() + " by leave(); make another group");
}

std::optional<Error> Core::part(std::chrono::milliseconds limit) {
  if (options.size == 1 || !options.job->connected) return std::nullopt;
  if (failure.is_broken()) {
    failure.tell_leaving();
    return std::nullopt;
  }
  const auto& membership = options.job->membership;
  const Deadline deadline = Deadline::in(limit);
  const std::string own = wait_for_own_operations(deadline);
  if (failure.is_broken()) {  // broken meanwhile
    failure.tell_leaving();
    return std::nullopt;
  }
  const auto known = [&](int rank) { return membership->has(rank); };
  ledger->say_leaving();
  Patience patience(options.job->waits->reports());
  std::vector<int> slow;
  for (;;) {
    slow = ledger->await_others(known, Deadline::sooner(deadline, patience.next()));
    if (slow.empty() || deadline.passed()) break;
    if (!patience.is_over()) continue;
    log::warn("rank " + std::to_string(options.rank) + " has waited " +
              describe_wait(patience.waited()) + " to leave group '" + options.name +
              "': " + ranks_have(slow) +
              " not completed the operations of this rank, and leaving earlier would discard "
              "bytes that are on their way");
  }
  warn_of_unreceived();
  if (!own.empty()) {
    return Error(Blame::Timeout, "leaving " + options.place() + ": " + own +
                                     ", which not all ranks have joined, has not ended " +
                                     "within " + describe(limit))
        .with_ranks(slow);
  }
  if (slow.empty()) return std::nullopt;
  return Error(Blame::Timeout, "leaving " + options.place() + ": within " + describe(limit) + " " +
                                   ranks_have(slow) + " not completed the operations of this rank")
      .with_ranks(slow);
}

void Core::warn_of_unreceived() {
  if (failure.is_broken()) return;
  std::vector<std::shared_ptr<transport::Communicator>> communicators;
  {
    std::lock_guard lock(carriers_mutex_);
    for (const auto& [type, carrier] : carriers_) {
      if (carrier.communicator) communicators.push_back(carrier.communicator);
    }
  }
  std::vector<transport::PointToPoint::Unreceived> all;
  for (const auto& communicator : communicators) {
    transport::PointToPoint* const messages = communicator->point_to_point();
    if (messages == nullptr) continue;
    for (const auto& one : messages->unreceived()) all.push_back(one);
  }
  if (all.empty()) return;
  const auto& first = all.front();
  const std::string whose = " of rank " + std::to_string(first.from) + " (tag " +
                            std::to_string(first.tag) + ", " + std::to_string(first.bytes) +
                            " bytes)";
  const std::string who =
      "rank " + std::to_string(options.rank) + " leaves group '" + options.name + "' with ";
  if (all.size() == 1) return log::warn(who + "1 message" + whose + " that was never received");
  log::warn(who + std::to_string(all.size()) + " messages that were never received; the first is" +
            whose);
}

// Skips receives: nobody is left who could want their bytes. The job's Waits go on reporting these
// operations.
std::string Core::wait_for_own_operations(Deadline deadline) {
  std::vector<Issued> unfinished;
  {
    // Other threads may be issuing; from now on they are refused.
    std::lock_guard lock(issue_mutex);
    unfinished = unfinished_;
  }
  for (const Issued& one : unfinished) {
    if (!one.receives && !one.op.done().synchronize(deadline)) return one.wait.what();
  }
  return "";
}

// --- Devices and their backends ---

const Carrier& Core::carrier(c10::Device device) const {
  const auto found = carriers_.find(device.type());
  if (found == carriers_.end() || found->second.backend.empty()) {
    throw Error(Blame::Caller, "no backend " + options.place() + " carries tensors on " +
                                   device.str() +
                                   (found == carriers_.end() ? "" : ": " + found->second.why_not) +
                                   "; the group was made with backend '" + backends() + "'");
  }
  return found->second;
}

c10::Device Core::host_values_device() const {
  return carries(c10::kCPU) ? c10::Device(c10::kCPU) : options.device;
}

c10::Device Core::barrier_device() const {
  return carries(options.device.type()) ? options.device : c10::Device(c10::kCPU);
}

bool Core::carries(c10::DeviceType type) const {
  const auto found = carriers_.find(type);
  return found != carriers_.end() && !found->second.backend.empty();
}

}  // namespace weft::group
