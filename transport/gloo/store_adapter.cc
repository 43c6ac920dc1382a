#include <c10/util/Exception.h>

#include <weft/transport/gloo/store_adapter.h>

namespace weft::transport::gloo {

namespace {

Bootstrap::Bytes to_bytes(const std::vector<std::uint8_t>& value) {
  const auto* begin = reinterpret_cast<const std::byte*>(value.data());
  return {begin, begin + value.size()};
}

}  // namespace

c10::intrusive_ptr<c10d::Store> StoreAdapter::clone() { return c10::make_intrusive<StoreAdapter>(bootstrap_, timeout_); }

void StoreAdapter::set(const std::string& key, const std::vector<std::uint8_t>& value) {
  bootstrap_->set(key, to_bytes(value));
}

std::vector<std::uint8_t> StoreAdapter::get(const std::string& key) {
  const auto value = bootstrap_->get(key, Deadline::in(timeout_));
  const auto* begin = reinterpret_cast<const std::uint8_t*>(value.data());
  return {begin, begin + value.size()};
}

std::int64_t StoreAdapter::add(const std::string& key, std::int64_t value) { return bootstrap_->add(key, value); }

bool StoreAdapter::deleteKey(const std::string& key) {
  const bool existed = bootstrap_->exists(key);
  bootstrap_->erase(key);
  return existed;
}

bool StoreAdapter::check(const std::vector<std::string>& keys) {
  for (const std::string& key : keys) {
    if (!bootstrap_->exists(key)) return false;
  }
  return true;
}

std::int64_t StoreAdapter::getNumKeys() { TORCH_CHECK(false, "weft: a group's store does not count its keys"); }

void StoreAdapter::wait(const std::vector<std::string>& keys) { wait(keys, timeout_); }

void StoreAdapter::wait(const std::vector<std::string>& keys, const std::chrono::milliseconds& timeout) {
  const Deadline deadline = Deadline::in(timeout);
  for (const std::string& key : keys) bootstrap_->get(key, deadline);
}

}  // namespace weft::transport::gloo
