// SPDX-License-Identifier: Apache-2.0
#include <future>
#include <limits>
#include <thread>

#include <gtest/gtest.h>

#include <weft/engine/membership/store_keeper.h>
#include <weft/engine/membership/store_message.h>

namespace weft::group {
namespace {

StoreMessage request(std::uint64_t number, StoreCall call, std::vector<std::string> texts,
                     std::int64_t amount = 0) {
  return {number, call, false, amount, std::move(texts)};
}

// The answers that a keeper has given, by asker.
struct Keeper {
  StoreKeeper keeper;
  std::vector<std::pair<int, StoreMessage>> answers;

  void ask(int asker, const StoreMessage& message) {
    keeper.handle(asker, message,
                  [this, asker](const StoreMessage& reply) { answers.emplace_back(asker, reply); });
  }
  StoreMessage last() const { return answers.empty() ? StoreMessage{} : answers.back().second; }
};

TEST(StoreKeeper, AnswersAGetOnceAllKeysExist) {
  Keeper one;
  one.ask(3, request(7, StoreCall::Get, {"a", "b"}));
  one.ask(4, request(1, StoreCall::Set, {"a", "1"}));
  ASSERT_EQ(one.answers.size(), 1U);
  one.ask(4, request(2, StoreCall::Set, {"b", ""}));
  ASSERT_EQ(one.answers.size(), 3U);
  const auto& [asker, reply] = one.answers[1];
  EXPECT_EQ(asker, 3);
  EXPECT_EQ(reply.number, 7U);
  EXPECT_EQ(reply.texts, (std::vector<std::string>{"1", ""}));
}

TEST(StoreKeeper, DoesNotAnswerWhatIsForgotten) {
  Keeper one;
  one.ask(3, request(7, StoreCall::Get, {"a"}));
  one.ask(3, request(8, StoreCall::Forget, {}, 7));
  one.ask(4, request(1, StoreCall::Set, {"a", "1"}));
  EXPECT_EQ(one.answers.size(), 1U);
}

// A request is repeated if its answer may have been lost.
TEST(StoreKeeper, DoesARepeatedRequestOnce) {
  Keeper one;
  for (int i = 0; i < 2; ++i) one.ask(3, request(7, StoreCall::Add, {"n"}, 5));
  EXPECT_EQ(one.answers.size(), 2U);
  EXPECT_EQ(one.last().amount, 5);
  one.ask(4, request(7, StoreCall::Add, {"n"}, 1));
  EXPECT_EQ(one.last().amount, 6);
  for (int i = 0; i < 2; ++i) one.ask(3, request(9, StoreCall::Get, {"later"}));
  one.ask(3, request(10, StoreCall::Set, {"later", "x"}));
  EXPECT_EQ(one.answers.size(), 5U) << "a Get that is repeated is answered once";
}

// Two copies of a request may take different ways through the tree.
TEST(StoreKeeper, UndoesNoLaterRequestForARepeatedOne) {
  Keeper one;
  const auto first = request(1, StoreCall::Set, {"k", "old"});
  const auto erase = request(3, StoreCall::Erase, {"k"});
  one.ask(3, first);
  one.ask(3, request(2, StoreCall::Set, {"k", "new"}));
  one.ask(3, first);
  one.ask(4, request(1, StoreCall::Get, {"k"}));
  EXPECT_EQ(one.last().texts.at(0), "new");
  one.ask(3, erase);
  one.ask(4, request(2, StoreCall::Set, {"k", "of another rank"}));
  one.ask(3, erase);
  EXPECT_EQ(one.last().amount, 1) << "the answer is that of the first time";
  one.ask(4, request(3, StoreCall::Check, {"k"}));
  EXPECT_EQ(one.last().amount, 1);
}

// The undefined-behaviour sanitizer sees an addition that overflows.
TEST(StoreKeeper, WrapsAroundPastTheLargestNumber) {
  constexpr std::int64_t kMost = std::numeric_limits<std::int64_t>::max();
  Keeper one;
  one.ask(3, request(1, StoreCall::Add, {"n"}, kMost));
  one.ask(3, request(2, StoreCall::Add, {"n"}, 1));
  EXPECT_EQ(one.last().amount, std::numeric_limits<std::int64_t>::min());
}

TEST(StoreKeeper, ComparesAsC10dDoes) {
  Keeper one;
  one.ask(0, request(1, StoreCall::CompareSet, {"k", "x", "y"}));
  EXPECT_EQ(one.last().texts.at(0), "x") << "a missing key gives back what was expected";
  one.ask(0, request(2, StoreCall::CompareSet, {"k", "", "y"}));
  EXPECT_EQ(one.last().texts.at(0), "y");
  one.ask(0, request(3, StoreCall::CompareSet, {"k", "z", "w"}));
  EXPECT_EQ(one.last().texts.at(0), "y");
  one.ask(0, request(4, StoreCall::Erase, {"k"}));
  EXPECT_EQ(one.last().amount, 1);
  one.ask(0, request(5, StoreCall::Check, {"k"}));
  EXPECT_EQ(one.last().amount, 0);
}

TEST(StoreKeeper, RefusesARequestWithTooFewTexts) {
  Keeper one;
  one.ask(0, request(1, StoreCall::Set, {"k"}));
  EXPECT_TRUE(one.last().is_refused);
  EXPECT_EQ(one.last().texts.at(0), "the request has 1 texts, not 2");
}

TEST(StoreMessage, IsTheSameAfterItWasSent) {
  const StoreMessage sent{9, StoreCall::CompareSet, true, -3, {"key", "", std::string(1000, 'x')}};
  const auto read = decode_store_message(encode(sent));
  ASSERT_TRUE(read);
  EXPECT_EQ(read->number, sent.number);
  EXPECT_EQ(read->call, sent.call);
  EXPECT_EQ(read->is_refused, sent.is_refused);
  EXPECT_EQ(read->amount, sent.amount);
  EXPECT_EQ(read->texts, sent.texts);
}

TEST(StoreMessage, IsRefusedIfItIsCutOrLonger) {
  const std::string whole = encode(StoreMessage{9, StoreCall::Set, false, 0, {"key", "value"}});
  for (std::size_t size = 0; size < whole.size(); ++size)
    EXPECT_FALSE(decode_store_message(whole.substr(0, size))) << size;
  EXPECT_FALSE(decode_store_message(whole + "x"));
  std::string many = whole;
  many.replace(16, 4, "\xff\xff\xff\xff");  // the number of texts
  EXPECT_FALSE(decode_store_message(many));
}

}  // namespace
}  // namespace weft::group
