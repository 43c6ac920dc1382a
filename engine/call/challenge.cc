// SPDX-License-Identifier: Apache-2.0
#include <algorithm>

#include <weft/base/error.h>
#include <weft/engine/call/challenge.h>
#include <weft/engine/call/message.h>

namespace weft::call {

Challenge::Answer Challenge::challenged(const std::string &secret,
                                        const transport::Arrival &arrival) {
  Nonces nonces;
  Answer result;
  const auto body = challenge_in(arrival);
  if (!body || body->size() != (nonces_ ? sizeof(Proof) : nonces.of_connector.size())) {
    result.wrong =
        "it did not prove that it knows the secret of this job "
        "(rpc::Options::secret)";
  } else if (nonces_) {
    is_proven_ =
        is_same(prove(secret, Side::Connector, nonces_->of_connector, nonces_->of_listener), *body);
    if (!is_proven_)
      result.wrong = "it does not know the secret of this job (rpc::Options::secret)";
  } else {
    std::ranges::copy(*body, nonces.of_connector.begin());
    try {
      nonces.of_listener = make_nonce();
      const Proof proof = prove(secret, Side::Listener, nonces.of_connector, nonces.of_listener);
      result.answer.assign(nonces.of_listener.begin(), nonces.of_listener.end());
      result.answer.insert(result.answer.end(), proof.begin(), proof.end());
      nonces_ = nonces;
    } catch (const Error &error) {
      result.wrong = error.text();
    }
  }
  return result;
}

}  // namespace weft::call
