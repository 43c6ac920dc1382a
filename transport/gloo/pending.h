// SPDX-License-Identifier: Apache-2.0
// The pending operations of one communicator, which Gloo's threads complete or abort() fails.
// Gloo's callbacks own it too, so it may outlive the communicator. Thread-safe.
#pragma once

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <map>
#include <mutex>
#include <optional>
#include <string>

#include <c10/util/intrusive_ptr.h>

#include <weft/base/mutex.h>
#include <weft/transport/transport.h>

namespace c10d {
class Work;
}  // namespace c10d

namespace weft::transport::gloo {

class Pending {
 public:
  using Key = std::uint64_t;

  explicit Pending(const JoinOptions& options);

  // "on group 'x' (gloo, rank 0 of 2)"
  const std::string& context() const { return context_; }
  std::chrono::milliseconds timeout() const { return timeout_; }
  bool empty();
  bool is_aborted();

  // Adds an operation; after abort() it fails at once.
  Key add(Completion completion);
  // Marks the operation as given to Gloo. Returns false if it has already failed.
  bool begin(Key key);
  // Blocks until a send or a receive is done. Returns false if abort() ended it. Throws c10d's
  // exception at the deadline.
  bool wait(Key key, const c10::intrusive_ptr<c10d::Work>& work, Deadline deadline);

  // Gloo has done the operation: runs `finish`, then completes it. After an abort, fails it with
  // the abort's error and does not run `finish`.
  void complete(Key key, const std::function<void()>& finish);
  // Completes a message. `source` is the sender's rank, or -1 for a send.
  void complete_message(Key key, int source);
  void fail(Key key, const std::string& operation, const std::string& text) {
    fail(key, failure(operation, text));
  }
  void fail(Key key, const Error& error);
  // Returns Gloo's text as an Error, or the abort's error after an abort.
  Error failure(const std::string& operation, const std::string& text);

  // Fails all operations that Gloo does not have, now and later, and ends waits. Returns false if
  // called before.
  bool abort(const Error& why);
  // After abort(): fails the others too, once Gloo has released them, or after `patience`.
  void fail_begun(std::chrono::milliseconds patience);

 private:
  struct Entry {
    Completion completion;
    bool begun = false;  // Gloo has its memory and may write to it
  };
  struct Taken {
    std::optional<Completion> completion;  // empty if it has already failed
    std::optional<Error> aborted;
  };

  Taken take(Key key);
  void fail_unbegun(std::unique_lock<std::mutex>& lock) WEFT_REQUIRES(mutex_);

  const std::string context_;
  const std::chrono::milliseconds timeout_;
  Mutex mutex_;
  std::map<Key, Entry> entries_ WEFT_GUARDED_BY(mutex_);
  std::size_t begun_ WEFT_GUARDED_BY(mutex_) = 0;  // number of entries that Gloo has
  std::condition_variable ended_;                  // signalled when one of those ends
  // Sends and receives that threads wait for.
  std::map<Key, c10::intrusive_ptr<c10d::Work>> waited_ WEFT_GUARDED_BY(mutex_);
  Key next_key_ WEFT_GUARDED_BY(mutex_) = 0;
  std::optional<Error> aborted_ WEFT_GUARDED_BY(mutex_);
};

}  // namespace weft::transport::gloo
