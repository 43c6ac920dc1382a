// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <limits>
#include <utility>

#include <weft/base/make_error.h>
#include <weft/base/mutex.h>
#include <weft/transport/mpi/requests.h>

namespace weft::transport::mpi {

Requests::Requests(std::shared_ptr<World> world, const std::shared_ptr<EventLoop>& loop,
                   std::string place, std::chrono::milliseconds timeout)
    : world_(std::move(world)),
      loop_(loop),
      loop_address_(loop.get()),
      place_(std::move(place)),
      timeout_(timeout) {}

Requests::~Requests() {
  abort(Error(Blame::Cancelled, "the communicator " + place_ + " was destroyed"));
}

std::uint64_t Requests::expect(const Completion& completion) {
  UniqueLock lock(mutex_);
  const std::uint64_t key = next_key_++;
  if (!aborted_) {
    expected_.emplace(key, completion);
    return key;
  }
  const Error why = *aborted_;
  lock.unlock();
  Completion(completion).fail(why);
  return key;
}

void Requests::start(std::uint64_t key, Call call) noexcept {
  std::optional<Error> refused;
  {
    MutexLock lock(mutex_);
    const auto found = expected_.find(key);
    if (found == expected_.end()) return;
    MPI_Request native = nullptr;
    try {
      if (entries_.size() == entries_.capacity()) entries_.reserve(2 * entries_.size() + 8);
      if (natives_.size() == natives_.capacity()) natives_.reserve(2 * natives_.size() + 8);
      const auto turn = world_->turn();
      const int code = call.start(&native);
      if (code != MPI_SUCCESS)
        refused = error_of(world_->library(), code, call.name + " " + place_);
    } catch (...) {
      refused = to_error(std::current_exception(), Blame::Busy).within(call.name + " " + place_);
    }
    if (!refused) {
      entries_.push_back(
          {std::move(call), std::move(found->second), std::chrono::steady_clock::now()});
      natives_.push_back(native);
      expected_.erase(found);
      if (!watch_ && !loop_.expired())
        watch_ = loop_address_->poll([self = shared_from_this()] { return self->turn(); });
      return;
    }
  }
  abort(*refused);  // the other ranks wait in this operation
}

void Requests::settle(Entry& entry, const MPI_Status& status) {
  entry.has_ended = true;
  if (status.MPI_ERROR != MPI_SUCCESS) {
    entry.error = error_of(world_->library(), status.MPI_ERROR, entry.call.name + " " + place_);
    return;
  }
  if (!entry.call.receives) return;
  entry.completion->set_source_rank(status.MPI_SOURCE);
  const std::size_t wanted = *entry.call.receives;
  // MPI counts in ints. Longer messages are counted in units that divide them.
  const std::size_t unit =
      wanted <= std::numeric_limits<int>::max() ? 1 : std::min<std::size_t>(16, wanted & -wanted);
  int count = 0;
  world_->library().get_count(&status, unit == 1 ? world_->library().byte : world_->elements(unit),
                              &count);
  const bool is_counted = count != MPI_UNDEFINED;
  if (is_counted && static_cast<std::size_t>(count) * unit == wanted) return;
  entry.error =
      Error(Blame::Caller, entry.call.name + " " + place_ + ": " +
                               (is_counted ? std::to_string(static_cast<std::size_t>(count) * unit)
                                           : "another number of") +
                               " bytes came where " + std::to_string(wanted) + " were expected");
}

std::vector<Requests::Entry> Requests::take_ended() {
  std::vector<Entry> ended;
  bool all_before = true;
  std::size_t kept = 0;
  for (std::size_t i = 0; i < entries_.size(); ++i) {
    if (entries_[i].has_ended && (all_before || !entries_[i].call.is_barrier)) {
      ended.push_back(std::move(entries_[i]));
      continue;
    }
    all_before = false;
    if (kept != i) {
      entries_[kept] = std::move(entries_[i]);
      natives_[kept] = natives_[i];
    }
    ++kept;
  }
  entries_.erase(entries_.begin() + static_cast<std::ptrdiff_t>(kept), entries_.end());
  natives_.resize(kept);
  if (entries_.empty()) watch_.reset();
  return ended;
}

std::optional<Error> Requests::why_late() const {
  const auto now = std::chrono::steady_clock::now();
  for (const Entry& entry : entries_) {
    if (now - entry.since < timeout_) continue;
    return Error(Blame::Timeout, entry.call.name + " " + place_ + " was not done within " +
                                     describe(timeout_) +
                                     "; MPI cannot withdraw it, so the group ends here");
  }
  return std::nullopt;
}

bool Requests::turn() {
  std::vector<Entry> ended;
  std::optional<Error> broken_by;
  {
    MutexLock lock(mutex_);
    if (entries_.empty()) return false;
    indices_.resize(natives_.size());
    statuses_.resize(natives_.size());
    int count = 0;
    {
      const auto turn = world_->turn();
      const int code =
          world_->library().testsome(static_cast<int>(natives_.size()), natives_.data(), &count,
                                     indices_.data(), statuses_.data());
      const bool has_errors = code == MPI_ERR_IN_STATUS;
      if (code != MPI_SUCCESS && !has_errors)
        broken_by = error_of(world_->library(), code, "MPI_Testsome " + place_);
      for (int i = 0; !broken_by && count != MPI_UNDEFINED && i < count; ++i) {
        const auto which = static_cast<std::size_t>(i);
        if (!has_errors)
          statuses_[which].MPI_ERROR = MPI_SUCCESS;  // set only with MPI_ERR_IN_STATUS
        settle(entries_[static_cast<std::size_t>(indices_[which])], statuses_[which]);
      }
    }
    ended = take_ended();
    if (!broken_by) broken_by = why_late();
  }
  for (Entry& entry : ended) {
    if (entry.error) {
      entry.completion->fail(*entry.error);
      if (!broken_by) broken_by = entry.error;
      continue;
    }
    if (entry.call.finish) entry.call.finish();
    entry.call = {};
    entry.completion->finish();
  }
  if (broken_by) abort(*broken_by);
  return !ended.empty();
}

void Requests::abort(const Error& why) noexcept {
  std::map<std::uint64_t, Completion> expected;
  std::vector<Entry> entries;
  {
    MutexLock lock(mutex_);
    if (aborted_) return;
    aborted_ = why;
    expected.swap(expected_);
    entries.swap(entries_);
    natives_.clear();
    is_clean_ = entries.empty();
    watch_.reset();
  }
  for (Entry& entry : entries) {
    world_->keep_for_ever(entry.call.pin);
    entry.completion->fail(why);
  }
  for (auto& [key, completion] : expected) completion.fail(why);
}

bool Requests::is_clean() const {
  MutexLock lock(mutex_);
  return is_clean_ && entries_.empty();
}

}  // namespace weft::transport::mpi
