// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <utility>

#include <openssl/crypto.h>
#include <openssl/evp.h>
#include <openssl/hmac.h>
#include <openssl/rand.h>

#include <weft/base/error.h>
#include <weft/engine/call/secret.h>

namespace weft::call {

namespace {

// Precedes the signed bytes, so that a proof for another purpose or version is wrong.
constexpr std::string_view kPurpose = "weft rpc challenge 1";

const unsigned char* raw(const std::byte* bytes) {
  return reinterpret_cast<const unsigned char*>(bytes);
}

}  // namespace

Nonce make_nonce() {
  Nonce nonce;
  if (RAND_bytes(reinterpret_cast<unsigned char*>(nonce.data()), static_cast<int>(nonce.size())) !=
      1) {
    throw Error(Blame::Busy,
                "the system gives no random bytes, which rpc::Options::secret needs (does a "
                "sandbox forbid getrandom and /dev/urandom?)");
  }
  return nonce;
}

Proof prove(std::string_view secret, Side side, const Nonce& of_connector,
            const Nonce& of_listener) {
  std::vector<std::byte> text(kPurpose.size());
  std::ranges::transform(kPurpose, text.begin(), [](char c) { return static_cast<std::byte>(c); });
  text.push_back(static_cast<std::byte>(side));
  text.insert(text.end(), of_connector.begin(), of_connector.end());
  text.insert(text.end(), of_listener.begin(), of_listener.end());
  Proof proof;
  unsigned int bytes = 0;
  const auto* done =
      HMAC(EVP_sha256(), secret.data(), static_cast<int>(secret.size()), raw(text.data()),
           text.size(), reinterpret_cast<unsigned char*>(proof.data()), &bytes);
  if (done == nullptr || bytes != proof.size())
    throw Error(Blame::Unsupported, "this libcrypto has no HMAC-SHA-256");
  return proof;
}

bool is_same(const Proof& expected, std::span<const std::byte> shown) {
  return shown.size() == expected.size() &&
         CRYPTO_memcmp(expected.data(), shown.data(), expected.size()) == 0;
}

void Gate::pass(Task task) {
  {
    MutexLock lock(mutex_);
    if (!open_) return waiting_.push_back(std::move(task));
  }
  task();
}

void Gate::open() {
  for (;;) {  // a task that comes meanwhile runs behind the earlier ones
    std::vector<Task> ready;
    {
      MutexLock lock(mutex_);
      ready.swap(waiting_);
      if (ready.empty()) {
        open_ = true;
        return;
      }
    }
    for (Task& task : ready) task();
  }
}

}  // namespace weft::call
