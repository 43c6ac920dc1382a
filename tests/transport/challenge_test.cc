// SPDX-License-Identifier: Apache-2.0
// The proofs by which both ends of a connection show that they know a secret.
#include <algorithm>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <weft/transport/challenge.h>

namespace weft::transport {
namespace {

using testing::IsEmpty;

constexpr const char* kPurpose = "weft test challenge 1";
const std::string kSecret = "sixteen at random";

using Message = std::vector<std::byte>;

Challenge connector(const std::string& secret = kSecret, Message bound = {}) {
  return {Side::Connector, secret, kPurpose, std::move(bound)};
}
Challenge listener(const std::string& secret = kSecret, Message bound = {}) {
  return {Side::Listener, secret, kPurpose, std::move(bound)};
}

// Passes messages between the two until one refuses the other or both are proven.
void run(Challenge& one, Challenge& other) {
  Message message = one.open();
  for (Challenge *to = &other, *from = &one; !message.empty(); std::swap(to, from)) {
    const auto answer = to->answer(message);
    if (!answer) return;
    message = answer.value();
  }
}

std::string why_refused(const Result<Message>& answer) {
  return answer ? "not refused" : answer.error().text();
}

TEST(Proofs, DependOnKeyPurposeSideNoncesAndBound) {
  Nonce c{};
  Nonce l{};
  l[31] = std::byte{1};
  const auto proof = prove("key", kPurpose, Side::Connector, c, l);
  EXPECT_TRUE(is_same(proof, prove("key", kPurpose, Side::Connector, c, l)));
  EXPECT_FALSE(is_same(proof, prove("keY", kPurpose, Side::Connector, c, l)));
  EXPECT_FALSE(is_same(proof, prove("key", "weft test challenge 2", Side::Connector, c, l)));
  EXPECT_FALSE(is_same(proof, prove("key", kPurpose, Side::Listener, c, l)));
  EXPECT_FALSE(is_same(proof, prove("key", kPurpose, Side::Connector, l, c)));
  EXPECT_FALSE(is_same(proof, prove("key", kPurpose, Side::Connector, c, l, Message(1))));
  EXPECT_FALSE(is_same(proof, std::span(proof).first(31)));
  EXPECT_FALSE(is_same(proof, {}));
  EXPECT_NE(make_nonce(), make_nonce());
}

// RFC 4231, test case 2.
TEST(Proofs, AreHmacSha256) {
  const std::string text = "what do ya want for nothing?";
  const Proof proof = sign("Jefe", {std::as_bytes(std::span(text))});
  EXPECT_EQ(std::to_integer<int>(proof[0]), 0x5b);
  EXPECT_EQ(std::to_integer<int>(proof[31]), 0x43);
}

TEST(Challenges, BothEndsWithTheSecretAreProven) {
  Challenge one = connector(), other = listener();
  run(one, other);
  EXPECT_TRUE(one.is_proven());
  EXPECT_TRUE(other.is_proven());
}

TEST(Challenges, AnotherSecretOrBoundIsRefused) {
  for (auto other : {listener("sixteen but other"), listener(kSecret, Message(1))}) {
    Challenge one = connector();
    const auto answer = other.answer(one.open());
    EXPECT_EQ(why_refused(one.answer(answer.value())), "it does not know the secret");
    EXPECT_FALSE(one.is_proven());
    EXPECT_EQ(why_refused(other.answer(Message(sizeof(Proof)))), "it does not know the secret");
    EXPECT_FALSE(other.is_proven());
  }
}

TEST(Challenges, MessagesOfOtherSizesAreRefused) {
  for (const std::size_t bytes : {0, 1, 31, 33, 63, 65, 1000}) {
    const std::string why = "it did not prove that it knows the secret";
    Challenge first = listener();
    EXPECT_EQ(why_refused(first.answer(Message(bytes))), why);
    Challenge second = listener();
    EXPECT_TRUE(second.answer(connector().open()).ok());
    EXPECT_EQ(why_refused(second.answer(Message(bytes))), why);
    Challenge one = connector();
    static_cast<void>(one.open());
    EXPECT_EQ(why_refused(one.answer(Message(bytes))), why);
  }
}

// A listener that does not know the secret sends the connector's nonce to a connector of its own.
TEST(Challenges, ReflectedProofIsRefused) {
  Challenge one = connector(), another = connector(), other = listener();
  const Message nonce = one.open();
  Message answer = other.answer(nonce).value();
  ASSERT_TRUE(one.answer(answer).ok());
  static_cast<void>(another.open());
  EXPECT_FALSE(another.answer(answer).ok()) << "a proof for another nonce";
  Challenge victim = listener();
  const Message shown = victim.answer(nonce).value();
  EXPECT_FALSE(victim.answer(std::span(shown).subspan(sizeof(Nonce))).ok())
      << "a listener's own proof";
}

TEST(Challenges, ReplayedProofIsRefused) {
  Challenge one = connector(), other = listener();
  const Message nonce = one.open();
  const Message proof = one.answer(other.answer(nonce).value()).value();
  ASSERT_TRUE(other.answer(proof).ok());
  Challenge later = listener();
  ASSERT_TRUE(later.answer(nonce).ok());
  EXPECT_EQ(why_refused(later.answer(proof)), "it does not know the secret");
}

TEST(Challenges, NothingIsReadAfterTheEnd) {
  Challenge one = connector(), other = listener();
  const Message answer = other.answer(one.open()).value();
  const Message proof = one.answer(answer).value();
  EXPECT_THAT(other.answer(proof).value(), IsEmpty());
  ASSERT_TRUE(one.is_proven());
  ASSERT_TRUE(other.is_proven());
  EXPECT_FALSE(one.answer(answer).ok());
  EXPECT_FALSE(other.answer(proof).ok());
  EXPECT_FALSE(one.is_proven());
  Challenge refused = listener();
  EXPECT_FALSE(refused.answer({}).ok());
  EXPECT_FALSE(refused.answer(connector().open()).ok());
}

}  // namespace
}  // namespace weft::transport
