// SPDX-License-Identifier: Apache-2.0
// Tests nodes that meet, each on its own thread, at one store.
#include <atomic>
#include <future>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <weft/engine/launch/rendezvous.h>
#include <weft/tests/harness/no_more_threads.h>

namespace weft::launch {
namespace {

using std::chrono::milliseconds;
using testing::HasSubstr;
using News = Rendezvous::News;

Rendezvous::Settings settings(int least, int most, int restarts = 0) {
  Rendezvous::Settings made;
  made.limits = {.least = least, .most = most, .restarts = restarts};
  made.join_timeout = std::chrono::seconds(30);
  made.last_call_timeout = milliseconds(0);
  made.keep_alive_interval = milliseconds(50);
  made.keep_alive_max_attempt = 40;
  made.monitor_interval = milliseconds(1);
  return made;
}

class Nodes : public testing::Test {
 protected:
  using Place = std::optional<Rendezvous::Assignment>;

  std::unique_ptr<Rendezvous> make(const std::string& id, const Rendezvous::Settings& how,
                                   int ranks = 2) {
    return std::make_unique<Rendezvous>(store, how,
                                        Node{.id = id, .address = "10.0.0." + id, .ranks = ranks});
  }
  static std::future<Place> join(Rendezvous& node, int port) {
    return std::async(std::launch::async, [&node, port] {
      return node.join(
          port, [] { return true; }, [](const std::string&) {});
    });
  }
  // Blocks until a node has joined, so that it is the first.
  void wait_for_the_first() {
    for (const Deadline deadline = Deadline::in(std::chrono::seconds(30)); store->get().empty();) {
      ASSERT_FALSE(deadline.passed()) << "no node has come";
      std::this_thread::sleep_for(milliseconds(1));
    }
  }
  static News next_news(Rendezvous& node) {
    for (const Deadline deadline = Deadline::in(std::chrono::seconds(30)); !deadline.passed();) {
      if (const News news = node.look(); news != News::None) return news;
      std::this_thread::sleep_for(milliseconds(1));
    }
    return News::None;
  }

  std::shared_ptr<SharedStore> store = std::make_shared<LocalStore>();
};

TEST_F(Nodes, LackOfAHeartbeatThreadIsBusy) {
  const harness::NoMoreThreads no_more;
  if (harness::can_make_threads())
    GTEST_SKIP() << "this system, or this sanitizer, makes threads with stacks of any size";
  try {
    make("1", settings(2, 2));
    ADD_FAILURE() << "not refused, though the others would take the node for lost";
  } catch (const Error& error) {
    EXPECT_EQ(error.blame(), Blame::Busy) << error.what();
    EXPECT_THAT(error.text(), HasSubstr("ulimit -u"));
  }
}

TEST_F(Nodes, AgreeOnRanksAndMaster) {
  const auto a = make("1", settings(2, 2), 2), b = make("2", settings(2, 2), 3);
  auto first = join(*a, 1001);
  wait_for_the_first();
  const Place two = join(*b, 1002).get(), one = first.get();
  ASSERT_TRUE(one && two);
  EXPECT_EQ(one->node_rank, 0);
  EXPECT_EQ(two->node_rank, 1);
  EXPECT_EQ(one->first_rank, 0);
  EXPECT_EQ(two->first_rank, 2);
  for (const Place& place : {one, two}) {
    EXPECT_EQ(place->world_size, 5);
    EXPECT_EQ(place->nodes, 2);
    EXPECT_EQ(place->master_address, "10.0.0.1");
    EXPECT_EQ(place->master_port, 1001);
  }
  EXPECT_EQ(a->look(), News::None);
}

TEST_F(Nodes, OneFailureRestartsAll) {
  const auto a = make("1", settings(2, 2, 1)), b = make("2", settings(2, 2, 1));
  auto one = join(*a, 1001), two = join(*b, 1002);
  ASSERT_TRUE(one.get() && two.get());
  EXPECT_TRUE(b->failed("rank 3 failed", 7));
  EXPECT_EQ(next_news(*a), News::NextRound);
  one = join(*a, 1003), two = join(*b, 1004);
  const Place again = one.get();
  ASSERT_TRUE(again && two.get());
  EXPECT_EQ(again->round, 1);
  EXPECT_EQ(again->restarts, 1);
  EXPECT_EQ(again->cause, "rank 3 failed");
  EXPECT_FALSE(a->failed("rank 0 failed", 9)) << "no restart is left";
  EXPECT_EQ(next_news(*b), News::End);
  EXPECT_EQ(*b->end(), (JobEnd{9, "rank 0 failed"}));
}

TEST_F(Nodes, OnlyOneFailureOfARoundCounts) {
  const auto a = make("1", settings(2, 2, 9)), b = make("2", settings(2, 2, 9));
  auto one = join(*a, 1001), two = join(*b, 1002);
  ASSERT_TRUE(one.get() && two.get());
  EXPECT_TRUE(a->failed("rank 0 failed", 1));
  EXPECT_TRUE(b->failed("rank 2 lost rank 0", 1));
  one = join(*a, 1001), two = join(*b, 1002);
  const Place again = two.get();
  ASSERT_TRUE(again && one.get());
  EXPECT_EQ(again->round, 1);
  EXPECT_EQ(again->restarts, 1);
  EXPECT_EQ(again->cause, "rank 0 failed");
}

TEST_F(Nodes, JobEndsWhenAllAreDone) {
  const auto a = make("1", settings(2, 2)), b = make("2", settings(2, 2));
  auto one = join(*a, 1001), two = join(*b, 1002);
  ASSERT_TRUE(one.get() && two.get());
  a->finished();
  EXPECT_EQ(a->look(), News::None);
  b->finished();
  EXPECT_EQ(next_news(*a), News::End);
  EXPECT_EQ(next_news(*b), News::End);
  EXPECT_EQ(a->end()->code, 0);
  a->leave([] { return true; });
  b->leave([] { return true; });
}

TEST_F(Nodes, NewNodeIsTakenIn) {
  const auto a = make("1", settings(1, 2)), b = make("2", settings(1, 2));
  const Place alone = join(*a, 1001).get();
  ASSERT_TRUE(alone);
  EXPECT_EQ(alone->nodes, 1);
  auto two = join(*b, 1002);
  EXPECT_EQ(next_news(*a), News::NextRound);
  const Place both = join(*a, 1003).get();
  ASSERT_TRUE(both && two.get());
  EXPECT_EQ(both->nodes, 2);
  EXPECT_EQ(both->node_rank, 0);
  EXPECT_EQ(both->restarts, 0);
  EXPECT_EQ(both->cause, "a node has come");
}

TEST_F(Nodes, NodeWithoutHeartbeatIsLost) {
  const auto a = make("1", settings(1, 2));
  auto one = join(*a, 1001);
  ASSERT_TRUE(one.get());
  {
    const auto b = make("2", settings(1, 2));
    auto two = join(*b, 1002);
    EXPECT_EQ(next_news(*a), News::NextRound);
    one = join(*a, 1001);
    ASSERT_TRUE(one.get() && two.get());
  }  // it sends no more heartbeats, and has not left
  EXPECT_EQ(next_news(*a), News::NextRound);
  const Place alone = join(*a, 1003).get();
  ASSERT_TRUE(alone);
  EXPECT_EQ(alone->nodes, 1);
  EXPECT_EQ(alone->cause, "the node at 10.0.0.2 is lost");
}

TEST_F(Nodes, LeavingNodeIsNotWaitedFor) {
  const auto a = make("1", settings(1, 2)), b = make("2", settings(1, 2));
  auto one = join(*a, 1001);
  ASSERT_TRUE(one.get());
  auto two = join(*b, 1002);
  EXPECT_EQ(next_news(*a), News::NextRound);
  one = join(*a, 1001);
  ASSERT_TRUE(one.get() && two.get());
  b->leave([] { return true; });
  EXPECT_EQ(next_news(*a), News::NextRound);
  EXPECT_EQ(join(*a, 1003).get()->cause, "the node at 10.0.0.2 has left");
}

TEST_F(Nodes, OtherLimitsErrorNamesBoth) {
  const auto first = make("1", settings(2, 3, 1));
  auto job = join(*first, 1001);
  wait_for_the_first();
  const auto refused = [&](const Rendezvous::Settings& how) {
    const auto node = make("2", how);
    try {
      join(*node, 1002).get();
    } catch (const Error& error) {
      EXPECT_EQ(error.blame(), Blame::Caller);
      return error.text();
    }
    return std::string("not refused");
  };
  EXPECT_THAT(refused(settings(3, 3, 1)),
              HasSubstr("started with --nnodes 3, and the job at this rendezvous with "
                        "--nnodes 2:3; start all its nodes with the same"));
  EXPECT_THAT(refused(settings(2, 4, 1)), HasSubstr("started with --nnodes 2:4, and"));
  EXPECT_THAT(
      refused(settings(2, 3, 0)),
      HasSubstr("started with --max-restarts 0 (the default), and the job at this rendezvous with "
                "--max-restarts 1;"));
  const auto like = make("3", settings(2, 3, 1));
  const Place place = join(*like, 1003).get();
  ASSERT_TRUE(place && job.get());
  EXPECT_EQ(place->nodes, 2);  // the refused nodes are not waited for
}

TEST_F(Nodes, TooFewAreATimeout) {
  auto how = settings(2, 3);
  how.join_timeout = milliseconds(100);
  const auto a = make("1", how);
  std::vector<std::string> told;
  try {
    a->join(
        1001, [] { return true; }, [&](const std::string& whom) { told.push_back(whom); });
    FAIL() << "a round runs";
  } catch (const Error& error) {
    EXPECT_EQ(error.blame(), Blame::Timeout);
    EXPECT_THAT(error.text(), HasSubstr("1 of 2 to 3 nodes have come"));
  }
  EXPECT_THAT(told, testing::ElementsAre("1 of 2 to 3 nodes have come"));
}

TEST_F(Nodes, WaitingNodeReportsAndAdvises) {
  auto how = settings(2, 3);
  how.wait_reports = {milliseconds(100)};
  const auto a = make("1", how);
  std::vector<std::string> told;
  const auto place = a->join(
      1001, [&] { return told.size() < 2; },
      [&](const std::string& whom) { told.push_back(whom); });
  EXPECT_FALSE(place);
  ASSERT_EQ(told.size(), 2u);
  EXPECT_EQ(told.front(), "1 of 2 to 3 nodes have come");
  EXPECT_THAT(
      told.back(),
      HasSubstr(" ms, 1 of 2 to 3 nodes have come; start weft-run with the same --nnodes and "
                "--rdzv-endpoint on the other machines"));
}

// A store at which another node's change always comes first.
class NeverTheFastest final : public SharedStore {
 public:
  std::string get() override { return encode(others_); }
  std::string compare_set(const std::string& /*expected*/,
                          const std::string& /*desired*/) override {
    if (++tries > 1000) throw Error(Blame::PeerLost, "too many tries");
    others_.waiting = {std::to_string(tries)};
    return get();
  }
  void beat(const std::string& /*id*/) override {}
  std::vector<std::int64_t> beats(const std::vector<std::string>& ids) override {
    return std::vector<std::int64_t>(ids.size());
  }
  bool is_hosted_here() const override { return false; }

  std::atomic<int> tries{0};

 private:
  RendezvousState others_;
};

TEST_F(Nodes, SlowNodeBacksOffUntilItsDeadline) {
  const auto crowded = std::make_shared<NeverTheFastest>();
  store = crowded;
  auto how = settings(2, 3);
  how.join_timeout = milliseconds(100);
  const auto a = make("1", how);
  try {
    join(*a, 1001).get();
    FAIL() << "a round runs";
  } catch (const Error& error) {
    EXPECT_EQ(error.blame(), Blame::Timeout) << error.what();
    EXPECT_THAT(error.text(), HasSubstr("join_timeout"));
  }
  EXPECT_LT(crowded->tries, 100);
}

TEST_F(Nodes, JoiningCanBeAbandoned) {
  const auto a = make("1", settings(2, 2));
  std::atomic<int> asked{0};
  EXPECT_FALSE(a->join(
      1001, [&] { return ++asked < 3; }, [](const std::string&) {}));
  EXPECT_FALSE(a->end());
}

TEST_F(Nodes, LateNodeLearnsThatTheJobHasEnded) {
  const auto a = make("1", settings(1, 2)), b = make("2", settings(1, 2));
  ASSERT_TRUE(join(*a, 1001).get());
  EXPECT_FALSE(a->failed("rank 0 failed", 5));
  EXPECT_FALSE(join(*b, 1002).get());
  EXPECT_EQ(b->end()->code, 5);
}

}  // namespace
}  // namespace weft::launch
