// SPDX-License-Identifier: Apache-2.0
#include <charconv>
#include <random>

#include <weft/base/log.h>
#include <weft/engine/call/announcements.h>
#include <weft/engine/call/claims.h>
#include <weft/engine/call/numbers.h>
#include <weft/engine/store/store.h>

namespace weft::call {

namespace {

using Bytes = transport::Bootstrap::Bytes;

constexpr std::size_t kLongestWhy = 400;  // bytes of a reason; all workers read it

std::uint64_t random_nonce() {
  std::random_device random;
  return static_cast<std::uint64_t>(random()) << 32 | random();
}

std::string key_of_name(const std::string& name) { return "name/" + name; }

// The value of a name's key: the rank and the nonce of the name's holder.
Bytes claim_of(const WorkerRecord& record) {
  return group::to_bytes(std::to_string(record.rank) + " " + std::to_string(record.nonce));
}

// A record that keeps only a worker's identity and how it ended.
WorkerRecord ended(const WorkerRecord& record, Standing standing, const std::string& why) {
  WorkerRecord end;
  end.name = record.name;
  end.rank = record.rank;
  end.standing = static_cast<int>(standing);
  end.generation = record.generation;
  end.nonce = record.nonce;
  end.why = why.substr(0, kLongestWhy);
  return end;
}

void check(Deadline deadline, const std::string& what) {
  if (deadline.passed()) {
    throw Error(Blame::Timeout,
                "other workers keep changing " + what +
                    " in the job's store; if several jobs share the store, give each an "
                    "rpc::Options::group_name");
  }
}

}  // namespace

Member Claims::take(WorkerRecord record, const std::map<int, WorkerRecord>& known, const Ask& ask,
                    Deadline deadline) {
  own_ = std::move(record);
  own_.standing = static_cast<int>(Standing::Joining);
  own_.nonce = random_nonce();
  claim_rank(known, ask, deadline);
  try {
    if (!known.contains(own_.rank)) {  // so that all others find it
      const long index = store_->add("joined", 1);
      store_->set("joined/" + std::to_string(index), group::to_bytes(std::to_string(own_.rank)));
    }
    claim_name(ask, deadline);
    own_.standing = static_cast<int>(Standing::Joined);
    const Bytes joined = written(own_);
    if (!store_->compare_set(slot(own_.rank), written_, joined)) {
      throw Error(Blame::PeerLost, "the worker '" + own_.name +
                                       "' was taken for lost while it joined; call init() again");
    }
    written_ = joined;
    announce(*store_, {own_.standing, {own_.name, own_.rank}, own_.generation, {}});
  } catch (...) {
    try {
      give_back();
    } catch (const Error& error) {
      log::info("the claims of the worker '" + own_.name + "' stay in the store: " + error.text());
    }
    throw;
  }
  return {{own_.name, own_.rank}, own_.generation};
}

void Claims::claim_rank(const std::map<int, WorkerRecord>& known, const Ask& ask,
                        Deadline deadline) {
  if (own_.rank >= 0) return claim_given_rank(ask, deadline);
  const auto try_free = [&](int rank) {
    const Bytes before = value_of(*store_, slot(rank));
    return (before.empty() || !read_record(before).lives()) && try_rank(rank, before);
  };
  for (const auto& [rank, record] : known) {
    if (record.name != own_.name) continue;
    if (record.lives())
      oust(record, "the name '" + own_.name + "' is not unique: it", ask, deadline);
    if (rank > 0 && try_free(rank)) return;
  }
  // Rank 0 is only for a worker that asks for it, because it may host the store.
  for (int rank = 1; rank <= kHighestRank; ++rank) {
    const auto found = known.find(rank);
    if (found != known.end() && found->second.lives()) continue;
    if (found == known.end()) {
      if (try_rank(rank, {})) return;
      // The rank was claimed just now, or by a worker that was killed before it had joined.
      const auto record = read_record(value_of(*store_, slot(rank)));
      if (record.lives() && record.name != own_.name) continue;
      if (record.lives())
        oust(record, "the name '" + own_.name + "' is not unique: it", ask, deadline);
    }
    if (try_free(rank)) return;
  }
  throw Error(Blame::Caller, "no rank is free for the worker '" + own_.name +
                                 "': ranks go from 0 to " + std::to_string(kHighestRank) +
                                 "; let workers leave");
}

void Claims::claim_given_rank(const Ask& ask, Deadline deadline) {
  const int rank = own_.rank;
  for (;; check(deadline, "rank " + std::to_string(rank))) {
    const Bytes before = value_of(*store_, slot(rank));
    if (!before.empty()) {
      const WorkerRecord holder = read_record(before);
      if (holder.lives()) {
        oust(holder, "rank " + std::to_string(rank), ask, deadline);
        continue;
      }
    }
    if (try_rank(rank, before)) return;
  }
}

bool Claims::try_rank(int rank, const Bytes& before) {
  WorkerRecord claim = own_;
  claim.rank = rank;
  claim.generation = 0;
  claim.before = {};
  if (!before.empty()) {
    const WorkerRecord last = read_record(before);
    claim.generation = last.generation + 1;
    claim.before = {last.name, last.generation, last.standing, last.why};
  }
  Bytes bytes = written(claim);
  if (!store_->compare_set(slot(rank), before, bytes)) return false;
  own_ = std::move(claim);
  written_ = std::move(bytes);
  return true;
}

void Claims::claim_name(const Ask& ask, Deadline deadline) {
  const std::string key = key_of_name(own_.name);
  for (;; check(deadline, "the name '" + own_.name + "'")) {
    const Bytes before = value_of(*store_, key);
    if (const auto holder = holder_of_name(before)) {
      oust(*holder, "the name '" + own_.name + "' is not unique: it", ask, deadline);
    } else if (store_->compare_set(key, before, claim_of(own_))) {
      return;
    }
  }
}

// Returns nothing if the worker that made the claim has ended.
std::optional<WorkerRecord> Claims::holder_of_name(const Bytes& claim) const {
  const std::string text = group::to_text(claim);
  const auto space = text.find(' ');
  if (space == std::string::npos) return std::nullopt;
  const Bytes bytes = value_of(*store_, slot(rank_from(text.substr(0, space))));
  if (bytes.empty()) return std::nullopt;
  auto holder = read_record(bytes);
  const bool holds = holder.lives() && holder.name == own_.name && claim_of(holder) == claim;
  return holds ? std::optional(std::move(holder)) : std::nullopt;
}

void Claims::oust(const WorkerRecord& holder, const std::string& what, const Ask& ask,
                  Deadline deadline) {
  const std::string who = describe(WorkerInfo{holder.name, holder.rank});
  std::optional<Error> why;
  try {
    if (ask) why = ask(entry_of(holder), deadline);
  } catch (const Error& error) {
    throw error.within(what + " is taken by another worker of this job, " + who +
                       ", which does not say whether it lives");
  }
  if (!why) {
    throw Error(
        Blame::Caller,
        what + " is taken by another worker of this job, " + who +
            ", which lives; take another, or let that one leave(); if it belongs to another job, "
            "give each a group_name");
  }
  declare_lost(holder.rank, holder.generation,
               "the worker '" + own_.name +
                   "' wants its place, and it does not answer a liveness probe: " + why->text());
}

bool Claims::was_ever(transport::Bootstrap& store, const std::string& name) {
  return store.exists(key_of_name(name));
}

bool Claims::give_back() {
  if (written_.empty()) return true;
  const bool has_joined = own_.stands(Standing::Joined);
  const Bytes claimed = std::exchange(written_, {});
  const bool was_own =
      store_->compare_set(slot(own_.rank), claimed, written(ended(own_, Standing::Left, {})));
  // c10d's stores erase a key whichever value it has, even a new claim. So the name's key stays,
  // empty.
  store_->compare_set(key_of_name(own_.name), claim_of(own_), {});
  if (has_joined) {  // even if it was declared lost: the announcement ends this worker's follower
    announce(*store_,
             {static_cast<int>(Standing::Left), {own_.name, own_.rank}, own_.generation, {}});
  }
  return was_own;
}

bool Claims::declare_lost(int rank, Generation generation, const std::string& why) {
  for (;;) {
    const Bytes before = value_of(*store_, slot(rank));
    if (before.empty()) return false;
    const WorkerRecord record = read_record(before);
    if (record.generation != generation || !record.lives()) return false;
    const WorkerRecord lost = ended(record, Standing::Lost, why);
    if (!store_->compare_set(slot(rank), before, written(lost))) continue;
    store_->compare_set(key_of_name(record.name), claim_of(record), {});
    store_->add("kind/open", -1);  // as the worker itself would have done
    if (record.stands(Standing::Joined))
      announce(*store_, {lost.standing, {record.name, rank}, generation, lost.why});
    return true;
  }
}

}  // namespace weft::call
