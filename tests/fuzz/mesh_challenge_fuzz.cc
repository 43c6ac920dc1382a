// SPDX-License-Identifier: Apache-2.0
// Any first messages of a connection to a group with a secret are refused or answered, and prove
// nothing: the nonces are random, so no input can hold a proof. After a refusal nothing is taken
// any more. The first byte chooses the end; each message begins with a byte for its size.
#include <algorithm>
#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include <weft/base/make_error.h>
#include <weft/transport/mesh/challenge.h>

namespace {

using namespace weft;
using namespace weft::transport;
using namespace weft::transport::mesh;

// The challenge within a message; nothing, after which the connection ends, if it holds none.
std::optional<Bytes> challenge_in(const std::vector<std::byte>& message) {
  const auto body = decode_challenge(message);
  if (!body) {
    if (body.error().blame() != Blame::Protocol) broken("a refusal is not a Protocol error");
    return std::nullopt;
  }
  if (encode_challenge(body.value()) != message)
    broken("bytes change when they are read and written");
  return body.value();
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t count) {
  if (count == 0) return 0;
  JoinOptions options;
  options.secret = "a secret of the fuzzer";
  options.size = 2;
  const Side own = data[0] % 2 == 0 ? Side::Listener : Side::Connector;
  Challenge challenge = *challenge_of(options, Token(), own, 0);
  if (own == Side::Connector) challenge.open();
  std::span<const std::byte> left = std::as_bytes(std::span(data + 1, count - 1));
  bool is_refused = false;
  while (!left.empty()) {
    const auto bytes = std::min(std::to_integer<std::size_t>(left[0]), left.size() - 1);
    // An allocation of its own, so that a sanitizer detects reads beyond its end.
    const std::vector<std::byte> message(left.begin() + 1,
                                         left.begin() + 1 + static_cast<std::ptrdiff_t>(bytes));
    const auto body = challenge_in(message);
    if (!body) return 0;
    const auto answer = challenge.answer(*body);
    if (answer && is_refused) broken("a message is taken after a refusal");
    if (answer && answer.value().size() != sizeof(Nonce) + sizeof(Proof))
      broken("the answer to a nonce has another size");
    if (challenge.is_proven()) broken("an input has proved that it knows the secret");
    is_refused = !answer;
    left = left.subspan(1 + bytes);
  }
  return 0;
}
