// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>

#include <weft/engine/group/ledger.h>

namespace weft::group {
namespace {

// A ledger of rank 0 in a group of job ranks 4, 5 and 6, and the frames that it has sent.
struct Fixture {
  std::vector<Frame> sent;
  Ledger ledger{"g", 0, {4, 5, 6}, [this](Frame frame) { sent.push_back(std::move(frame)); }};

  explicit Fixture(bool has_joined = true) {
    if (has_joined) ledger.on_joined();
  }

  void leaving(int job_rank, std::uint64_t collectives, const std::string& messages = "") {
    ledger.on_leaving({FrameType::Leaving, job_rank, collectives, "g", messages});
  }
  int answers() const {
    int count = 0;
    for (const Frame& frame : sent) count += frame.type == FrameType::Completed ? 1 : 0;
    return count;
  }
};

template <class F>
std::string lost(F call) {
  try {
    call();
  } catch (const Error& error) {
    return error.blame() == Blame::PeerLost ? error.text() : "another blame: " + error.text();
  }
  return "no error";
}

TEST(Ledger, AnswersALeaverAfterItsCollectives) {
  Fixture fixture;
  Ledger& ledger = fixture.ledger;
  const auto first = ledger.begin_collective();
  const auto second = ledger.begin_collective();
  fixture.leaving(5, 2);
  EXPECT_EQ(fixture.answers(), 0);
  ledger.complete_collective(second);  // out of order
  EXPECT_EQ(fixture.answers(), 0);
  ledger.complete_collective(first);
  ASSERT_EQ(fixture.answers(), 1);
  EXPECT_EQ(fixture.sent.back().number, 5u) << "the answer names the leaver by its rank in the job";
}

// Otherwise the leaver's connections would close while this rank is still joining.
TEST(Ledger, AnswersNoLeaverBeforeItHasJoined) {
  Fixture fixture(/*has_joined=*/false);
  fixture.leaving(5, 0);
  EXPECT_EQ(fixture.answers(), 0);
  fixture.ledger.on_joined();
  EXPECT_EQ(fixture.answers(), 1);
}

TEST(Ledger, AnswersALeaverAfterItsMessages) {
  Fixture fixture;
  fixture.ledger.begin_recv(1);
  fixture.ledger.begin_recv(-1);
  fixture.leaving(5, 0, "0 2 ");
  EXPECT_FALSE(fixture.ledger.left_behind()) << "both messages may still arrive";
  fixture.ledger.complete_recv(1, 1);
  EXPECT_EQ(fixture.answers(), 0);
  fixture.ledger.complete_recv(-1, 1);
  EXPECT_EQ(fixture.answers(), 1);
}

TEST(Ledger, RanksLiveUnlessLostOrLeaving) {
  Fixture fixture;
  EXPECT_EQ(fixture.ledger.living(), (std::vector<int>{0, 1, 2}));
  fixture.ledger.on_completed(5, 4);
  fixture.ledger.on_lost(7);  // not a member
  EXPECT_EQ(fixture.ledger.living(), (std::vector<int>{0, 1, 2}));
  fixture.ledger.on_lost(5);
  EXPECT_EQ(fixture.ledger.living(), (std::vector<int>{0, 2}));
  fixture.leaving(6, 0);
  EXPECT_EQ(fixture.ledger.living(), (std::vector<int>{0}));
}

TEST(Ledger, RefusesCollectivesWithALeaver) {
  Fixture fixture;
  fixture.leaving(6, 1);
  const auto number = fixture.ledger.begin_collective();  // the leaver had issued this one
  EXPECT_EQ(number, 1u);
  EXPECT_EQ(lost([&] { fixture.ledger.begin_collective(); }),
            "rank 2 left group 'g' after 1 collective; it cannot take part in #2");
}

// The others may have left because of that one.
TEST(Ledger, BlamesTheFirstLeaver) {
  Fixture fixture;
  fixture.leaving(6, 0);
  fixture.leaving(5, 0);
  EXPECT_EQ(fixture.ledger.leavers(), (std::vector<int>{2, 1}));
  const std::string first = "rank 2 left group 'g' after 0 collectives; it cannot take part in #1";
  EXPECT_EQ(lost([&] { fixture.ledger.begin_collective(); }), first);
  const auto nobody = [](int) { return false; };
  EXPECT_TRUE(
      lost([&] { fixture.ledger.throw_if_left_without(nobody); }).starts_with("rank 2 has left"));
}

TEST(Ledger, LeaverStrandsLaterCollectives) {
  Fixture fixture;
  fixture.ledger.begin_collective();
  EXPECT_FALSE(fixture.ledger.left_behind());
  fixture.leaving(5, 0);
  ASSERT_TRUE(fixture.ledger.left_behind());
  EXPECT_EQ(fixture.ledger.left_behind()->text(),
            "rank 1 left group 'g' after 0 collectives; #1 will never complete");
}

TEST(Ledger, LeaverStrandsUnsentReceives) {
  Fixture fixture;
  fixture.ledger.begin_recv(1);
  fixture.ledger.begin_recv(1);
  fixture.leaving(5, 0, "0 1 ");
  EXPECT_EQ(fixture.ledger.left_behind()->text(),
            "rank 1 has left group 'g' with fewer messages to rank 0 than it receives");
  fixture.ledger.complete_recv(1, 1);
  EXPECT_TRUE(fixture.ledger.left_behind());
  fixture.ledger.complete_recv(1, -1);  // the receive failed
  EXPECT_FALSE(fixture.ledger.left_behind());
  EXPECT_NE(lost([&] { fixture.ledger.begin_recv(1); }), "no error");
  EXPECT_NE(lost([&] { fixture.ledger.begin_send(1); }), "no error");
  fixture.ledger.begin_recv(2);
  fixture.ledger.begin_send(2);
}

// For example a message of another size: it has arrived, so its sender may leave.
TEST(Ledger, FailedReceiveAnswersTheLeaver) {
  Fixture fixture;
  fixture.ledger.begin_recv(1);
  fixture.leaving(5, 0, "0 1 ");
  EXPECT_EQ(fixture.answers(), 0);
  fixture.ledger.complete_recv(1, 1);
  EXPECT_EQ(fixture.answers(), 1);
}

TEST(Ledger, FailedSendIsNotWaitedFor) {
  Fixture fixture;
  fixture.ledger.begin_send(2);
  fixture.ledger.begin_send(2);
  fixture.ledger.fail_send(2);
  fixture.ledger.say_leaving();
  static_cast<void>(fixture.ledger.await_others([](int) { return false; }, Deadline::never()));
  ASSERT_EQ(fixture.sent.size(), 1u);
  EXPECT_EQ(fixture.sent[0].text, "2 1 ");
}

TEST(Ledger, LastLeaverStrandsAnySourceReceives) {
  Fixture fixture;
  fixture.ledger.begin_recv(-1);
  fixture.ledger.begin_recv(-1);
  fixture.leaving(5, 0, "1 4 ");
  EXPECT_FALSE(fixture.ledger.left_behind()) << "rank 2 may send";
  fixture.leaving(6, 0, "0 1 ");
  EXPECT_EQ(fixture.ledger.left_behind()->text(),
            "all other ranks have left group 'g' with fewer messages to rank 0 than it receives");
}

TEST(Ledger, NamesTheRanksThatLeft) {
  Fixture fixture;
  EXPECT_EQ(fixture.ledger.who_left(), "");
  EXPECT_TRUE(fixture.ledger.has_left(1)) << "not a member";
  EXPECT_FALSE(fixture.ledger.has_left(5));
  fixture.leaving(5, 0);
  EXPECT_TRUE(fixture.ledger.has_left(5));
  EXPECT_EQ(fixture.ledger.who_left(), "rank 1 has left group 'g'");
  fixture.leaving(6, 0);
  EXPECT_EQ(fixture.ledger.who_left(), "ranks 1, 2 have left group 'g'");
}

TEST(Ledger, LeavingWaitsForUnansweredRanks) {
  const auto all = [](int) { return true; };
  const auto nothing_left = [&](Fixture& fixture) {
    return fixture.ledger.await_others(all, Deadline::in(std::chrono::seconds(0)));
  };
  Fixture fixture;
  fixture.ledger.begin_send(2);
  fixture.ledger.say_leaving();
  EXPECT_EQ(nothing_left(fixture), (std::vector<int>{1, 2}));
  EXPECT_EQ(fixture.sent.front().type, FrameType::Leaving);
  EXPECT_EQ(fixture.sent.front().text, "2 1 ");
  fixture.ledger.on_completed(5, 4);
  EXPECT_EQ(nothing_left(fixture), std::vector<int>{2});
  fixture.ledger.on_completed(6, 5);  // answers another leaver
  EXPECT_EQ(nothing_left(fixture), std::vector<int>{2});
  fixture.ledger.on_gone(6);
  EXPECT_EQ(nothing_left(fixture), std::vector<int>{});
}

// A leaver says it again when an answer may have been lost.
TEST(Ledger, AnswersARankThatSaysAgainThatItLeaves) {
  Fixture fixture;
  fixture.leaving(5, 0);
  EXPECT_EQ(fixture.answers(), 1);
  fixture.leaving(5, 0);
  EXPECT_EQ(fixture.answers(), 2);
  EXPECT_EQ(fixture.ledger.leavers(), std::vector<int>{1});
}

}  // namespace
}  // namespace weft::group
