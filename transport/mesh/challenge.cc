// SPDX-License-Identifier: Apache-2.0
#include <weft/transport/little_endian.h>
#include <weft/transport/mesh/challenge.h>

namespace weft::transport::mesh {

namespace {

constexpr std::string_view kPurpose = "weft group challenge 1";
constexpr const char* kOption = " of this group (ProcessGroupOptions::secret)";
constexpr std::size_t kFrontBytes = 8;

Error unproven(const std::string& why) {
  return {Blame::Protocol,
          "it did not prove that it knows the secret" + std::string(kOption) + ": " + why};
}

}  // namespace

std::optional<Challenge> challenge_of(const JoinOptions& options, const Token& token, Side own,
                                      int listener) {
  if (options.secret.empty()) return std::nullopt;
  std::vector<std::byte> bound(token.begin(), token.end());
  little_endian::append(bound, static_cast<std::uint32_t>(options.size));
  little_endian::append(bound, static_cast<std::uint32_t>(listener));
  return Challenge(own, options.secret, kPurpose, std::move(bound));
}

std::vector<std::byte> encode_challenge(Bytes body) {
  std::vector<std::byte> bytes;
  little_endian::append(bytes, kChallengeMagic);
  little_endian::append(bytes, kChallengeVersion);
  little_endian::append(bytes, std::uint16_t{0});
  bytes.insert(bytes.end(), body.begin(), body.end());
  return bytes;
}

Result<Bytes> decode_challenge(Bytes header) {
  if (header.size() < kFrontBytes ||
      little_endian::get<std::uint32_t>(header.data()) != kChallengeMagic)
    return unproven("its message is no challenge");
  const auto version = little_endian::get<std::uint16_t>(header.data() + 4);
  if (version != kChallengeVersion || little_endian::get<std::uint16_t>(header.data() + 6) != 0)
    return unproven("it uses version " + std::to_string(version) + ", and this process version " +
                    std::to_string(kChallengeVersion));
  return header.subspan(kFrontBytes);
}

void send_opening(Challenge& challenge, Connection& connection) {
  connection.send(encode_challenge(challenge.open()), {}, Pin(), Fence());
}

std::optional<std::string> answer_challenge(Challenge& challenge, Connection& connection,
                                            const Arrival& arrival) {
  const auto body = arrival.sizes.empty() ? decode_challenge(arrival.header)
                                          : Result<Bytes>(unproven("its message has a payload"));
  if (!body) return body.error().text();
  const auto answer = challenge.answer(body.value());
  if (!answer) return answer.error().text() + kOption;
  if (!answer.value().empty())
    connection.send(encode_challenge(answer.value()), {}, Pin(), Fence());
  return std::nullopt;
}

}  // namespace weft::transport::mesh
