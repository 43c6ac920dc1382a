// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <utility>

#include <openssl/crypto.h>
#include <openssl/evp.h>
#include <openssl/hmac.h>
#include <openssl/rand.h>

#include <weft/base/make_error.h>
#include <weft/transport/challenge.h>

namespace weft::transport {

namespace {

Error unproven() { return {Blame::Caller, "it did not prove that it knows the secret"}; }

}  // namespace

Nonce make_nonce() {
  Nonce nonce;
  if (RAND_bytes(reinterpret_cast<unsigned char*>(nonce.data()), static_cast<int>(nonce.size())) !=
      1) {
    throw Error(Blame::Busy,
                "the system gives no random bytes, which a connection with a secret needs (does a "
                "sandbox forbid getrandom and /dev/urandom?)");
  }
  return nonce;
}

Proof sign(std::string_view secret, std::initializer_list<std::span<const std::byte>> parts) {
  std::vector<std::byte> text;
  for (const auto& part : parts) text.insert(text.end(), part.begin(), part.end());
  Proof proof;
  unsigned int bytes = 0;
  const auto* done = HMAC(EVP_sha256(), secret.data(), static_cast<int>(secret.size()),
                          reinterpret_cast<const unsigned char*>(text.data()), text.size(),
                          reinterpret_cast<unsigned char*>(proof.data()), &bytes);
  if (done == nullptr || bytes != proof.size())
    throw Error(Blame::Unsupported, "this libcrypto has no HMAC-SHA-256");
  return proof;
}

Proof prove(std::string_view secret, std::string_view purpose, Side side, const Nonce& of_connector,
            const Nonce& of_listener, std::span<const std::byte> bound) {
  const std::array sides{static_cast<std::byte>(side)};
  return sign(secret, {std::as_bytes(std::span(purpose)), sides, of_connector, of_listener, bound});
}

bool is_same(const Proof& expected, std::span<const std::byte> shown) {
  return shown.size() == expected.size() &&
         CRYPTO_memcmp(expected.data(), shown.data(), expected.size()) == 0;
}

Challenge::Challenge(Side own, std::string secret, std::string_view purpose,
                     std::vector<std::byte> bound)
    : own_(own), secret_(std::move(secret)), purpose_(purpose), bound_(std::move(bound)) {}

std::vector<std::byte> Challenge::open() {
  if (own_ != Side::Connector || step_ != Step::Begins) broken("a challenge is opened twice");
  of_connector_ = make_nonce();
  step_ = Step::Awaits;
  return {of_connector_.begin(), of_connector_.end()};
}

Result<std::vector<std::byte>> Challenge::answer(std::span<const std::byte> message) {
  try {
    const Step step = std::exchange(step_, Step::Refused);
    if (own_ == Side::Listener && step == Step::Begins) return answer_nonce(message);
    return step == Step::Awaits ? answer_proof(message) : unproven();
  } catch (const Error& error) {  // no random bytes
    return error;
  }
}

Result<std::vector<std::byte>> Challenge::answer_nonce(std::span<const std::byte> message) {
  if (message.size() != of_connector_.size()) return unproven();
  std::ranges::copy(message, of_connector_.begin());
  of_listener_ = make_nonce();
  std::vector<std::byte> answer(of_listener_.begin(), of_listener_.end());
  const Proof proof = proof_of(own_);
  answer.insert(answer.end(), proof.begin(), proof.end());
  step_ = Step::Awaits;
  return answer;
}

Result<std::vector<std::byte>> Challenge::answer_proof(std::span<const std::byte> message) {
  if (own_ == Side::Connector) {
    if (message.size() < of_listener_.size()) return unproven();
    std::ranges::copy(message.first(of_listener_.size()), of_listener_.begin());
    message = message.subspan(of_listener_.size());
  }
  if (message.size() != sizeof(Proof)) return unproven();
  const Side other = own_ == Side::Connector ? Side::Listener : Side::Connector;
  if (!is_same(proof_of(other), message))
    return Error(Blame::Caller, "it does not know the secret");
  step_ = Step::Proven;
  if (own_ == Side::Listener) return std::vector<std::byte>();
  const Proof proof = proof_of(own_);
  return std::vector<std::byte>(proof.begin(), proof.end());
}

Proof Challenge::proof_of(Side side) const {
  return prove(secret_, purpose_, side, of_connector_, of_listener_, bound_);
}

}  // namespace weft::transport
