// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <utility>

#include <weft/base/log.h>
#include <weft/engine/group/failure.h>
#include <weft/engine/membership/still_listens.h>
#include <weft/profiling/trace/breakage.h>
#include <weft/profiling/trace/dump.h>

namespace weft::group {

namespace {

constexpr const char* kGivenUp = " has given up";  // behind the rank; transport/mesh says the same

}  // namespace

Failure::Failure(const CoreOptions& options, const trace::Member& member, const Ledger& ledger,
                 const std::enable_shared_from_this<Core>& owner)
    : options_(options), member_(member), ledger_(ledger), owner_(owner) {}

Failure::~Failure() {
  if (unseen_)
    log::warn("nobody waited for an operation that failed (call wait() on every Work): " +
              unseen_->text());
}

// --- Failing ---

void Failure::fail(const Error& why, const std::function<void()>& tell) {
  std::vector<std::shared_ptr<transport::Communicator>> communicators;
  std::shared_ptr<HostFlag> flag;
  bool is_first = false;
  {
    MutexLock lock(mutex_);
    is_first = !broken_;
    if (is_first) {
      reason_ = why.text();
      broken_ = why.within(options_.self());
      flag = flag_;
      communicators.swap(communicators_);
    }
  }
  if (tell) tell();
  if (!is_first) return;
  trace::record_breakage(member_, why);
  trace::dump_after(options_.place(), why);
  broken_changed_.notify_all();
  explain_waiting();
  if (flag) flag->raise();
  for (const auto& communicator : communicators) communicator->abort(why);
}

void Failure::abort(const std::string& reason) {
  // A backend may pass this text on to other ranks.
  fail(Error(Blame::Cancelled,
             "rank " + std::to_string(options_.rank) + " aborted the group: " + reason)
           .with_ranks({options_.rank}),
       [&] {
         options_.job->membership->send({FrameType::Abort, 0, 0, options_.name, reason});
       });
}

void Failure::differ(const std::string& how) {
  fail(Error(Blame::Caller, how), [&] {
    options_.job->membership->send({FrameType::Abort, 0, kCallsDiffer, options_.name, how});
  });
}

void Failure::fail_as_told(int from, const Error& why) {
  if (why.blame() != Blame::Timeout) return fail(why);
  {
    MutexLock lock(mutex_);
    if (!broken_) absent_ = Waits::Absent{why.ranks(), ""};
  }
  // The other rank may have been told itself.
  const bool names_origin = why.text().find(kGivenUp) != std::string::npos;
  fail(names_origin ? why : why.within("rank " + std::to_string(from) + kGivenUp));
}

// Without this, the others would blame this rank for leaving, and not the rank that broke the
// group; they would wait for this rank when they leave; and a rank whose own part of a collective
// ended before this rank refused its part would take this rank for lost.
void Failure::tell_leaving() {
  MutexLock lock(mutex_);
  Frame frame{FrameType::Abort, 0, kGaveUp, options_.name, ""};
  switch (broken_->blame()) {
    case Blame::Cancelled: return;  // abort() has told all ranks
    case Blame::Caller:
      frame.number = kCallsDiffer;
      frame.text = reason_;
      break;
    default:
      frame.text = encode_reason(Error(broken_->blame(), reason_).with_ranks(broken_->ranks()));
  }
  options_.job->membership->send(std::move(frame));
}

void Failure::abort_on_failure(const std::shared_ptr<transport::Communicator>& communicator) {
  std::optional<Error> broken;
  {
    MutexLock lock(mutex_);
    broken = broken_;
    if (!broken) communicators_.push_back(communicator);
  }
  if (broken) communicator->abort(*broken);
}

void Failure::raise_on_failure(std::shared_ptr<HostFlag> flag) {
  MutexLock lock(mutex_);
  flag_ = std::move(flag);
}

// An operation that has timed out has broken its communicator. So has a collective that was refused
// as the caller's mistake, mostly because the ranks' calls do not match. A message that was refused
// has broken it if the ranks name different dtypes, and not if only the sizes differ.
bool Failure::breaks_group(const Wait& operation, const Error& error) {
  if (error.blame() == Blame::Timeout || error.blame() == Blame::Protocol) return true;
  if (error.blame() != Blame::Caller) return false;
  if (operation.collective > 0) return true;
  MutexLock lock(mutex_);
  return std::any_of(communicators_.begin(), communicators_.end(),
                     [](const auto& communicator) { return communicator->is_broken(); });
}

// --- Queries ---

bool Failure::is_broken(std::chrono::milliseconds within) {
  UniqueLock lock(mutex_);
  return broken_changed_.wait_for(lock, within,
                                  [this]() WEFT_REQUIRES(mutex_) { return broken_.has_value(); });
}

void Failure::throw_if_broken() {
  MutexLock lock(mutex_);
  if (broken_) throw *broken_;
}

void Failure::throw_if_aborted() {
  MutexLock lock(mutex_);
  if (broken_ && broken_->blame() == Blame::Cancelled) throw *broken_;
}

void Failure::throw_if_failed() {
  std::optional<Error> unseen;
  {
    MutexLock lock(mutex_);
    unseen.swap(unseen_);
    if (!unseen && broken_) throw *broken_;
  }
  if (unseen) throw explain(*unseen).within("an earlier operation failed");
}

bool Failure::waits_for_news() {
  MutexLock lock(mutex_);
  return !unexplained_.empty() || asking_ > 0;
}

std::optional<Error> Failure::loss() {
  MutexLock lock(mutex_);
  if (!broken_ || broken_->blame() != Blame::PeerLost) return std::nullopt;
  unseen_.reset();  // it came with the loss
  return broken_;
}

std::optional<Error> Failure::error() {
  MutexLock lock(mutex_);
  if (!broken_ && unseen_) return explained(*unseen_).within("an earlier operation failed");
  return broken_;
}

void Failure::note_unseen(const Error& error) {
  MutexLock lock(mutex_);
  if (!unseen_) unseen_ = error;
}

// A rank that hosts the store and hears of a loss first may end, and the store with it, before this
// rank hears of the loss.
void Failure::by_the_store(const std::function<void()>& meet) {
  try {
    meet();
  } catch (const Error& error) {
    if (error.blame() == Blame::PeerLost && is_broken(kLossIsTold)) throw_if_broken();
    throw;
  }
}

// --- Explaining ---

Error Failure::explain(const Error& error) {
  if (error.blame() != Blame::PeerLost) return error;
  UniqueLock lock(mutex_);
  if (options_.job->connected && !options_.job->loop->inside() && !ledger_.left_before()) {
    ++asking_;
    const auto wait = [&](std::chrono::milliseconds limit) WEFT_REQUIRES(mutex_) {
      return broken_changed_.wait_for(
          lock, limit, [this]() WEFT_REQUIRES(mutex_) { return broken_.has_value(); });
    };
    if (!wait(kLossIsTold)) {
      lock.unlock();
      const bool is_lost = has_lost_listener(error);
      lock.lock();
      if (is_lost) wait(kLossIsTrue);
    }
    --asking_;
    if (!broken_) {
      // No news explains it, so it is itself the reason that breaks the group, and that this rank
      // tells the others when it leaves.
      const Error why = explained(error);
      lock.unlock();
      fail(why);
      return why;
    }
  }
  return explained(error);
}

void Failure::explain_later(const Error& error, Explained done) {
  UniqueLock lock(mutex_);
  if (error.blame() == Blame::PeerLost && options_.job->connected && !broken_ &&
      !ledger_.left_before()) {
    unexplained_.emplace_back(error, std::move(done));
    if (unexplained_.size() > 1) return;
    explaining_ =
        options_.job->loop->at(Deadline::in(kLossIsTold), [this, weak = owner_.weak_from_this()] {
          if (const auto alive = weak.lock()) explain_after_news();
        });
    return;
  }
  const Error why = explained(error);
  lock.unlock();
  done(why);
}

bool Failure::has_lost_listener(const Error& error) const {
  if (options_.job->loop->inside()) return false;  // no thread is left that may block
  std::vector<Published> addresses;
  for (const int rank : error.ranks()) {
    if (rank < 0 || rank >= options_.size || rank == options_.rank) continue;
    const int member = options_.global_ranks[static_cast<std::size_t>(rank)];
    // No more news comes of a rank that has left, or is known to be gone.
    if (ledger_.member_has_left(rank) || options_.job->membership->gone(member)) continue;
    const auto address = options_.job->membership->address_of(member);
    if (address) addresses.push_back(*address);
  }
  const auto listen = still_listen(addresses, Deadline::in(kLossIsTold));
  return std::find(listen.begin(), listen.end(), false) != listen.end();
}

// Called on the loop, where nothing may block.
void Failure::explain_after_news() {
  std::optional<Error> first;
  {
    MutexLock lock(mutex_);
    if (!unexplained_.empty()) first = unexplained_.front().first;
  }
  if (!first) return;
  options_.job->continuations->run(Task([this, weak = owner_.weak_from_this(), error = *first] {
    const auto alive = weak.lock();
    if (!alive) return;
    if (!has_lost_listener(error)) return explain_waiting();
    MutexLock lock(mutex_);
    if (broken_) return;  // it has explained them
    explaining_ = options_.job->loop->at(Deadline::in(kLossIsTrue), [this, weak] {
      if (const auto still = weak.lock()) explain_waiting();
    });
  }));
}

void Failure::explain_waiting() {
  std::vector<std::pair<Error, Explained>> waiting;
  std::optional<Error> unexplained;
  {
    MutexLock lock(mutex_);
    waiting.swap(unexplained_);
    for (auto& [error, done] : waiting) error = explained(error);
    if (!broken_ && !waiting.empty()) unexplained = waiting.front().first;
  }
  if (unexplained) fail(*unexplained);  // as in explain()
  // Some are users' continuations, which may use this group, so they run neither under the caller's
  // locks nor on the loop.
  for (auto& [why, done] : waiting) {
    options_.job->continuations->run(Task([error = why, tell = std::move(done)] { tell(error); }));
  }
}

Error Failure::explained(const Error& error) const {
  if (error.blame() != Blame::PeerLost) return error;
  if (broken_) {
    // The backend and the group may both report one loss, the group as "rank 1 is lost: how". Then
    // report it once, in the group's words.
    const std::string what = reason_.substr(0, reason_.find(": "));
    const bool names_same = !error.ranks().empty() && error.ranks() == broken_->ranks();
    if (names_same || reason_.ends_with(error.text()) ||
        error.text().find(what) != std::string::npos)
      return *broken_;
    return broken_->with_text(broken_->text() + " (" + error.text() + ")");
  }
  // A rank that has left is not to blame for the end of another's connection.
  const std::vector<int> named = error.ranks();
  const bool names_other = std::any_of(named.begin(), named.end(),
                                       [this](int rank) { return !ledger_.member_has_left(rank); });
  if (names_other) return error;
  if (const std::string left = ledger_.who_left(); !left.empty())
    return error.within(left).with_ranks(ledger_.leavers());
  if (options_.size != 2) return error;
  // Without news of its death, that rank may live.
  return error.within("rank " + std::to_string(1 - options_.rank) + " cannot be reached")
      .with_ranks({1 - options_.rank});
}

Error Failure::with_absent(const Error& timeout, const Wait& wait) {
  if (timeout.blame() != Blame::Timeout || options_.job->loop->inside() || Op::ending())
    return timeout;
  std::optional<Waits::Absent> known;
  {
    MutexLock lock(mutex_);
    known = absent_;
  }
  const Waits::Absent absent = known ? *known : options_.job->waits->who_kept(options_.name, wait);
  MutexLock lock(mutex_);
  if (!absent_) absent_ = absent;
  const auto with = [&](const Error& error) {
    if (absent.text.empty() || error.text().find(absent.text) != std::string::npos) return error;
    return error.with_text(error.text() + "; " + absent.text).with_ranks(absent.ranks);
  };
  if (broken_ && broken_->blame() == Blame::Timeout) {
    broken_ = with(*broken_);
    reason_ = with(Error(Blame::Timeout, reason_)).text();
  }
  return with(timeout);
}

}  // namespace weft::group
