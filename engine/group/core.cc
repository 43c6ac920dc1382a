#include <algorithm>
#include <thread>

#include <weft/base/log.h>
#include <weft/engine/group/core.h>

namespace weft::group {

namespace {

constexpr std::size_t kMostCalls = 1024;  // length of another rank's text about differing calls

}  // namespace

Core::Core(CoreOptions given, trace::Member as)
    : options(std::move(given)),
      member(as),
      bootstrap(std::make_shared<StoreBootstrap>(options.own_store,
                                                 [this] { failure.throw_if_broken(); })),
      ledger(std::make_shared<Ledger>(options.name, options.rank, options.global_ranks,
                                      [weak = std::weak_ptr(options.job->membership)](Frame frame) {
                                        if (const auto alive = weak.lock())
                                          alive->send(std::move(frame));
                                      })),
      failure(options, *ledger, *this),
      carriers(options),
      joining(options, *bootstrap, *ledger, failure, carriers),
      operations(*this) {}

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
  const auto member =
      trace::Member::join({"group", options.name, options.rank, options.global_ranks});
  try {
    std::shared_ptr<Core> core(new Core(options, member), [outside, ended](Core* last) {
      outside([last, ended] {
        delete last;
        ended->raise();
      });
    });
    core->join(parent);
    const std::shared_ptr<LeaveOnDrop> stay(
        new LeaveOnDrop{std::move(core), ended},
        [outside](LeaveOnDrop* last) { outside([last] { delete last; }); });
    const std::shared_ptr<Core> handle(stay, stay->core.get());
    handle->handle = handle;
    return ProcessGroup(handle);
  } catch (...) {
    member.withdraw();  // the same ranks may meet again, as the same group
    tell_given_up(options, to_error(std::current_exception(), Blame::Busy));
    throw;
  }
}

void Core::join(Core* parent) {
  listen();
  joining.join(parent);
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
    return core ? core->operations.pending() : std::vector<Waits::Wait>();
  };
  source.progress = [weak = weak_from_this()] {
    const auto core = weak.lock();
    return core ? core->operations.progress()
                : Waits::Progress{0, "no operation: it has left the group"};
  };
  source.call = [weak = weak_from_this()](std::uint64_t number) {
    const auto core = weak.lock();
    return core ? core->operations.call(number) : std::nullopt;
  };
  source.differ = [weak = weak_from_this()](const std::string& how) {
    if (const auto core = weak.lock()) core->failure.differ(how);
  };
  options.job->waits->add(options.name, std::move(source));
}

// --- Leaving ---

void Core::leave_at_last() {
  if (!operations.refuse_later()) return;
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
  if (!operations.refuse_later()) operations.throw_if_left();
  if (const auto late = part(std::min(limit, kLongestTimeout))) throw Error(*late);
}

bool Core::has_left(int rank) const {
  const auto leavers = ledger->leavers();
  return std::find(leavers.begin(), leavers.end(), rank) != leavers.end();
}

std::optional<Error> Core::part(std::chrono::milliseconds limit) {
  if (options.size == 1 || !options.job->connected) return std::nullopt;
  if (failure.is_broken()) {
    failure.tell_leaving();
    return std::nullopt;
  }
  const auto& membership = options.job->membership;
  const Deadline deadline = Deadline::in(limit);
  const std::string own = operations.wait_for_all(deadline);
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
  std::vector<transport::PointToPoint::Unreceived> all;
  for (const auto& communicator : carriers.communicators()) {
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

}  // namespace weft::group
