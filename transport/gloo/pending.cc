// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <utility>
#include <vector>

#include <torch/csrc/distributed/c10d/Work.hpp>

#include <weft/base/mutex.h>
#include <weft/transport/gloo/pending.h>

namespace weft::transport::gloo {

namespace {

// Gloo and c10d report failures as text only.
Blame blame_of(const std::string& text) {
  const auto says = [&](const char* words) { return text.find(words) != std::string::npos; };
  // Includes "Application timeout caused pair closure": another operation has timed out.
  if (says("Timed out") || says("timed out") || says("imeout")) return Blame::Timeout;
  if (says("Connection") || says("Broken pipe") || says("Read error") || says("Write error") ||
      says("Socket")) {
    return Blame::PeerLost;
  }
  return Blame::Unsupported;
}

}  // namespace

Pending::Pending(const JoinOptions& options)
    : context_(place_of(options, "gloo")), timeout_(options.timeout) {}

bool Pending::empty() {
  MutexLock lock(mutex_);
  return entries_.empty();
}

bool Pending::is_aborted() {
  MutexLock lock(mutex_);
  return aborted_.has_value();
}

Pending::Key Pending::add(Completion completion) {
  UniqueLock lock(mutex_);
  const Key key = next_key_++;
  if (aborted_) {
    const Error why = *aborted_;
    lock.unlock();
    completion.fail(why);
  } else {
    entries_.emplace(key, Entry{std::move(completion)});
  }
  return key;
}

bool Pending::begin(Key key) {
  MutexLock lock(mutex_);
  const auto found = entries_.find(key);
  if (found == entries_.end() || std::exchange(found->second.begun, true)) return false;
  ++begun_;
  return true;
}

bool Pending::wait(Key key, const c10::intrusive_ptr<c10d::Work>& work, Deadline deadline) {
  {
    MutexLock lock(mutex_);
    if (aborted_) return false;
    waited_.emplace(key, work);
  }
  const auto forget = [this, key] {
    MutexLock lock(mutex_);
    waited_.erase(key);
  };
  try {
    const bool done =
        work->wait(std::clamp(deadline.remaining(), std::chrono::milliseconds(1), timeout_));
    forget();
    return done;
  } catch (...) {
    forget();
    throw;
  }
}

Pending::Taken Pending::take(Key key) {
  MutexLock lock(mutex_);
  Taken taken{std::nullopt, aborted_};
  const auto found = entries_.find(key);
  if (found == entries_.end()) return taken;
  taken.completion = std::move(found->second.completion);
  if (found->second.begun) {
    --begun_;
    ended_.notify_all();
  }
  entries_.erase(found);
  return taken;
}

void Pending::complete(Key key, const std::function<void()>& finish) {
  // The entry stays until `finish` has returned, so that fail_begun() waits for its writes.
  if (finish && !is_aborted()) finish();
  Taken taken = take(key);
  if (!taken.completion) return;
  if (taken.aborted) {
    taken.completion->fail(*taken.aborted);
  } else {
    taken.completion->finish();
  }
}

void Pending::complete_message(Key key, int source) {
  Taken taken = take(key);
  if (!taken.completion) return;
  taken.completion->set_source_rank(source);
  taken.completion->finish();
}

void Pending::fail(Key key, const Error& error) {
  Taken taken = take(key);
  if (taken.completion) taken.completion->fail(error);
}

Error Pending::failure(const std::string& operation, const std::string& text) {
  const std::string what = operation + " " + context_;
  MutexLock lock(mutex_);
  if (aborted_) return *aborted_;
  const Blame blame = blame_of(text);
  if (blame != Blame::Timeout) return {blame, what + ": " + text};
  return {blame, what + ": not all ranks took part within " + describe(timeout_) + ": " + text};
}

bool Pending::abort(const Error& why) {
  UniqueLock lock(mutex_);
  if (aborted_) return false;
  aborted_ = why;
  // A receive from any source uses no particular connection, so breaking connections does not end
  // it.
  for (auto& [key, work] : waited_) work->abort();
  fail_unbegun(lock);
  return true;
}

void Pending::fail_begun(std::chrono::milliseconds patience) {
  UniqueLock lock(mutex_);
  ended_.wait_for(lock, patience, [this]() WEFT_REQUIRES(mutex_) { return begun_ == 0; });
  for (auto& [key, entry] : entries_) entry.begun = false;
  begun_ = 0;
  fail_unbegun(lock);
}

// Fails all entries that Gloo does not have. Releases the lock before it calls completions.
void Pending::fail_unbegun(std::unique_lock<std::mutex>& lock) {
  const Error why = *aborted_;
  std::vector<Completion> failing;
  for (auto one = entries_.begin(); one != entries_.end();) {
    if (one->second.begun) {
      ++one;
      continue;
    }
    failing.push_back(std::move(one->second.completion));
    one = entries_.erase(one);
  }
  lock.unlock();
  for (Completion& completion : failing) completion.fail(why);
}

}  // namespace weft::transport::gloo
