#include <charconv>
#include <chrono>
#include <limits>

#include <weft/base/error.h>
#include <weft/engine/group/store.h>
#include <weft/engine/instruments/job_clock.h>

namespace weft::instruments {

namespace {

constexpr int kRounds = 16;
const std::string kBase = "weft/clock/";

std::int64_t number(const std::string& text) {
  std::int64_t value = 0;
  const auto [end, failure] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (failure != std::errc() || end != text.data() + text.size()) {
    throw Error(Blame::PeerLost, "'" + text.substr(0, 40) + "' in the job's store is no time");
  }
  return value;
}

void put(transport::Bootstrap& store, const std::string& key, const std::string& text) {
  store.set(kBase + key, group::to_bytes(text));
}

std::string take(transport::Bootstrap& store, const std::string& key, Deadline deadline) {
  return group::to_text(store.get(kBase + key, deadline));
}

std::string round_key(const char* what, int rank, int round) {
  return std::string(what) + "/" + std::to_string(rank) + "/" + std::to_string(round);
}

void answer(const Participant& participant, transport::Bootstrap& store, const LocalClock& clock, Deadline deadline) {
  for (int rank = 1; rank < participant.ranks; ++rank) {
    if (take(store, "host/" + std::to_string(rank), deadline) == clock.host) continue;
    for (int round = 0; round < kRounds; ++round) {
      take(store, round_key("ask", rank, round), deadline);
      put(store, round_key("answer", rank, round), std::to_string(clock.now()));
      store.erase(kBase + round_key("ask", rank, round));
    }
  }
}

}  // namespace

LocalClock local_clock() {
  return {trace::timeline::host_identity(), [] { return trace::now(); },
          [] {
            const auto time = std::chrono::system_clock::now().time_since_epoch();
            return static_cast<std::int64_t>(std::chrono::duration_cast<std::chrono::nanoseconds>(time).count());
          }};
}

trace::timeline::Clock measure(const Participant& participant, transport::Bootstrap& store, const LocalClock& clock,
                               Deadline deadline) {
  put(store, "host/" + std::to_string(participant.rank), clock.host);
  if (participant.rank == 0) {
    answer(participant, store, clock, deadline);
    return {};
  }
  if (take(store, "host/0", deadline) == clock.host) return {};
  trace::timeline::Clock best{0, std::numeric_limits<std::int64_t>::max()};
  for (int round = 0; round < kRounds; ++round) {
    const std::int64_t before = clock.now();
    put(store, round_key("ask", participant.rank, round), "");
    const std::int64_t theirs = number(take(store, round_key("answer", participant.rank, round), deadline));
    const std::int64_t after = clock.now();
    store.erase(kBase + round_key("answer", participant.rank, round));
    const std::int64_t error = (after - before) / 2 + 1;
    // The first round also waits for rank 0 to come to this rank at all.
    if (error < best.error) best = {theirs - (before + after) / 2, error};
  }
  return best;
}

}  // namespace weft::instruments
