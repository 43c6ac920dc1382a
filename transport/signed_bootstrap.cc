// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <span>
#include <string_view>
#include <utility>

#include <weft/base/error.h>
#include <weft/transport/challenge.h>
#include <weft/transport/little_endian.h>
#include <weft/transport/signed_bootstrap.h>

namespace weft::transport {

namespace {

constexpr std::string_view kPurpose = "weft store value 1";
// Ends a signed value, behind the signature.
constexpr std::string_view kMark = "weft signed 1";
constexpr std::size_t kAppended = sizeof(Proof) + kMark.size();

std::span<const std::byte> bytes_of(std::string_view text) {
  return std::as_bytes(std::span(text));
}

// Without the sizes, one end of a key could be taken for the begin of its value.
Proof signature_of(std::string_view secret, std::string_view scope, std::string_view key,
                   std::span<const std::byte> value) {
  std::vector<std::byte> sizes;
  little_endian::append(sizes, std::uint64_t{scope.size()});
  little_endian::append(sizes, std::uint64_t{key.size()});
  return sign(secret, {bytes_of(kPurpose), sizes, bytes_of(scope), bytes_of(key), value});
}

}  // namespace

SignedBootstrap::SignedBootstrap(std::shared_ptr<Bootstrap> store, std::string secret,
                                 std::string scope, Users users)
    : store_(std::move(store)),
      secret_(std::move(secret)),
      scope_(std::move(scope)),
      users_(users) {}

Error SignedBootstrap::refused(const std::string& key, const std::string& why) const {
  const bool of_ranks = users_ == Users::Ranks;
  return {Blame::Caller,
          "the value of '" + key + "' in the store " + why +
              (of_ranks ? ", or a process outside the group has written it: give all ranks the "
                          "same ProcessGroupOptions::secret, or none"
                        : ", or a process outside the job has written it: give all workers of the "
                          "job the same rpc::Options::secret, or none")};
}

void SignedBootstrap::set(const std::string& key, const Bytes& value) {
  store_->set(key, sealed(key, value));
}

Bootstrap::Bytes SignedBootstrap::get(const std::string& key, Deadline deadline) {
  return unsealed(key, store_->get(key, deadline));
}

long SignedBootstrap::add(const std::string& key, long amount) { return store_->add(key, amount); }

bool SignedBootstrap::exists(const std::string& key) { return store_->exists(key); }

bool SignedBootstrap::compare_set(const std::string& key, const Bytes& expected,
                                  const Bytes& desired) {
  const Bytes stored = sealed(key, desired);
  // No value, or an empty one, which has a signature as others do.
  if (expected.empty() && store_->compare_set(key, {}, stored)) return true;
  if (expected.empty() && secret_.empty()) return false;
  return store_->compare_set(key, sealed(key, expected), stored);
}

void SignedBootstrap::erase(const std::string& key) { store_->erase(key); }

bool SignedBootstrap::exist(const std::vector<std::string>& keys) {
  return transport::exist(*store_, keys);
}

std::vector<Bootstrap::Bytes> SignedBootstrap::get_all(const std::vector<std::string>& keys,
                                                       Deadline deadline) {
  auto values = transport::get_all(*store_, keys, deadline);
  for (std::size_t i = 0; i < keys.size(); ++i) values[i] = unsealed(keys[i], std::move(values[i]));
  return values;
}

std::optional<Bootstrap::Bytes> SignedBootstrap::find(const std::string& key) {
  auto value = transport::find(*store_, key);
  if (value) *value = unsealed(key, std::move(*value));
  return value;
}

Bootstrap::Bytes SignedBootstrap::set_once(const std::string& key, const Bytes& value) {
  return unsealed(key, transport::set_once(*store_, key, sealed(key, value)));
}

bool SignedBootstrap::ends_with_job() const { return transport::ends_with_job(*store_); }

Bootstrap::Bytes SignedBootstrap::sealed(const std::string& key, const Bytes& value) const {
  if (secret_.empty()) return value;
  const Proof signature = signature_of(secret_, scope_, key, value);
  const auto mark = bytes_of(kMark);
  Bytes stored = value;
  stored.insert(stored.end(), signature.begin(), signature.end());
  stored.insert(stored.end(), mark.begin(), mark.end());
  return stored;
}

Bootstrap::Bytes SignedBootstrap::unsealed(const std::string& key, Bytes stored) const {
  const std::string writer = users_ == Users::Ranks ? "rank" : "worker";
  if (secret_.empty()) {
    if (!is_signed(stored)) return stored;
    throw refused(
        key, "is signed: the " + writer + " that wrote it was given a secret, and this one none");
  }
  if (!is_signed(stored))
    throw refused(key, "has no signature: the " + writer + " that wrote it was given no secret");
  const std::size_t bytes = stored.size() - kAppended;
  const auto shown = std::span(stored).subspan(bytes, sizeof(Proof));
  if (!is_same(signature_of(secret_, scope_, key, std::span(stored).first(bytes)), shown))
    throw refused(key, "was not signed with this " + writer + "'s secret: the " + writer +
                           "s were given different ones");
  stored.resize(bytes);
  return stored;
}

bool is_signed(const Bootstrap::Bytes& stored) {
  return stored.size() >= kAppended &&
         std::ranges::equal(bytes_of(kMark), std::span(stored).last(kMark.size()));
}

}  // namespace weft::transport
