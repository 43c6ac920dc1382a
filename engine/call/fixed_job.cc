// SPDX-License-Identifier: Apache-2.0
#include <map>
#include <optional>
#include <sstream>
#include <thread>
#include <vector>

#include <weft/base/error.h>
#include <weft/base/log.h>
#include <weft/base/make_error.h>
#include <weft/engine/call/fixed_job.h>
#include <weft/engine/store/backoff.h>
#include <weft/engine/store/store.h>

namespace weft::call {

namespace {

constexpr auto kRead = std::chrono::seconds(5);  // for reading a key that exists
// A waiting worker sees within this time that it is refused.
constexpr auto kAcknowledged = std::chrono::seconds(2);
constexpr auto kLastLook = std::chrono::milliseconds(50);

// Keys of a job whose size is known.
constexpr const char* kSize = "size";        // the first worker's rank and the size that it gives
constexpr const char* kRefused = "refused";  // why nobody can join any more
constexpr const char* kCame = "came";        // number of workers that came …
constexpr const char* kTold = "told";        // … and of those that have read why they are refused
// Set once the worker of that rank has joined or given up.
std::string done(int rank) { return "done/" + std::to_string(rank); }

std::string rank_is_taken(const WorkerInfo& self, const transport::Bootstrap::Bytes& record) {
  const std::string holder =
      record.empty() ? "another worker" : "'" + read_record(record).name + "'";
  return "rank " + std::to_string(self.rank) + " is taken by " + holder + ", and '" + self.name +
         "' asks for it as well; each worker of a job needs a rank of its own, and each of several "
         "jobs at one address an "
         "rpc::Options::group_name";
}

}  // namespace

WorkerTable FixedJob::join(const WorkerRecord& record, Deadline deadline,
                           const WaitReports& reports) {
  store_.add(kCame, 1);
  note_forged([&] { check_size(); });
  if (store_.add("rank/" + std::to_string(self_.rank), 1) != 1)
    refuse(rank_is_taken(self_, value_of(store_, slot(self_.rank))));
  store_.set(slot(self_.rank), written(record));
  WorkerTable all;
  Patience patience(reports);
  for (int rank = 0; rank < size_; ++rank) {
    note_forged(
        [&] { all.add(rank, entry_of(read_record(published_by(rank, deadline, patience)))); });
    if (forged_) deadline = Deadline::sooner(deadline, until_);
  }
  note_forged([&] { wait_until_all_have_read(deadline, patience); });
  if (forged_) throw Error(*forged_);
  std::map<std::string, int> ranks;
  for (const auto& [rank, entry] : all.by_rank()) {
    const auto [place, is_new] = ranks.emplace(entry.worker.name, rank);
    if (is_new) continue;
    throw Error(Blame::Caller, "the name '" + entry.worker.name + "' is not unique: ranks " +
                                   std::to_string(place->second) + " and " + std::to_string(rank) +
                                   " have it; names must differ");
  }
  return all;
}

template <class Read>
void FixedJob::note_forged(const Read& read) {
  try {
    read();
  } catch (const Error& error) {
    if (forged_ && error.blame() == Blame::Timeout) return;
    if (is_refused_ || error.blame() != Blame::Caller) throw;
    if (forged_) return;
    forged_ = error;
    until_ = Deadline::in(kOthersCome);
  }
}

void FixedJob::give_up() noexcept {
  if (!is_refused_) give_up_rank(store_, self_.rank);
}

// The workers that came earlier found nothing wrong and wait. They read why this one refuses to
// join.
void FixedJob::refuse(const std::string& why) {
  store_.compare_set(kRefused, {}, group::to_bytes(why));
  throw_refused(why);
}

void FixedJob::throw_if_refused() {
  const auto why = value_of(store_, kRefused);
  if (!why.empty()) throw_refused(group::to_text(why));
}

// Rank 0 may host the store, in which others have yet to read the reason. It waits until they have.
void FixedJob::throw_refused(const std::string& why) {
  is_refused_ = true;
  give_up_rank(store_, self_.rank);
  try {
    store_.add(kTold, 1);
    const Deadline end = Deadline::in(self_.rank == 0 ? kAcknowledged : 0s);
    for (group::Backoff pause; !end.passed() && store_.add(kTold, 0) < store_.add(kCame, 0);)
      pause.wait(end);
  } catch (const Error& error) {  // another process may have hosted it and ended
    log::debug("the job's store has ended before '" + self_.name + "': " + error.text());
  }
  throw Error(Blame::Caller, why);
}

void FixedJob::check_size() {
  const std::string own = std::to_string(self_.rank) + " " + std::to_string(size_);
  if (store_.compare_set(kSize, {}, group::to_bytes(own))) return;
  std::istringstream first(group::to_text(value_of(store_, kSize)));
  int rank = -1;
  int size = -1;
  if (!(first >> rank >> size) || size == size_) return;
  refuse("rank " + std::to_string(rank) + " gives the world size " + std::to_string(size) +
         ", rank " + std::to_string(self_.rank) + " gives " + std::to_string(size_) +
         "; all workers of a job give the same rpc::Options::world_size (or WORLD_SIZE)");
}

std::string FixedJob::has_waited(std::chrono::milliseconds waited) const {
  return "worker '" + self_.name + "' (rank " + std::to_string(self_.rank) + ") has waited " +
         describe_wait(waited) + " in rpc::init: ";
}

transport::Bootstrap::Bytes FixedJob::published_by(int rank, Deadline deadline,
                                                   Patience& patience) {
  for (group::Backoff pause; !store_.exists(slot(rank));
       pause.wait(Deadline::sooner(deadline, patience.next()))) {
    throw_if_refused();
    const bool is_due = patience.is_over();
    if (!is_due && !deadline.passed()) continue;
    std::vector<int> missing;
    bool speaks = true;  // the lowest rank that has come logs
    for (int other = 0; other < size_; ++other) {
      const bool is_here = store_.exists(slot(other));
      if (!is_here) missing.push_back(other);
      speaks = speaks && !(is_here && other < self_.rank);
    }
    if (missing.empty()) continue;
    const std::string text = has_waited(patience.waited()) + ranks_have(missing) +
                             " not come; all " + std::to_string(size_) +
                             " workers must be started, with the same address and world size";
    if (deadline.passed()) throw Error(Blame::Timeout, text).with_ranks(missing);
    if (speaks) log::warn(text);
  }
  return store_.get(slot(rank), Deadline::in(kRead));
}

// Rank 0 may host the store, so it must not end before the others have read all they need from it.
void FixedJob::wait_until_all_have_read(Deadline deadline, Patience& patience) {
  store_.add(done(self_.rank), 1);
  long read = store_.add("read", 1);
  if (self_.rank != 0) return;
  for (group::Backoff pause; read < size_; read = store_.add("read", 0)) {
    const bool is_due = patience.is_over();
    if (is_due || deadline.passed()) {
      std::vector<int> missing;
      for (int rank = 1; rank < size_; ++rank) {
        if (!store_.exists(done(rank))) missing.push_back(rank);
      }
      const std::string text =
          has_waited(patience.waited()) + "only " + std::to_string(read) + " of " +
          std::to_string(size_) + " workers have joined" +
          (missing.empty()
               ? ""
               : ": " + ranks_have(missing) + " come, but not yet read the list of the others");
      if (deadline.passed()) throw Error(Blame::Timeout, text).with_ranks(missing);
      log::warn(text);
    }
    pause.wait(Deadline::sooner(deadline, patience.next()));
  }
}

void give_up_rank(transport::Bootstrap& store, int rank) noexcept {
  try {
    store.add(done(rank), 1);
  } catch (const Error& error) {
    log::debug("cannot tell the store that rank " + std::to_string(rank) +
               " does not join: " + error.text());
  }
}

void check_rank_is_free(transport::Bootstrap& before, const WorkerInfo& self) {
  std::optional<std::string> taken;
  const Deadline end = Deadline::in(kAcknowledged);
  try {
    // The other worker may have been counted and not have published itself yet. If it was killed,
    // nobody acknowledges.
    for (group::Backoff pause; !before.exists(done(self.rank)); pause.wait(end)) {
      if (end.passed()) return;
      if (taken.has_value() || !before.exists(slot(self.rank))) continue;
      taken = rank_is_taken(self, before.get(slot(self.rank), Deadline::in(kRead)));
      before.add(kCame, 1);
      before.compare_set(kRefused, {}, group::to_bytes(*taken));
    }
    if (taken) {
      before.add(kTold, 1);
      // This worker may host the store, in which the other one looks once more.
      std::this_thread::sleep_for(kLastLook);
    }
  } catch (const Error& error) {  // perhaps the other one hosted the store and has ended
    if (!taken || error.blame() != Blame::PeerLost) throw;
  }
  if (taken) throw Error(Blame::Caller, *taken);
}

}  // namespace weft::call
