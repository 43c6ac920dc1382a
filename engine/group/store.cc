#include <algorithm>
#include <cstring>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include <unistd.h>

#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>

#include <weft/base/error.h>
#include <weft/base/shortage.h>
#include <weft/engine/group/address.h>
#include <weft/engine/group/pause.h>
#include <weft/engine/group/store.h>
#include <weft/engine/tensor/tensor.h>

namespace weft::group {

namespace {

using std::chrono::milliseconds;

constexpr milliseconds kLongestConnecting = std::chrono::seconds(5);  // to a store that has answered before

Error not_in_time(const std::string& key) {
  return {Blame::Timeout, "key '" + key + "' of the group's store was not set in time"};
}

c10::intrusive_ptr<c10d::Store> innermost(const c10::intrusive_ptr<c10d::Store>& store) {
  auto* const prefix = dynamic_cast<c10d::PrefixStore*>(store.get());
  return prefix == nullptr ? store : prefix->getUnderlyingNonPrefixStore();
}

// FileStore counts its copies as workers, and others need not know clone() at all.
bool has_connection(const c10::intrusive_ptr<c10d::Store>& innermost) {
  return dynamic_cast<c10d::TCPStore*>(innermost.get()) != nullptr;
}

// What stands before a PrefixStore's keys, which c10d shows only to what derives from it.
struct Prefixes : c10d::PrefixStore {
  static std::string of(c10d::PrefixStore& store) { return (store.*&Prefixes::joinKey)(""); }
};

// `store` with another one innermost.
c10::intrusive_ptr<c10d::Store> over(const c10::intrusive_ptr<c10d::Store>& inner,
                                     const c10::intrusive_ptr<c10d::Store>& store) {
  auto* const prefix = dynamic_cast<c10d::PrefixStore*>(store.get());
  if (prefix == nullptr) return inner;
  std::string text = Prefixes::of(*prefix);
  text.pop_back();  // the '/' that comes before the key
  return c10::make_intrusive<c10d::PrefixStore>(text, over(inner, prefix->getUnderlyingStore()));
}

// A client of the store that `given` is a client of, which leaves the table of connections with its last user. (A weak
// reference keeps a store's socket open until the reference goes, so none may stay behind.)
class Connection final : public c10d::TCPStore {
 public:
  explicit Connection(const c10d::TCPStore& given) : TCPStore(given.getHost(), options_of(given)) {
    setTimeout(given.getTimeout());
  }
  void release_resources() override;  // c10 calls it when the last user goes

 private:
  static c10d::TCPStoreOptions options_of(const c10d::TCPStore& given) {
    c10d::TCPStoreOptions options;
    options.port = given.getPort();
    options.waitWorkers = false;
    options.timeout = std::min(given.getTimeout(), kLongestConnecting);
    options.useLibUV = given.isLibUvBackend();
    return options;
  }
};

// The connections that there are, by the store object that they were asked for.
class Connections {
 public:
  c10::intrusive_ptr<c10d::Store> to(const c10::intrusive_ptr<c10d::Store>& given) {
    const auto& store = static_cast<const c10d::TCPStore&>(*given);
    std::vector<c10::intrusive_ptr<Connection>> held;  // outlives the lock: the last user's end takes it
    std::lock_guard lock(mutex_);                      // also while one is made: who comes meanwhile is to share it
    std::erase_if(made_, [](const Made& one) { return one.process != ::getpid(); });
    for (const Made& one : made_) {
      const auto& connection = held.emplace_back(one.connection.lock());
      const bool is_its = one.given == given.get() && one.host == store.getHost() && one.port == store.getPort();
      if (connection && (is_its || connection.get() == given.get())) return connection;
    }
    auto connection = c10::make_intrusive<Connection>(store);
    made_.push_back({given.get(), store.getHost(), store.getPort(), Weak(connection), connection.get(), ::getpid()});
    return connection;
  }
  void forget(const Connection& gone) {
    std::lock_guard lock(mutex_);
    std::erase_if(made_, [&](const Made& one) { return one.made == &gone; });
  }

 private:
  using Weak = c10::weak_intrusive_ptr<Connection>;
  struct Made {
    const c10d::Store* given = nullptr;
    std::string host;
    int port = 0;
    Weak connection;
    const Connection* made = nullptr;
    pid_t process = 0;  // a child that was forked does not share its parent's
  };
  std::mutex mutex_;
  std::vector<Made> made_;
};

Connections& connections() {
  static Connections* const all = new Connections();  // for good: threads that join may outlive main()
  return *all;
}

void Connection::release_resources() { connections().forget(*this); }

// c10d throws DistNetworkError when the store's host is gone, DistStoreError on time-outs, others for misuse: only their
// texts and types tell them apart.
template <class F>
auto guarded(const std::string& what, F call) {
  try {
    return call();
  } catch (const Error&) {
    throw;
  } catch (const std::exception& error) {
    throw Error(Blame::PeerLost, "the group's store failed (" + what +
                                     "); the process that hosts it may have ended: " + tensor::text_of(error));
  }
}

}  // namespace

StoreBootstrap::StoreBootstrap(c10::intrusive_ptr<c10d::Store> store, std::function<void()> interrupt)
    : store_(std::move(store)), interrupt_(std::move(interrupt)), is_shared_(has_connection(innermost(store_))) {}

void StoreBootstrap::set(const std::string& key, const Bytes& value) {
  const auto* begin = reinterpret_cast<const std::uint8_t*>(value.data());
  guarded("set " + key, [&] { store_->set(key, std::vector<std::uint8_t>(begin, begin + value.size())); });
}

transport::Bootstrap::Bytes StoreBootstrap::get(const std::string& key, Deadline deadline) {
  if (interrupt_ || is_shared_) {
    look_for(key, deadline);
  } else {
    wait(key, deadline);
  }
  const auto value = guarded("get " + key, [&] { return store_->get(key); });
  const auto* begin = reinterpret_cast<const std::byte*>(value.data());
  return {begin, begin + value.size()};
}

void StoreBootstrap::wait(const std::string& key, Deadline deadline) {
  const auto limit = std::clamp(deadline.remaining(), milliseconds(1), kLongestTimeout);
  try {
    store_->wait({key}, limit);
  } catch (const std::exception& error) {
    if (deadline.passed()) throw not_in_time(key);
    throw Error(Blame::PeerLost, "the group's store failed (waiting for " + key +
                                     "); the process that hosts it may have ended: " + tensor::text_of(error));
  }
}

void StoreBootstrap::look_for(const std::string& key, Deadline deadline) {
  Pause pause;
  while (!exists(key)) {
    if (interrupt_) interrupt_();
    if (deadline.passed()) throw not_in_time(key);
    pause.wait(deadline);
  }
}

long StoreBootstrap::add(const std::string& key, long amount) {
  return guarded("add " + key, [&] { return static_cast<long>(store_->add(key, amount)); });
}

bool StoreBootstrap::exists(const std::string& key) {
  return guarded("check " + key, [&] { return store_->check({key}); });
}

bool StoreBootstrap::compare_set(const std::string& key, const Bytes& expected, const Bytes& desired) {
  const auto as_c10d = [](const Bytes& value) {
    const auto* begin = reinterpret_cast<const std::uint8_t*>(value.data());
    return std::vector<std::uint8_t>(begin, begin + value.size());
  };
  const auto wanted = as_c10d(desired);
  // c10d returns the value that the key has now; of a key that does not exist, the one that was expected.
  return guarded("compare and set " + key, [&] { return store_->compareSet(key, as_c10d(expected), wanted) == wanted; });
}

bool StoreBootstrap::exist(const std::vector<std::string>& keys) {
  return guarded("check", [&] { return store_->check(keys); });
}

void StoreBootstrap::erase(const std::string& key) {
  guarded("delete " + key, [&] { return store_->deleteKey(key); });
}

c10::intrusive_ptr<c10d::Store> connection_of(const c10::intrusive_ptr<c10d::Store>& store) {
  const auto given = innermost(store);
  if (!has_connection(given)) return store;
  const BriskLookups brisk;
  require_descriptors(1, "a second connection to the group's store");  // c10d would blame the network
  return guarded("connecting", [&] { return over(connections().to(given), store); });
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
