// SPDX-License-Identifier: Apache-2.0
#include <charconv>
#include <chrono>
#include <limits>

#include <weft/base/error.h>
#include <weft/base/log.h>
#include <weft/engine/instruments/job_clock.h>
#include <weft/engine/store/store.h>

namespace weft::instruments {

namespace {

constexpr int kRounds = 16;
constexpr const char* kBase = "weft/clock/";

std::int64_t number(const std::string& text) {
  std::int64_t value = 0;
  const auto [end, failure] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (failure != std::errc() || end != text.data() + text.size()) {
    throw Error(Blame::PeerLost, "'" + text.substr(0, 40) + "' in the job's store is not a time");
  }
  return value;
}

void put(transport::Bootstrap& store, const std::string& key, const std::string& text) {
  store.set(kBase + key, group::to_bytes(text));
}

std::string take(transport::Bootstrap& store, const std::string& key, Deadline deadline) {
  return group::to_text(store.get(kBase + key, deadline));
}

std::string round_key(const std::string& what, int rank, int round) {
  return what + "/" + std::to_string(rank) + "/" + std::to_string(round);
}

// Answers the rounds of one rank; `when` keeps the rounds of the start and of the end apart.
void answer(const char* when, int rank, transport::Bootstrap& store, const LocalClock& clock,
            Deadline deadline) {
  const std::string ask = when + std::string("ask"), reply = when + std::string("answer");
  for (int round = 0; round < kRounds; ++round) {
    take(store, round_key(ask, rank, round), deadline);
    put(store, round_key(reply, rank, round), std::to_string(clock.now()));
    store.erase(kBase + round_key(ask, rank, round));
  }
}

trace::timeline::Clock ask(const char* when, int rank, transport::Bootstrap& store,
                           const LocalClock& clock, Deadline deadline) {
  const std::string ask = when + std::string("ask"), reply = when + std::string("answer");
  trace::timeline::Clock best{0, std::numeric_limits<std::int64_t>::max()};
  for (int round = 0; round < kRounds; ++round) {
    const std::int64_t before = clock.now();
    put(store, round_key(ask, rank, round), "");
    const std::int64_t theirs = number(take(store, round_key(reply, rank, round), deadline));
    const std::int64_t after = clock.now();
    store.erase(kBase + round_key(reply, rank, round));
    const std::int64_t error = (after - before) / 2 + 1;
    const std::int64_t middle = before + (after - before) / 2;
    // The first round also waits until rank 0 turns to this rank.
    if (error < best.error) best = {theirs - middle, error, middle};
  }
  return best;
}

constexpr const char* kStart = "";
constexpr const char* kEnd = "end/";

std::string done_key(int rank) { return kEnd + std::string("done/") + std::to_string(rank); }

}  // namespace

LocalClock local_clock() {
  return {trace::timeline::host_identity(), [] { return trace::now(); },
          [] {
            const auto time = std::chrono::system_clock::now().time_since_epoch();
            return static_cast<std::int64_t>(
                std::chrono::duration_cast<std::chrono::nanoseconds>(time).count());
          }};
}

JobClock::JobClock(const InstrumentedRank& participant, std::shared_ptr<transport::Bootstrap> store,
                   LocalClock clock, Deadline deadline)
    : rank_(participant.rank), store_(std::move(store)), clock_(std::move(clock)) {
  put(*store_, "host/" + std::to_string(rank_), clock_.host);
  const auto differs = [&](int rank) {
    return take(*store_, "host/" + std::to_string(rank), deadline) != clock_.host;
  };
  if (rank_ != 0) {
    if (!differs(0)) return;
    others_.push_back(0);
    at_start_ = ask(kStart, rank_, *store_, clock_, deadline);
    return;
  }
  for (int rank = 1; rank < participant.ranks; ++rank) {
    if (!differs(rank)) continue;
    others_.push_back(rank);
    answer(kStart, rank, *store_, clock_, deadline);
  }
}

std::optional<trace::timeline::Clock> JobClock::at_end(
    std::chrono::milliseconds patience) const noexcept {
  for (const int other : others_) {
    try {
      const Deadline deadline = Deadline::in(rank_ == 0 ? patience : 2 * patience);
      if (rank_ == 0) {
        answer(kEnd, other, *store_, clock_, deadline);
        // The store may end with this process, so waits until the other rank has read the last
        // answer.
        take(*store_, done_key(other), deadline);
      } else {
        const auto measured = ask(kEnd, rank_, *store_, clock_, deadline);
        put(*store_, done_key(rank_), "");
        return measured;
      }
    } catch (const std::exception& error) {
      log::debug("the clocks of ranks " + std::to_string(rank_) + " and " + std::to_string(other) +
                 " are not compared at the end: " + error.what());
      patience /= 5;
    }
  }
  return std::nullopt;
}

}  // namespace weft::instruments
