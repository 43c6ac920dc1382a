// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <thread>

#include <weft/base/log.h>
#include <weft/base/make_error.h>
#include <weft/engine/group/core.h>
#include <weft/engine/group/leaving.h>

namespace weft::group {

namespace {

constexpr std::size_t kMostHeard = 1024;  // characters of another rank's text that are shown

// The state of membership's callbacks, which may outlive the group.
struct Heard {
  std::shared_ptr<Ledger> ledger;
  std::weak_ptr<Core> group;
  std::vector<int> members;  // as ranks of the job

  // Converts a rank of the job to one of this group; -1 if it is not a member.
  int rank_in_group(int rank) const {
    const auto found = std::find(members.begin(), members.end(), rank);
    return found == members.end() ? -1 : static_cast<int>(found - members.begin());
  }

  void lost(int rank, const std::string& how) const { lacks(rank, "is lost: " + how); }

  // Breaks the group, which lacks that rank of the job from now on: "rank 1" with `how` behind it.
  void lacks(int rank, const std::string& how) const {
    const int member = rank_in_group(rank);
    const auto core = group.lock();
    if (member < 0 || !core) return;
    ledger->on_lost(rank);
    const char* const fix = "; make a group of the living ranks with new_group, or restart the job";
    core->failure.fail(Error(Blame::PeerLost, "rank " + std::to_string(member) + " " + how + fix)
                           .with_ranks({member}));
  }

  void aborted(const Frame& abort) const {
    const int member = rank_in_group(abort.rank);
    if (member < 0) return;
    const std::string who = "rank " + std::to_string(member);
    const std::string text = abort.text.substr(0, kMostHeard);
    switch (abort.number) {
      case 0:
        return fail(
            Error(Blame::Cancelled, who + " aborted the group: " + text).with_ranks({member}));
      case kCallsDiffer:
        ledger->on_gone(abort.rank);  // it completes nothing more in this group
        return fail(Error(Blame::Caller, text));
      case kGaveUp:
        ledger->on_gone(abort.rank);
        if (const auto why = decode_reason(abort.text, static_cast<int>(members.size())))
          return gave_up(abort.rank, *why);
        return lacks(abort.rank, "left the group, which was broken");
      default:
        ledger->on_gone(abort.rank);  // it leaves, and does not wait for the others to complete
        return lacks(abort.rank, text);
    }
  }

  // The rank has left the group, which `why` had broken there. That is the reason here too, unless
  // it concerns that rank alone, or names this rank, which lives.
  void gave_up(int rank, const Error& why) const {
    const auto core = group.lock();
    if (!core) return;
    const std::vector<int> blamed = why.ranks();
    const bool is_told =
        why.blame() == Blame::Timeout ||
        (why.blame() == Blame::PeerLost &&
         std::find(blamed.begin(), blamed.end(), core->options.rank) == blamed.end());
    if (!is_told) return lacks(rank, "left the group, which was broken: " + why.text());
    ledger->on_lost(rank);
    core->failure.fail_as_told(rank_in_group(rank), why);
  }

  void leaving(const Frame& frame) const {
    ledger->on_leaving(frame);
    if (const auto error = ledger->left_behind()) return fail(*error);
    // The rank's leaving may have failed an operation here before its word of it came.
    const auto core = group.lock();
    if (!core || !core->failure.waits_for_news()) return;
    if (const auto error = ledger->left_before()) core->failure.fail(*error);
  }

  void fail(const Error& why) const {
    if (const auto core = group.lock()) core->failure.fail(why);
  }
};

Membership::Listener listener_of(const Heard& heard) {
  Membership::Listener listener;
  listener.lost = [heard](int rank, const std::string& how) {
    heard.ledger->on_gone(rank);
    // The end of a rank that has left the group is no loss for it.
    if (!heard.ledger->has_left(rank)) heard.lost(rank, how);
  };
  listener.aborted = [heard](const Frame& abort) { heard.aborted(abort); };
  listener.leaving = [heard](const Frame& frame) { heard.leaving(frame); };
  listener.completed = [ledger = heard.ledger](int rank, int leaver) {
    ledger->on_completed(rank, leaver);
  };
  listener.gone = [heard](int rank) {
    heard.ledger->on_gone(rank);
    if (!heard.ledger->has_left(rank)) heard.lacks(rank, "left the job after its group had broken");
  };
  return listener;
}

WaitSource source_of(Core& core) {
  const auto weak = core.weak_from_this();
  WaitSource source;
  source.members = core.options.global_ranks;
  source.rank = core.options.rank;
  source.pending = [weak] {
    const auto alive = weak.lock();
    return alive ? alive->operations.pending() : std::vector<Wait>();
  };
  source.progress = [weak] {
    const auto alive = weak.lock();
    return alive ? alive->operations.progress()
                 : Progress{0, "no operation: it has left the group"};
  };
  source.living = [ledger = core.ledger] { return ledger->living(); };
  source.call = [weak](std::uint64_t number) {
    const auto alive = weak.lock();
    return alive ? alive->operations.call(number) : std::nullopt;
  };
  source.differ = [weak](const std::string& how) {
    if (const auto alive = weak.lock()) alive->failure.differ(how);
  };
  return source;
}

// Shared by handles and Works: the group leaves when the last of them is destroyed. Until then the
// Core is whole, so that a loss ends the waits of leaving.
struct LeaveOnDrop {
  std::shared_ptr<Core> core;
  std::shared_ptr<HostFlag> ended;  // raised when the Core is destroyed
  ~LeaveOnDrop() {
    if (core->made_in.is_inherited()) {
      core->options.job->loop->close_inherited();
      keep_inherited(core);
      return;
    }
    try {
      leave_at_last(*core);
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
      failure(options, member, *ledger, *this),
      carriers(options),
      joining(options, member, *bootstrap, *ledger, failure, carriers),
      operations(*this),
      monitored_barrier(options, member, *bootstrap, *ledger, failure) {}

Core::~Core() {
  options.job->membership->forget(options.name);
  options.job->waits->sources().remove(options.name);
}

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
  options.job->membership->listen(options.name,
                                  listener_of({ledger, weak_from_this(), options.global_ranks}));
  options.job->waits->sources().add(options.name, source_of(*this));
  joining.join(parent);
  if (parent != nullptr) return;
  // From now on the ranks meet without the job's store, whose host may be lost.
  if (auto store = kept_by_members(options)) {
    options.own_store = store;
    bootstrap->move_to(std::move(store));
  }
}

}  // namespace weft::group
