#include <algorithm>
#include <cstring>

#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>

#include <weft/base/error.h>
#include <weft/engine/group/address.h>
#include <weft/engine/group/pause.h>
#include <weft/engine/group/store.h>
#include <weft/engine/tensor/tensor.h>

namespace weft::group {

namespace {

using std::chrono::milliseconds;

Error not_in_time(const std::string& key) {
  return {Blame::Timeout, "key '" + key + "' of the group's store was not set in time"};
}

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
    : store_(std::move(store)), interrupt_(std::move(interrupt)) {}

void StoreBootstrap::set(const std::string& key, const Bytes& value) {
  const auto* begin = reinterpret_cast<const std::uint8_t*>(value.data());
  guarded("set " + key, [&] { store_->set(key, std::vector<std::uint8_t>(begin, begin + value.size())); });
}

transport::Bootstrap::Bytes StoreBootstrap::get(const std::string& key, Deadline deadline) {
  if (interrupt_) {
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
    interrupt_();
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

bool StoreBootstrap::exist(const std::vector<std::string>& keys) {
  return guarded("check", [&] { return store_->check(keys); });
}

void StoreBootstrap::erase(const std::string& key) {
  guarded("delete " + key, [&] { return store_->deleteKey(key); });
}

c10::intrusive_ptr<c10d::Store> connection_of(const c10::intrusive_ptr<c10d::Store>& store) {
  auto* prefix = dynamic_cast<c10d::PrefixStore*>(store.get());
  const auto innermost = prefix == nullptr ? store : prefix->getUnderlyingNonPrefixStore();
  // FileStore counts its copies as workers, and others need not know clone() at all.
  if (dynamic_cast<c10d::TCPStore*>(innermost.get()) == nullptr) return store;
  const BriskLookups brisk;
  return guarded("connecting", [&] { return store->clone(); });
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
