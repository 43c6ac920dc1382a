// The operations of one communicator that are under way: what Gloo's threads complete, and abort()
// fails. It outlives the communicator, in the hands of Gloo's callbacks. Usable from every thread.
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

  // After an abort the completion fails at once.
  Key add(Completion completion);
  // Gloo gets it now; false where it has failed meanwhile.
  bool begin(Key key);
  // Blocks until a send or a receive is done; false when abort() came first. Throws c10d's
  // exception at the deadline.
  bool wait(Key key, const c10::intrusive_ptr<c10d::Work>& work, Deadline deadline);

  // Gloo has done it. Runs `finish` before the fence passes, but not after an abort, which it fails
  // with.
  void complete(Key key, const std::function<void()>& finish);
  // The same of a message that came from that rank, or -1.
  void complete_message(Key key, int source);
  void fail(Key key, const std::string& operation, const std::string& text) {
    fail(key, failure(operation, text));
  }
  void fail(Key key, const Error& error);
  // Gloo's text as an Error; after an abort the abort's.
  Error failure(const std::string& operation, const std::string& text);

  // Fails what Gloo does not have, now and from now on, and ends waits. False after the first time.
  bool abort(const Error& why);
  // After that: fails the others as well, once Gloo has let go of them, or after `patience`.
  void fail_begun(std::chrono::milliseconds patience);

 private:
  struct Entry {
    Completion completion;
    bool begun = false;  // Gloo has its memory, and writes to it for as long as it likes
  };
  struct Taken {
    std::optional<Completion> completion;  // nothing where it has failed already
    std::optional<Error> aborted;
  };

  Taken take(Key key);
  void fail_unbegun(std::unique_lock<std::mutex>& lock);

  const std::string context_;
  const std::chrono::milliseconds timeout_;
  std::mutex mutex_;  // of what follows
  std::map<Key, Entry> entries_;
  std::size_t begun_ = 0;          // entries
  std::condition_variable ended_;  // one of them
  std::map<Key, c10::intrusive_ptr<c10d::Work>>
      waited_;  // sends and receives that a thread waits for
  Key next_key_ = 0;
  std::optional<Error> aborted_;
};

}  // namespace weft::transport::gloo
