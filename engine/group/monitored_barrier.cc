// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <charconv>
#include <cstdint>
#include <iterator>
#include <map>
#include <optional>
#include <sstream>
#include <utility>

#include <weft/base/log.h>
#include <weft/base/make_error.h>
#include <weft/engine/group/monitored_barrier.h>
#include <weft/engine/group/store_meeting.h>
#include <weft/engine/group/work.h>
#include <weft/engine/store/backoff.h>
#include <weft/profiling/trace/trace.h>

namespace weft::group {

namespace {

constexpr const char* kPassed = "passed";
// How long ranks have to read rank 0's verdict.
constexpr auto kReading = std::chrono::seconds(1);

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

namespace traced {
constinit trace::Name monitored_barrier{trace::Layer::Engine, "monitored_barrier"};
}  // namespace traced

}  // namespace

MonitoredBarrier::MonitoredBarrier(const CoreOptions& options, const trace::Member& member,
                                   StoreBootstrap& store, const Ledger& ledger, Failure& failure)
    : options_(options), member_(member), store_(store), ledger_(ledger), failure_(failure) {}

void MonitoredBarrier::meet(std::chrono::milliseconds timeout) {
  const trace::Range range(traced::monitored_barrier,
                           {.rank = options_.rank, .ranks = options_.size});
  if (timeout == kGroupTimeout) timeout = options_.timeout;
  if (timeout.count() < 0) {
    throw Error(Blame::Caller,
                "monitored_barrier: a timeout of " + describe(timeout) + "; it must be positive");
  }
  if (options_.size == 1) return;  // there is no other rank to meet
  timeout = std::min(timeout, kLongestTimeout);
  MutexLock lock(mutex_);
  // Rank 0, which keeps the store, may be the rank that is stopped.
  Meeting keeper(options_.job->waits, options_.name, "monitored_barrier", options_.rank, kAllCall,
                 [store = options_.own_store]() -> std::vector<int> {
                   const StoreCallBounds bounds({}, kStoreAnswers);
                   static_cast<void>(StoreBootstrap(store).exists("monitored/closed"));
                   return {};
                 });
  const StoreCallBounds bounds([&] { keeper.look(); }, timeout + kStoreAnswers);
  const std::uint64_t round = next_round();
  const std::string base = "monitored/" + std::to_string(round) + "/";
  const auto take_part = [&]() WEFT_REQUIRES(mutex_) {
    options_.rank == 0 ? lead(base, timeout) : follow(base, timeout);
  };
  recorded(member_, "monitored_barrier", round, options_.place(), [&] {
    failure_.by_the_store(take_part);
    return true;
  });
  // This round has passed, so all ranks have come to it and have left the earlier ones, whose keys
  // nobody reads any more.
  const auto mine = std::partition(keys_.begin(), keys_.end(),
                                   [&](const std::string& key) { return !key.starts_with(base); });
  stale_.assign(keys_.begin(), mine);
  keys_.erase(keys_.begin(), mine);
}

std::uint64_t MonitoredBarrier::next_round() {
  try {
    for (const std::string& key : std::exchange(stale_, {})) store_.erase(key);
    return static_cast<std::uint64_t>(store_.add("monitored/closed", 0) + 1);
  } catch (const Error& error) {
    if (error.blame() != Blame::Timeout) throw;
    throw error.within("monitored_barrier " + options_.place());
  }
}

// All ranks but rank 0, which calls this.
std::set<int> MonitoredBarrier::everybody_else() const {
  std::set<int> others;
  for (int rank = 1; rank < options_.size; ++rank) others.insert(rank);
  return others;
}

// Waits until every rank has come, and claims their attempts. Returns the ranks that are missing at
// the deadline.
std::set<int> MonitoredBarrier::count_in(const std::string& base, Deadline deadline) {
  std::map<int, std::string> came;  // ranks with their attempts
  // Fails if the rank has withdrawn, and so claimed the attempt for itself.
  const auto claim = [&](int rank) {
    return store_.add(base + std::to_string(rank) + "/" + came.at(rank), 1) == 1;
  };
  StoreMeeting meeting(options_, store_, ledger_, failure_, base, "monitored_barrier");
  std::set<int> missing = everybody_else();
  for (Backoff pause;; pause.wait(deadline)) {
    std::set<int> absent;
    for (const int rank : missing) {
      try {
        came[rank] = to_text(meeting.store().get(base + std::to_string(rank), deadline));
      } catch (const Error& error) {
        if (error.blame() != Blame::Timeout) throw;
        absent.insert(rank);
      }
    }
    std::erase_if(missing, [&](int rank) { return !absent.contains(rank) && claim(rank); });
    if (missing.empty() || !absent.empty() || deadline.passed()) return missing;
  }
}

void MonitoredBarrier::lead(const std::string& base, std::chrono::milliseconds timeout) {
  for (const char* key : {"0", "verdict"}) keys_.push_back(base + key);
  store_.set(base + "0", to_bytes(std::to_string(timeout.count())));
  // With a timeout of 0 no rank counts as come, not even ranks that came before: such a caller
  // wants to see the barrier fail, not to win a race.
  const std::set<int> absent =
      timeout.count() == 0 ? everybody_else() : count_in(base, Deadline::in(timeout));
  const std::vector<int> missing(absent.begin(), absent.end());
  const std::string verdict =
      absent.empty() ? kPassed : ranks_text(missing) + " did not come within " + describe(timeout);
  // The round is closed before the verdict is told: a rank that has read the verdict then comes to
  // the next round.
  store_.add("monitored/closed", 1);
  store_.set(base + "verdict", to_bytes(verdict + "\n" + encode(missing)));
  await_readers(base, absent);
  if (!absent.empty()) {
    throw Error(Blame::Timeout, "monitored_barrier " + options_.place() + ": " + verdict)
        .with_ranks(missing);
  }
}

// This process may host the store, so it waits until the others have read the verdict.
void MonitoredBarrier::await_readers(const std::string& base, const std::set<int>& absent) {
  const Deadline soon = Deadline::in(kReading);
  try {
    for (int rank = 1; rank < options_.size; ++rank) {
      if (!absent.contains(rank)) store_.get(base + std::to_string(rank) + "/read", soon);
    }
  } catch (const Error& error) {
    if (error.blame() != Blame::Timeout) throw;
    log::debug("monitored_barrier " + options_.place() +
               ": not all ranks have read the verdict yet");
  }
}

std::string MonitoredBarrier::came() const {
  return "rank " + std::to_string(options_.rank) + " came to monitored_barrier " +
         options_.place() + ", but ";
}

void MonitoredBarrier::follow(const std::string& base, std::chrono::milliseconds timeout) {
  const std::string own = base + std::to_string(options_.rank);
  const std::string attempt = std::to_string(++attempts_);
  for (const std::string& key : {own, own + "/" + attempt, own + "/read"}) keys_.push_back(key);
  store_.set(own, to_bytes(attempt));
  const std::string text = verdict(base, attempt, timeout);
  store_.set(own + "/read", {});
  const auto end = std::min(text.find('\n'), text.size());
  if (const std::string how = text.substr(0, end); how != kPassed) {
    throw Error(Blame::Timeout, came() + "it failed: " + how)
        .with_ranks(decode_ranks(text.substr(end)));
  }
}

// Waits for rank 0's verdict. If none comes, withdraws the attempt and throws.
std::string MonitoredBarrier::verdict(const std::string& base, const std::string& attempt,
                                      std::chrono::milliseconds timeout) {
  StoreMeeting meeting(options_, store_, ledger_, failure_, base, "monitored_barrier");
  std::optional<std::string> verdict;
  const auto listen = [&](Deadline deadline) {
    try {
      verdict = to_text(meeting.store().get(base + "verdict", deadline));
    } catch (const Error& error) {
      if (error.blame() != Blame::Timeout) throw;
    }
    return verdict.has_value();
  };
  // Rank 0, if it has come, writes at its own deadline which ranks are missing. It may have come
  // later than this rank.
  if (!listen(Deadline::in(timeout)) && store_.exists(base + "0")) listen(Deadline::in(kReading));
  if (verdict) return *verdict;
  const std::string own = base + std::to_string(options_.rank);
  if (store_.add(own + "/" + attempt, 1) == 1) {
    throw Error(Blame::Timeout, came() + "rank 0 did not within " + describe(timeout))
        .with_ranks({0});
  }
  // Rank 0 has counted this rank in, and waits for others until its own deadline.
  const std::string theirs = to_text(store_.get(base + "0", Deadline::in(kReading)));
  std::int64_t limit = 0;
  std::from_chars(theirs.data(), theirs.data() + theirs.size(), limit);
  const auto more =
      std::clamp(std::chrono::milliseconds(limit), std::chrono::milliseconds(0), kLongestTimeout);
  if (!listen(Deadline::in(more + kReading))) {
    throw Error(Blame::PeerLost, came() + "rank 0 ended before it told the result").with_ranks({0});
  }
  return *verdict;
}

}  // namespace weft::group
