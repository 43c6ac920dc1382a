#include <algorithm>
#include <charconv>
#include <cstdint>
#include <iterator>
#include <map>
#include <optional>
#include <set>
#include <sstream>

#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include <weft/base/log.h>
#include <weft/engine/group/arguments.h>
#include <weft/engine/group/backends.h>
#include <weft/engine/group/core.h>
#include <weft/engine/group/store_meeting.h>
#include <weft/engine/store/backoff.h>
#include <weft/profiling/trace/dump.h>
#include <weft/profiling/trace/operation.h>
#include <weft/profiling/trace/trace.h>

namespace weft::group {

namespace {

constexpr const char* kPassed = "passed";
// How long ranks have to read what rank 0 has written.
constexpr auto kReading = std::chrono::seconds(1);

// The numbers that ranks exchange in split(), as "color key".
struct Split {
  int color = 0;
  int key = 0;
};

std::string encode(const Split& split) {
  return std::to_string(split.color) + " " + std::to_string(split.key);
}

Split decode(const std::string& text) {
  Split split;
  const char* end = text.data() + text.size();
  const auto first = std::from_chars(text.data(), end, split.color);
  if (first.ptr == end || std::from_chars(first.ptr + 1, end, split.key).ec != std::errc()) {
    throw Error(Blame::Protocol,
                "split: '" + text + "' in the group's store is not a color and a key");
  }
  return split;
}

// The missing ranks, as rank 0 writes them into the store.
std::string encode(const std::vector<int>& ranks) {
  std::string text;
  for (const int rank : ranks) text += std::to_string(rank) + " ";
  return text;
}

std::vector<int> decode_ranks(const std::string& text) {
  std::istringstream fields(text);
  return {std::istream_iterator<int>(fields), std::istream_iterator<int>()};
}

// A list of ranks for names: "3,0,2", "0-7", "0-1016:8". Different lists have different texts.
std::string listed(const std::vector<int>& ranks) {
  std::string text;
  for (std::size_t first = 0; first < ranks.size();) {
    std::size_t last = first;
    const int step = first + 1 < ranks.size() ? ranks[first + 1] - ranks[first] : 0;
    while (last + 1 < ranks.size() && ranks[last + 1] - ranks[last] == step) ++last;
    if (last < first + 2) last = first;  // two ranks are no range
    text += (first == 0 ? "" : ",") + std::to_string(ranks[first]);
    if (last > first)
      text += "-" + std::to_string(ranks[last]) + (step == 1 ? "" : ":" + std::to_string(step));
    first = last + 1;
  }
  return text;
}

namespace traced {
constinit trace::Name make_group{trace::Layer::Engine, "make a group"};
constinit trace::Name monitored_barrier{trace::Layer::Engine, "monitored_barrier"};
}  // namespace traced

// Runs `meet`, in which ranks meet over the store, as a recorded operation, so that the flight
// recorder shows it and the rank that has not come.
template <class Meet>
auto recorded(const trace::Member& member, const char* name, std::uint64_t number,
              const std::string& place, const Meet& meet) {
  auto traced =
      trace::Operation::begin(member, trace::Kind::Meeting, {.name = name, .sequence = number});
  try {
    auto made = meet();
    traced.end();
    return made;
  } catch (...) {
    const Error error = to_error(std::current_exception(), Blame::PeerLost);
    traced.fail(error);
    if (trace::is_worth_a_dump(error)) trace::dump_after(place, error);
    throw;
  }
}

}  // namespace

ProcessGroup Core::new_group(const std::vector<int>& ranks, const ProcessGroupOptions& wanted) {
  const std::optional<Error> loss = failure.loss();
  if (!loss) operations.throw_if_refused();
  const trace::Range range(traced::make_group, {.rank = options.rank, .ranks = options.size});
  const auto refuse = [&](const std::string& why) {
    throw Error(Blame::Caller, "new_group " + options.place() + ": " + why);
  };
  if (ranks.empty()) refuse("no ranks are given");
  if (wanted.timeout <= std::chrono::milliseconds(0))
    refuse("the timeout is " + describe(wanted.timeout));
  std::vector<bool> named(static_cast<std::size_t>(options.size));
  for (const int rank : ranks) {
    options.check_rank(rank, "new_group:");
    if (named[static_cast<std::size_t>(rank)])
      refuse("rank " + std::to_string(rank) + " is named twice");
    named[static_cast<std::size_t>(rank)] = true;
  }
  CoreOptions made = options;
  if (!wanted.backend.empty()) {
    // On every rank, also on those that are not among `ranks`.
    static_cast<void>(parse_backends(wanted.backend));
    made.backend = wanted.backend;
  }
  if (wanted.device) {
    check_device(*wanted.device, options.job->devices->count());
    made.device = *wanted.device;
    if (made.device.is_cuda() && !made.device.has_index()) {
      made.device.set_index(options.device.is_cuda() ? options.device.index() : 0);
    }
  }
  // Before the store is queried, since it may end with the ranks that see this error first.
  if (loss) {
    const std::vector<int> living = living_ranks();
    for (const int rank : ranks) {
      if (std::find(living.begin(), living.end(), rank) != living.end()) continue;
      throw loss->with_text(loss->text() + " (new_group names rank " + std::to_string(rank) +
                            ", which is lost or has left)");
    }
  }
  // Counted after all checks, so that a rank whose call was refused is in step when it calls again.
  // Counted by members, so that other ranks need not call, and may call for groups in another
  // order.
  const std::string members = listed(ranks);
  const int nth = numbers.next("group " + members);
  made.name = options.name + "/" + members + (nth == 1 ? "" : "#" + std::to_string(nth)) +
              (wanted.group_name.empty() ? "" : "." + wanted.group_name);
  if (wanted.timeout != ProcessGroupOptions().timeout)
    made.timeout = std::min(wanted.timeout, kLongestTimeout);
  const std::string prefix = "group/" + members + "/" + std::to_string(nth) + "/";
  return recorded(member, "new_group", static_cast<std::uint64_t>(numbers.next("group")),
                  options.place(), [&] {
                    try {
                      if (loss) {
                        if (options.job->membership->is_alone()) throw Error(*loss);
                        // The store may have ended with the lost rank: find out now, and do not
                        // wait for it.
                        static_cast<void>(bootstrap->exists(prefix));
                      }
                      return make_subgroup(ranks, prefix, std::move(made));
                    } catch (const Error& error) {
                      if (!loss || error.blame() != Blame::PeerLost) throw;
                      // The lost rank is named again, or it hosted the store, or the ranks were
                      // connected through it.
                      if (error.text() == loss->text()) throw;
                      throw loss->with_text(loss->text() + " (new_group: " + error.text() + ")");
                    }
                  });
}

ProcessGroup Core::split(int color, int key) {
  operations.throw_if_refused();
  const trace::Range range(traced::make_group, {.rank = options.rank, .ranks = options.size});
  const int count = numbers.next("split");
  return recorded(member, "split", static_cast<std::uint64_t>(count), options.place(), [&] {
    ProcessGroup made;
    failure.by_the_store([&] { made = divide(count, color, key); });
    return made;
  });
}

ProcessGroup Core::divide(int count, int color, int key) {
  const std::string number = std::to_string(count);
  const std::string base = "split/" + number + "/";
  bootstrap->set(base + std::to_string(options.rank), to_bytes(encode(Split{color, key})));
  const Deadline deadline = Deadline::in(options.timeout);
  Waits::Meeting wait(options.job->waits, options.name, "split #" + number, options.rank, kAllCall,
                      [this, base] { return absent_from(*bootstrap, base, options.size); });
  StoreBootstrap store = meeting(base, wait);
  std::vector<std::pair<int, int>> members;  // key, rank
  for (int rank = 0; rank < options.size; ++rank) {
    try {
      const Split theirs = decode(to_text(store.get(base + std::to_string(rank), deadline)));
      if (theirs.color == color) members.emplace_back(theirs.key, rank);
    } catch (const Error& error) {
      if (error.blame() != Blame::Timeout) throw;
      throw Error(Blame::Timeout, "split " + options.place() + ": rank " + std::to_string(rank) +
                                      " did not call it within " + describe(options.timeout))
          .with_ranks({rank});
    }
  }
  if (color < 0) return {};
  std::sort(members.begin(), members.end());
  std::vector<int> ranks;
  for (const auto& [place, rank] : members) ranks.push_back(rank);
  CoreOptions made = options;
  made.name = options.name + "/split" + number + "." + std::to_string(color);
  return make_subgroup(ranks, "split" + number + "/" + std::to_string(color) + "/",
                       std::move(made));
}

// `ranks` are ranks of this group, in the order of their new ranks.
ProcessGroup Core::make_subgroup(const std::vector<int>& ranks, const std::string& prefix,
                                 CoreOptions made) {
  const auto own = std::find(ranks.begin(), ranks.end(), options.rank);
  if (own == ranks.end()) return {};
  made.said_by.clear();
  made.rank = static_cast<int>(own - ranks.begin());
  made.size = static_cast<int>(ranks.size());
  made.global_ranks.clear();
  for (const int rank : ranks)
    made.global_ranks.push_back(options.global_ranks[static_cast<std::size_t>(rank)]);
  made.store = c10::make_intrusive<c10d::PrefixStore>(prefix, options.store);
  made.own_store = c10::make_intrusive<c10d::PrefixStore>(prefix, options.own_store);
  return make(made, this);
}

// Returns a store for a meeting of all ranks, to which each comes by setting the key base + its
// rank. Waits on it also end when a rank has left without having come.
StoreBootstrap Core::meeting(const std::string& base, Waits::Meeting& wait) {
  return StoreBootstrap(options.own_store, [this, base, &wait] {
    failure.throw_if_broken();
    ledger->throw_if_left_without(
        [&](int rank) { return bootstrap->exists(base + std::to_string(rank)); });
    wait.look();
  });
}

// Rank 0 counts the rounds that it has closed, so a rank that missed one is not behind in the next.
// A rank comes to the open round by writing the number of its attempt, and stays in it unless its
// time is over first. An attempt can be claimed once: by rank 0, which counts the rank in, or by
// the rank itself, which withdraws. (The key stays after a withdrawal: rank 0 may have seen it and
// be about to get it.)
void Core::monitored_barrier(std::chrono::milliseconds timeout) {
  operations.throw_if_refused();
  const trace::Range range(traced::monitored_barrier,
                           {.rank = options.rank, .ranks = options.size});
  if (timeout == kGroupTimeout) timeout = options.timeout;
  if (timeout.count() < 0) {
    throw Error(Blame::Caller,
                "monitored_barrier: a timeout of " + describe(timeout) + "; it must be positive");
  }
  if (options.size == 1) return;  // there is no other rank to meet
  timeout = std::min(timeout, kLongestTimeout);
  std::lock_guard lock(monitored_mutex_);
  for (const std::string& key : std::exchange(monitored_stale_, {})) bootstrap->erase(key);
  const auto round = static_cast<std::uint64_t>(bootstrap->add("monitored/closed", 0) + 1);
  const std::string base = "monitored/" + std::to_string(round) + "/";
  recorded(member, "monitored_barrier", round, options.place(), [&] {
    failure.by_the_store([&] {
      options.rank == 0 ? lead_monitored_barrier(base, timeout)
                        : follow_monitored_barrier(base, timeout);
    });
    return true;
  });
  // This round has passed, so all ranks have come to it and have left the earlier ones, whose keys
  // nobody reads any more.
  const auto mine = std::partition(monitored_keys_.begin(), monitored_keys_.end(),
                                   [&](const std::string& key) { return !key.starts_with(base); });
  monitored_stale_.assign(monitored_keys_.begin(), mine);
  monitored_keys_.erase(monitored_keys_.begin(), mine);
}

// All ranks but rank 0, which calls this.
std::set<int> Core::everybody_else() const {
  std::set<int> others;
  for (int rank = 1; rank < options.size; ++rank) others.insert(rank);
  return others;
}

// Waits until every rank has come, and claims their attempts. Returns the ranks that are missing at
// the deadline.
std::set<int> Core::count_in(const std::string& base, Deadline deadline) {
  std::map<int, std::string> came;  // ranks with their attempts
  // Fails if the rank has withdrawn, and so claimed the attempt for itself.
  const auto claim = [&](int rank) {
    return bootstrap->add(base + std::to_string(rank) + "/" + came.at(rank), 1) == 1;
  };
  Waits::Meeting wait(options.job->waits, options.name, "monitored_barrier", options.rank, kAllCall,
                      [this, base] { return absent_from(*bootstrap, base, options.size); });
  StoreBootstrap store = meeting(base, wait);
  std::set<int> missing = everybody_else();
  for (Backoff pause;; pause.wait(deadline)) {
    std::set<int> absent;
    for (const int rank : missing) {
      try {
        came[rank] = to_text(store.get(base + std::to_string(rank), deadline));
      } catch (const Error& error) {
        if (error.blame() != Blame::Timeout) throw;
        absent.insert(rank);
      }
    }
    std::erase_if(missing, [&](int rank) { return !absent.contains(rank) && claim(rank); });
    if (missing.empty() || !absent.empty() || deadline.passed()) return missing;
  }
}

void Core::lead_monitored_barrier(const std::string& base, std::chrono::milliseconds timeout) {
  for (const char* key : {"0", "verdict"}) monitored_keys_.push_back(base + key);
  bootstrap->set(base + "0", to_bytes(std::to_string(timeout.count())));
  // With a timeout of 0 no rank counts as come, not even ranks that came before: such a caller
  // wants to see the barrier fail, not to win a race.
  const std::set<int> absent =
      timeout.count() == 0 ? everybody_else() : count_in(base, Deadline::in(timeout));
  const std::vector<int> missing(absent.begin(), absent.end());
  const std::string verdict =
      absent.empty() ? kPassed : ranks_text(missing) + " did not come within " + describe(timeout);
  // In this order: a rank that has read the verdict, or comes from now on, comes to the next round.
  bootstrap->add("monitored/closed", 1);
  bootstrap->set(base + "verdict", to_bytes(verdict + "\n" + encode(missing)));
  // This process may host the store, so it waits until the others have read the verdict.
  const Deadline soon = Deadline::in(kReading);
  try {
    for (int rank = 1; rank < options.size; ++rank) {
      if (!absent.contains(rank)) bootstrap->get(base + std::to_string(rank) + "/read", soon);
    }
  } catch (const Error& error) {
    if (error.blame() != Blame::Timeout) throw;
    log::debug("monitored barrier " + options.place() +
               ": not all ranks have read the verdict yet");
  }
  if (!absent.empty())
    throw Error(Blame::Timeout, "monitored barrier " + options.place() + ": " + verdict)
        .with_ranks(missing);
}

void Core::follow_monitored_barrier(const std::string& base, std::chrono::milliseconds timeout) {
  const std::string own = base + std::to_string(options.rank);
  const std::string came = "rank " + std::to_string(options.rank) +
                           " came to the monitored barrier " + options.place() + ", but ";
  const std::string attempt = std::to_string(numbers.next("monitored barrier"));
  for (const std::string& key : {own, own + "/" + attempt, own + "/read"})
    monitored_keys_.push_back(key);
  bootstrap->set(own, to_bytes(attempt));
  Waits::Meeting wait(options.job->waits, options.name, "monitored_barrier", options.rank, kAllCall,
                      [this, base] { return absent_from(*bootstrap, base, options.size); });
  StoreBootstrap store = meeting(base, wait);
  std::optional<std::string> verdict;
  const auto listen = [&](Deadline deadline) {
    try {
      verdict = to_text(store.get(base + "verdict", deadline));
    } catch (const Error& error) {
      if (error.blame() != Blame::Timeout) throw;
    }
    return verdict.has_value();
  };
  // Rank 0, if it has come, writes at its own deadline which ranks are missing. It may have come
  // later than this rank.
  if (!listen(Deadline::in(timeout)) && bootstrap->exists(base + "0"))
    listen(Deadline::in(kReading));
  if (!verdict) {
    if (bootstrap->add(own + "/" + attempt, 1) == 1) {
      throw Error(Blame::Timeout, came + "rank 0 did not within " + describe(timeout))
          .with_ranks({0});
    }
    // Rank 0 has counted this rank in, and waits for others until its own deadline.
    const std::string theirs = to_text(bootstrap->get(base + "0", Deadline::in(kReading)));
    std::int64_t limit = 0;
    std::from_chars(theirs.data(), theirs.data() + theirs.size(), limit);
    const auto more =
        std::clamp(std::chrono::milliseconds(limit), std::chrono::milliseconds(0), kLongestTimeout);
    if (!listen(Deadline::in(more + kReading))) {
      throw Error(Blame::PeerLost, came + "rank 0 ended before it told the result").with_ranks({0});
    }
  }
  bootstrap->set(own + "/read", {});
  const auto end = std::min(verdict->find('\n'), verdict->size());
  if (const std::string how = verdict->substr(0, end); how != kPassed) {
    throw Error(Blame::Timeout, came + "it failed: " + how)
        .with_ranks(decode_ranks(verdict->substr(end)));
  }
}

}  // namespace weft::group
