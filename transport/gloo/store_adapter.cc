// SPDX-License-Identifier: Apache-2.0
#include <c10/util/Exception.h>

#include <weft/base/error.h>
#include <weft/base/mutex.h>
#include <weft/transport/gloo/store_adapter.h>

namespace weft::transport::gloo {

namespace {

Bootstrap::Bytes to_bytes(const std::vector<std::uint8_t>& value) {
  const auto* begin = reinterpret_cast<const std::byte*>(value.data());
  return {begin, begin + value.size()};
}

}  // namespace

void StoreAdapter::release() {
  std::shared_ptr<Bootstrap> last;  // destroyed after the lock has been released
  MutexLock lock(mutex_);
  last.swap(bootstrap_);
}

std::shared_ptr<Bootstrap> StoreAdapter::bootstrap() const {
  MutexLock lock(mutex_);
  if (!bootstrap_) throw Error(Blame::Cancelled, "the group of this store was destroyed");
  return bootstrap_;
}

c10::intrusive_ptr<c10d::Store> StoreAdapter::clone() {
  return c10::make_intrusive<StoreAdapter>(bootstrap(), timeout_);
}

void StoreAdapter::set(const std::string& key, const std::vector<std::uint8_t>& value) {
  bootstrap()->set(key, to_bytes(value));
}

std::vector<std::uint8_t> StoreAdapter::get(const std::string& key) {
  const auto value = bootstrap()->get(key, Deadline::in(timeout_));
  const auto* begin = reinterpret_cast<const std::uint8_t*>(value.data());
  return {begin, begin + value.size()};
}

std::int64_t StoreAdapter::add(const std::string& key, std::int64_t value) {
  return bootstrap()->add(key, value);
}

bool StoreAdapter::deleteKey(const std::string& key) {
  const bool existed = bootstrap()->exists(key);
  bootstrap()->erase(key);
  return existed;
}

bool StoreAdapter::check(const std::vector<std::string>& keys) {
  for (const std::string& key : keys) {
    if (!bootstrap()->exists(key)) return false;
  }
  return true;
}

std::int64_t StoreAdapter::getNumKeys() {
  TORCH_CHECK(false, "weft: a group's store does not count its keys");
}

void StoreAdapter::wait(const std::vector<std::string>& keys) { wait(keys, timeout_); }

void StoreAdapter::wait(const std::vector<std::string>& keys,
                        const std::chrono::milliseconds& timeout) {
  const Deadline deadline = Deadline::in(timeout);
  for (const std::string& key : keys) bootstrap()->get(key, deadline);
}

}  // namespace weft::transport::gloo
