// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <atomic>
#include <cstring>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <poll.h>
#include <unistd.h>

#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>

#include <weft/base/descriptor.h>
#include <weft/base/error.h>
#include <weft/base/mutex.h>
#include <weft/base/shortage.h>
#include <weft/engine/store/address.h>
#include <weft/engine/store/backoff.h>
#include <weft/engine/store/prefix.h>
#include <weft/engine/store/store.h>
#include <weft/engine/tensor/tensor.h>

namespace weft::group {

namespace {

using std::chrono::milliseconds;

// How long c10d itself may take to connect, also on a machine where many ranks start. When that
// time is over it logs an error and a stack trace.
constexpr milliseconds kLongestOfC10d = std::chrono::seconds(5);

c10::intrusive_ptr<c10d::Store> innermost(const c10::intrusive_ptr<c10d::Store>& store) {
  auto* const prefix = dynamic_cast<c10d::PrefixStore*>(store.get());
  return prefix == nullptr ? store : prefix->getUnderlyingNonPrefixStore();
}

// True for stores with a connection. A FileStore cannot be cloned, as it counts its copies as
// workers; other stores need not implement clone() at all.
bool has_connection(const c10::intrusive_ptr<c10d::Store>& innermost) {
  return dynamic_cast<c10d::TCPStore*>(innermost.get()) != nullptr;
}

// Reads the prefix that a PrefixStore puts before its keys, which c10d shows only to derived
// classes.
struct Prefixes : c10d::PrefixStore {
  static std::string of(c10d::PrefixStore& store) { return (store.*&Prefixes::joinKey)(""); }
};

// A copy of `store`, with its prefixes, over another innermost store.
c10::intrusive_ptr<c10d::Store> over(const c10::intrusive_ptr<c10d::Store>& inner,
                                     const c10::intrusive_ptr<c10d::Store>& store) {
  auto* const prefix = dynamic_cast<c10d::PrefixStore*>(store.get());
  if (prefix == nullptr) return inner;
  std::string text = Prefixes::of(*prefix);
  text.pop_back();  // the '/' between prefix and key
  return c10::make_intrusive<c10d::PrefixStore>(text, over(inner, prefix->getUnderlyingStore()));
}

// Opens an idle connection to the store's host, which shows when the host ends. Throws PeerLost if
// nobody listens any more.
Descriptor connection_beside(const c10d::TCPStore& store) {
  try {
    return Descriptor(
        connect_to(store.getHost(), store.getPort(), Deadline::in(store.getTimeout())));
  } catch (const Error& error) {
    throw error.within("connecting to the group's store");
  }
}

}  // namespace

// A second client of the TCPStore that `given` is a client of. It leaves the table of connections
// when its last user releases it. (A weak reference keeps a store's socket open, so no weak
// reference may stay in the table.)
class StoreConnection final : public c10d::TCPStore {
 public:
  // Takes `beside` unless it throws.
  StoreConnection(const c10d::TCPStore& given, Descriptor& beside)
      : TCPStore(given.getHost(), options_of(given)), beside_(std::move(beside)) {
    setTimeout(given.getTimeout());
  }
  void release_resources() override;  // called by c10 when the last user releases it
  // c10d's client would log an error and a stack trace for each call on a connection that has
  // ended, so callers check this first.
  bool is_lost() const { return is_lost_ || has_ended(beside_); }
  void note_lost() { is_lost_ = true; }

 private:
  const Descriptor beside_;
  std::atomic<bool> is_lost_{false};
  static c10d::TCPStoreOptions options_of(const c10d::TCPStore& given) {
    c10d::TCPStoreOptions options;
    options.port = given.getPort();
    options.waitWorkers = false;
    options.timeout = std::min(given.getTimeout(), kLongestOfC10d);
    options.useLibUV = given.isLibUvBackend();
    return options;
  }
};

namespace {

// The open connections, by the store object for which they were made.
class Connections {
 public:
  c10::intrusive_ptr<c10d::Store> to(const c10::intrusive_ptr<c10d::Store>& given) {
    const auto& store = static_cast<const c10d::TCPStore&>(*given);
    // Destroyed after the lock is released, because the destructor of a last user takes the lock.
    std::vector<c10::intrusive_ptr<StoreConnection>> held;
    // Also held while a connection is made, so that other threads wait and then share it.
    MutexLock lock(mutex_);
    std::erase_if(made_, [](const Made& one) { return one.process != ::getpid(); });
    for (const Made& one : made_) {
      const auto& connection = held.emplace_back(one.connection.lock());
      const bool is_its =
          one.given == given.get() && one.host == store.getHost() && one.port == store.getPort();
      if (connection && (is_its || connection.get() == given.get())) return connection;
    }
    auto connection = make(store);
    made_.push_back({given.get(), store.getHost(), store.getPort(), Weak(connection),
                     connection.get(), ::getpid()});
    return connection;
  }
  void forget(const StoreConnection& gone) {
    MutexLock lock(mutex_);
    std::erase_if(made_, [&](const Made& one) { return one.made == &gone; });
  }

 private:
  // Checks the host before each attempt: c10d would try to reach a host that has ended until the
  // store's time limit.
  static c10::intrusive_ptr<StoreConnection> make(const c10d::TCPStore& store) {
    // c10d would blame the network.
    require_descriptors(2, "another connection to the group's store");
    Descriptor beside = connection_beside(store);
    for (const Deadline deadline = Deadline::in(store.getTimeout());;) {
      try {
        return c10::make_intrusive<StoreConnection>(store, beside);
      } catch (const c10::DistNetworkError&) {
        if (has_ended(beside) || deadline.passed()) throw;
      }
    }
  }

  using Weak = c10::weak_intrusive_ptr<StoreConnection>;
  struct Made {
    const c10d::Store* given = nullptr;
    std::string host;
    int port = 0;
    Weak connection;
    const StoreConnection* made = nullptr;
    pid_t process = 0;  // a forked child does not share its parent's connections
  };
  Mutex mutex_;
  std::vector<Made> made_ WEFT_GUARDED_BY(mutex_);
};

Connections& connections() {
  // Never destroyed: threads that join may outlive main().
  static Connections* const all = new Connections();
  return *all;
}

}  // namespace

void StoreConnection::release_resources() { connections().forget(*this); }

namespace {

std::vector<std::uint8_t> as_c10d(const transport::Bootstrap::Bytes& value) {
  const auto* begin = reinterpret_cast<const std::uint8_t*>(value.data());
  return {begin, begin + value.size()};
}

transport::Bootstrap::Bytes as_bytes(const std::vector<std::uint8_t>& value) {
  const auto* begin = reinterpret_cast<const std::byte*>(value.data());
  return {begin, begin + value.size()};
}

// Repeated questions to a store. If its host is slow to answer, because many ranks ask it, the
// pauses are longer than Backoff's: most of that host's time is left for the ranks that come.
class Looks {
 public:
  template <class Ask>
  auto ask(const Ask& ask) {
    const auto begin = std::chrono::steady_clock::now();
    auto answer = ask();
    took_ = std::chrono::steady_clock::now() - begin;
    return answer;
  }
  void wait(Deadline deadline) {
    constexpr milliseconds kShort(20), kLongest(500);
    constexpr int kTimes = 8;
    pause_.wait(deadline);
    if (kTimes * took_ < kShort) return;
    const auto some = std::min<std::chrono::nanoseconds>(kTimes * took_,
                                                         std::min(deadline.remaining(), kLongest));
    const timespec limit{0, static_cast<long>(some.count())};
    ::ppoll(nullptr, 0, &limit, nullptr);
  }

 private:
  Backoff pause_;
  std::chrono::nanoseconds took_{0};
};

// No rank writes it.
constexpr std::string_view kNoValue = "weft: the key has no value";

// Converts c10d's exceptions. c10d throws DistNetworkError when the store's host is gone,
// DistStoreError on time-outs, and others for misuse, told apart only by type and text.
template <class F>
auto guarded(StoreConnection* connection, const std::string& what, F call) {
  if (connection != nullptr && connection->is_lost()) {
    throw Error(Blame::PeerLost,
                "the group's store failed (" + what + "); the process that hosts it has ended");
  }
  try {
    return call();
  } catch (const Error&) {
    throw;
  } catch (const c10::DistNetworkError& error) {
    if (connection != nullptr) connection->note_lost();
    throw Error(Blame::PeerLost,
                "the group's store failed (" + what +
                    "); the process that hosts it may have ended: " + tensor::text_of(error));
  } catch (const std::exception& error) {
    throw Error(Blame::PeerLost,
                "the group's store failed (" + what +
                    "); the process that hosts it may have ended: " + tensor::text_of(error));
  }
}

}  // namespace

std::string prefix_of(const c10::intrusive_ptr<c10d::Store>& store) {
  auto* const prefix = dynamic_cast<c10d::PrefixStore*>(store.get());
  if (prefix == nullptr) return "";
  return prefix_of(prefix->getUnderlyingStore()) + Prefixes::of(*prefix);
}

Error not_set_in_time(const std::string& key) {
  return {Blame::Timeout, "key '" + key + "' of the group's store was not set in time"};
}

namespace {

thread_local const StoreCallBounds* innermost_bounds = nullptr;

}  // namespace

StoreCallBounds::StoreCallBounds(std::function<void()> interrupt, milliseconds limit)
    : interrupt_(std::move(interrupt)), limit_(limit), outer_(innermost_bounds) {
  innermost_bounds = this;
}

StoreCallBounds::~StoreCallBounds() { innermost_bounds = outer_; }

milliseconds StoreCallBounds::limit() {
  auto shortest = kLongestTimeout;
  for (auto one = innermost_bounds; one != nullptr; one = one->outer_)
    shortest = std::min(shortest, one->limit_);
  return shortest;
}

void StoreCallBounds::interrupt() {
  const auto all = std::exchange(innermost_bounds, nullptr);
  const struct Restore {
    const StoreCallBounds* all;
    ~Restore() { innermost_bounds = all; }
  } restore{all};
  for (auto one = all; one != nullptr; one = one->outer_) {
    if (one->interrupt_) one->interrupt_();
  }
}

StoreBootstrap::StoreBootstrap(c10::intrusive_ptr<c10d::Store> store,
                               std::function<void()> interrupt, Lives lives)
    : interrupt_(std::move(interrupt)), lives_(lives) {
  move_to(std::move(store));
}

void StoreBootstrap::move_to(c10::intrusive_ptr<c10d::Store> store) {
  store_ = std::move(store);
  const auto inner = innermost(store_);
  is_shared_ = has_connection(inner);
  has_batches_ = inner->hasExtendedApi();
  connection_ = dynamic_cast<StoreConnection*>(inner.get());
  awaitable_ = dynamic_cast<AwaitableStore*>(inner.get());
}

// Runs one request, whose errors are Weft's.
template <class F>
auto StoreBootstrap::call(const std::string& what, F ask) {
  std::optional<StoreCallBounds> bounds;
  if (awaitable_ != nullptr && interrupt_) bounds.emplace(interrupt_);
  return guarded(connection_, what, ask);
}

void StoreBootstrap::set(const std::string& key, const Bytes& value) {
  if (!put_off_.empty()) return set_with_earlier(key, value);
  call("set " + key, [&] { store_->set(key, as_c10d(value)); });
}

void StoreBootstrap::set_with_next(const StoreBootstrap& other, const std::string& key,
                                   const Bytes& value) {
  put_off_.emplace_back(prefix_of(other.store_) + key, as_c10d(value));
}

void StoreBootstrap::set_with_earlier(const std::string& key, const Bytes& value) {
  put_off_.emplace_back(prefix_of(store_) + key, as_c10d(value));
  std::vector<std::string> keys;
  std::vector<std::vector<std::uint8_t>> values;
  for (auto& [one, its] : std::exchange(put_off_, {})) {
    keys.push_back(std::move(one));
    values.push_back(std::move(its));
  }
  call("set " + key, [&] {
    const auto inner = innermost(store_);
    if (has_batches_) return inner->multiSet(keys, values);
    for (std::size_t i = 0; i < keys.size(); ++i) inner->set(keys[i], values[i]);
  });
}

transport::Bootstrap::Bytes StoreBootstrap::get(const std::string& key, Deadline deadline) {
  if (awaitable_ != nullptr) return std::move(await({key}, deadline).front());
  if (interrupt_ || is_shared_) return look_for(key, deadline);
  wait(key, deadline);
  return std::move(read({key}).front());
}

std::vector<transport::Bootstrap::Bytes> StoreBootstrap::get_all(
    const std::vector<std::string>& keys, Deadline deadline) {
  if (awaitable_ != nullptr) return await(keys, deadline);
  for (Looks looks; !looks.ask([&] { return exist(keys); }); looks.wait(deadline)) {
    if (interrupt_) interrupt_();
    if (deadline.passed()) throw not_set_in_time(missing_of(keys));
  }
  return read(keys);
}

// Returns the values. All keys exist.
std::vector<transport::Bootstrap::Bytes> StoreBootstrap::read(
    const std::vector<std::string>& keys) {
  std::vector<Bytes> values;
  call("get " + keys.front(), [&] {
    if (has_batches_ && keys.size() > 1) {
      for (const auto& value : store_->multiGet(keys)) values.push_back(as_bytes(value));
    } else {
      for (const std::string& key : keys) values.push_back(as_bytes(store_->get(key)));
    }
  });
  return values;
}

// The first that does not exist.
std::string StoreBootstrap::missing_of(const std::vector<std::string>& keys) {
  auto first = keys.begin();
  for (auto left = keys.end() - first; left > 1;) {
    const auto half = left / 2;
    const bool is_behind = exist({first, first + half});
    first += is_behind ? half : 0;
    left = is_behind ? left - half : half;
  }
  return *first;
}

std::optional<transport::Bootstrap::Bytes> StoreBootstrap::find(const std::string& key) {
  if (has_batches_) {
    // c10d returns the present value of the key; for a missing key, the expected value.
    const auto none = as_c10d(to_bytes(kNoValue));
    const auto value = call("get " + key, [&] { return store_->compareSet(key, none, none); });
    return value == none ? std::nullopt : std::optional(as_bytes(value));
  }
  if (!exists(key)) return std::nullopt;
  return awaitable_ != nullptr ? get(key, Deadline::never()) : std::move(read({key}).front());
}

transport::Bootstrap::Bytes StoreBootstrap::set_once(const std::string& key, const Bytes& value) {
  if (has_batches_ || awaitable_ != nullptr) return compared(key, {}, value);
  if (add(key + "/writers", 1) == 1) set(key, value);
  return get(key, Deadline::never());
}

std::vector<transport::Bootstrap::Bytes> StoreBootstrap::await(const std::vector<std::string>& keys,
                                                               Deadline deadline) {
  std::vector<std::string> whole;
  for (const std::string& key : keys) whole.push_back(prefix_of(store_) + key);
  std::vector<Bytes> values;
  for (const auto& value : awaitable_->await(whole, deadline, interrupt_))
    values.push_back(as_bytes(value));
  return values;
}

void StoreBootstrap::wait(const std::string& key, Deadline deadline) {
  const auto limit = std::clamp(deadline.remaining(), milliseconds(1), kLongestTimeout);
  try {
    store_->wait({key}, limit);
  } catch (const std::exception& error) {
    if (deadline.passed()) throw not_set_in_time(key);
    throw Error(Blame::PeerLost,
                "the group's store failed (waiting for " + key +
                    "); the process that hosts it may have ended: " + tensor::text_of(error));
  }
}

transport::Bootstrap::Bytes StoreBootstrap::look_for(const std::string& key, Deadline deadline) {
  for (Looks looks;; looks.wait(deadline)) {
    if (auto value = looks.ask([&] { return find(key); })) return std::move(*value);
    if (interrupt_) interrupt_();
    if (deadline.passed()) throw not_set_in_time(key);
  }
}

long StoreBootstrap::add(const std::string& key, long amount) {
  return call("add " + key, [&] { return static_cast<long>(store_->add(key, amount)); });
}

bool StoreBootstrap::exists(const std::string& key) {
  return call("check " + key, [&] { return store_->check({key}); });
}

bool StoreBootstrap::compare_set(const std::string& key, const Bytes& expected,
                                 const Bytes& desired) {
  return compared(key, expected, desired) == desired;
}

transport::Bootstrap::Bytes StoreBootstrap::compared(const std::string& key, const Bytes& expected,
                                                     const Bytes& desired) {
  return as_bytes(call("compare and set " + key, [&] {
    return store_->compareSet(key, as_c10d(expected), as_c10d(desired));
  }));
}

bool StoreBootstrap::exist(const std::vector<std::string>& keys) {
  return call("check", [&] { return store_->check(keys); });
}

void StoreBootstrap::erase(const std::string& key) {
  call("delete " + key, [&] { return store_->deleteKey(key); });
}

c10::intrusive_ptr<c10d::Store> connection_of(const c10::intrusive_ptr<c10d::Store>& store) {
  const auto given = innermost(store);
  if (!has_connection(given)) return store;
  const BriskLookups brisk;
  return guarded(nullptr, "connecting", [&] { return over(connections().to(given), store); });
}

transport::Bootstrap::Bytes to_bytes(std::string_view text) {
  transport::Bootstrap::Bytes bytes(text.size());
  if (!text.empty()) std::memcpy(bytes.data(), text.data(), text.size());
  return bytes;
}

std::string to_text(const transport::Bootstrap::Bytes& bytes) {
  return {reinterpret_cast<const char*>(bytes.data()), bytes.size()};
}

}  // namespace weft::group
