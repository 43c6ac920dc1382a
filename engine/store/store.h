// SPDX-License-Identifier: Apache-2.0
// Makes c10d's stores usable as the transports' Bootstrap, with Weft's errors.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <c10/util/intrusive_ptr.h>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include <weft/transport/batched_bootstrap.h>

namespace weft::group {

// Longer timeouts overflow inside c10d and Gloo.
constexpr std::chrono::milliseconds kLongestTimeout = std::chrono::hours(24 * 24);

class StoreConnection;

// A store whose waits can be interrupted, so that nobody has to poll it.
class AwaitableStore : public c10d::Store {
 public:
  // Returns the values once all keys exist. Calls `interrupt`, which may be empty, now and then; an
  // exception from it ends the wait. Throws Timeout.
  virtual std::vector<std::vector<std::uint8_t>> await(const std::vector<std::string>& keys,
                                                       Deadline deadline,
                                                       const std::function<void()>& interrupt) = 0;
};

Error not_set_in_time(const std::string& key);

// How long the keeper of an AwaitableStore may take to answer, unless it is stopped or cut off.
constexpr auto kStoreAnswers = std::chrono::seconds(5);

// Bounds this thread's calls to AwaitableStores while it lives. A call that has no answer after
// kStoreAnswers calls `interrupt`, which may be empty, now and then; an exception from it ends the
// call. A call other than await() also ends, with Timeout, after `limit`. Calls that `interrupt`
// makes itself have only the bounds that it sets.
class StoreCallBounds {
 public:
  explicit StoreCallBounds(std::function<void()> interrupt,
                           std::chrono::milliseconds limit = kLongestTimeout);
  ~StoreCallBounds();
  StoreCallBounds(const StoreCallBounds&) = delete;
  StoreCallBounds& operator=(const StoreCallBounds&) = delete;

  // For the stores. The shortest limit of this thread's bounds.
  static std::chrono::milliseconds limit();
  // Calls the functions of this thread's bounds.
  static void interrupt();

 private:
  const std::function<void()> interrupt_;
  const std::chrono::milliseconds limit_;
  const StoreCallBounds* const outer_;
};

// If the store has a connection (TCPStore), get() polls for the key, so that others can use the
// connection meanwhile; c10d's own wait would block it. For a store on which users may block, pass
// connection_of() it.
class StoreBootstrap final : public transport::BatchedBootstrap {
 public:
  enum class Lives { WithGroup, WithJob };  // see ends_with_job()

  // With `interrupt`, get() polls every kind of store, and calls `interrupt` in between; an
  // exception from it ends the wait. (c10d's own wait cannot be ended.) For an AwaitableStore it
  // also bounds the other calls (StoreCallBounds).
  explicit StoreBootstrap(c10::intrusive_ptr<c10d::Store> store,
                          std::function<void()> interrupt = {}, Lives lives = Lives::WithGroup);

  void set(const std::string& key, const Bytes& value) override;
  // The next set() also sets this key of `other`, which is the same store under another prefix, in
  // the same request if the store can do so.
  void set_with_next(const StoreBootstrap& other, const std::string& key, const Bytes& value);
  Bytes get(const std::string& key, Deadline deadline) override;
  long add(const std::string& key, long amount) override;
  bool exists(const std::string& key) override;
  bool compare_set(const std::string& key, const Bytes& expected, const Bytes& desired) override;
  // Only for a key that no rank may be about to get: c10d's get would wait for it again, beyond
  // every deadline.
  void erase(const std::string& key) override;
  bool exist(const std::vector<std::string>& keys) override;
  // As get(), for all keys; over a TCPStore two requests, if all keys exist.
  std::vector<Bytes> get_all(const std::vector<std::string>& keys, Deadline deadline) override;
  std::optional<Bytes> find(const std::string& key) override;
  Bytes set_once(const std::string& key, const Bytes& value) override;
  bool ends_with_job() const override { return lives_ == Lives::WithJob; }
  // Uses another store from now on. No other thread uses this object meanwhile.
  void move_to(c10::intrusive_ptr<c10d::Store> store);

 private:
  template <class F>
  auto call(const std::string& what, F ask);
  void wait(const std::string& key, Deadline deadline);
  Bytes look_for(const std::string& key, Deadline deadline);
  // compareSet of c10d: returns the key's present value, or `expected` if the key does not exist.
  Bytes compared(const std::string& key, const Bytes& expected, const Bytes& desired);
  std::vector<Bytes> read(const std::vector<std::string>& keys);
  void set_with_earlier(const std::string& key, const Bytes& value);
  std::string missing_of(const std::vector<std::string>& keys);
  std::vector<Bytes> await(const std::vector<std::string>& keys, Deadline deadline);

  c10::intrusive_ptr<c10d::Store> store_;
  std::function<void()> interrupt_;
  const Lives lives_;
  std::vector<std::pair<std::string, std::vector<std::uint8_t>>> put_off_;  // with whole keys
  bool is_shared_;    // the store has a connection, which others use too
  bool has_batches_;  // the store has multiGet, and compareSet too, as c10d's such stores have
  StoreConnection* connection_;  // of store_; null if it is not from connection_of()
  AwaitableStore* awaitable_;    // what store_ leads to, if it is one
};

// Returns the same store over another connection than the user's, if it has connections (TCPStore).
// All groups and agents of this process that are made with one store object share that connection,
// and none of them blocks on it. The last holder closes it. Throws PeerLost if it cannot be made,
// Busy if this process has no descriptor left.
c10::intrusive_ptr<c10d::Store> connection_of(const c10::intrusive_ptr<c10d::Store>& store);

transport::Bootstrap::Bytes to_bytes(std::string_view text);
std::string to_text(const transport::Bootstrap::Bytes& bytes);

}  // namespace weft::group
