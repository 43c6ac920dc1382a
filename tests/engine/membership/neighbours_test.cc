// SPDX-License-Identifier: Apache-2.0
// A tree of many ranks in one process. A rank whose Neighbours is destroyed without close() ends as
// one that is killed does: its sockets close.
#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <random>
#include <set>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include <gtest/gtest.h>
#include <poll.h>
#include <sys/resource.h>
#include <sys/socket.h>

#include <weft/engine/membership/majority.h>
#include <weft/engine/membership/neighbours.h>
#include <weft/engine/membership/tree.h>
#include <weft/engine/store/address.h>
#include <weft/tests/harness/all_settings.h>

namespace weft::group {
namespace {

constexpr std::chrono::seconds kLimit{120};

// The news that one rank has heard.
struct Heard {
  std::mutex mutex;
  std::map<int, int> leaving;    // how often, by rank
  std::map<int, int> completed;  // the same
  std::vector<int> lost, left;   // in order
};

class Tree {
 public:
  explicit Tree(int size, std::string secret = {}, int loops = 4)
      : size_(size), secret_(std::move(secret)), heard_(static_cast<std::size_t>(size)) {
    for (int i = 0; i < loops; ++i) loops_.push_back(std::make_shared<EventLoop>("tree"));
    for (int rank = 0; rank < size; ++rank) add(rank);
    for (int rank = 0; rank < size; ++rank) connect(rank);
    until([&] { return all([](const Neighbours& one) { return one.is_placed(); }); });
    until([&] {
      return all([&](const Neighbours& one) {
        return one.known().addresses().size() == static_cast<std::size_t>(size_);
      });
    });
  }
  ~Tree() {
    until([&] { return leaving_ == 0; });
    for (int rank = 0; rank < size_; ++rank) kill(rank);
    for (const auto& loop : loops_) finish(*loop);
  }

  Heard& heard(int rank) { return heard_[static_cast<std::size_t>(rank)]; }
  const Published& address(int rank) const { return addresses_[static_cast<std::size_t>(rank)]; }
  EventLoop& loop_of(int rank) { return *loops_[static_cast<std::size_t>(rank) % loops_.size()]; }
  void send(int rank, Frame frame) {
    on(rank, [frame](Neighbours& one) { one.send(frame); });
  }
  // Runs the task on the rank's loop, if it lives, without waiting for it.
  void on(int rank, std::function<void(Neighbours&)> task) {
    loop_of(rank).post([one = ranks_[static_cast<std::size_t>(rank)], task = std::move(task)] {
      if (const auto alive = one.lock()) task(*alive);
    });
  }
  void kill(int rank) {
    loop_of(rank).post(
        [owner = std::exchange(owners_[static_cast<std::size_t>(rank)], nullptr)] {});
    dead_.insert(rank);
  }
  void leave(int rank) {
    ++leaving_;
    on(rank, [this](Neighbours& one) {
      one.leave(kLimit, [this](bool in_order) {
        if (!in_order) ++out_of_order_;
        --leaving_;
      });
    });
    kill(rank);  // it lives until it has left
  }
  std::vector<int> living() const {
    std::vector<int> ranks;
    for (int rank = 0; rank < size_; ++rank)
      if (!dead_.contains(rank)) ranks.push_back(rank);
    return ranks;
  }
  bool lives(int rank) const { return !dead_.contains(rank); }
  // True if it holds for all living ranks. Asks each on its loop.
  bool all(const std::function<bool(const Neighbours&)>& holds) {
    std::atomic<int> asked{0}, agree{0};
    int expected = 0;
    for (const int rank : living()) {
      ++expected;
      loop_of(rank).post([&, one = ranks_[static_cast<std::size_t>(rank)]] {
        const auto alive = one.lock();
        if (alive && holds(*alive)) ++agree;
        ++asked;
      });
    }
    while (asked < expected) std::this_thread::yield();
    return agree == expected;
  }
  // The ranks that one rank has noted as lost, sorted, once it has that many.
  void expect_lost(const std::vector<int>& ranks) {
    until([&] {
      return all([&](const Neighbours& one) { return one.known().lost().size() >= ranks.size(); });
    });
    for (const int rank : living()) {
      const std::lock_guard lock(heard(rank).mutex);
      auto lost = heard(rank).lost;
      std::sort(lost.begin(), lost.end());
      EXPECT_EQ(lost, ranks) << "as rank " << rank << " has heard";
    }
  }
  // Waits until all ranks that leave have left, and all their neighbours have noticed it.
  void expect_all_left() {
    until([&] { return leaving_ == 0; });
    EXPECT_EQ(out_of_order_, 0);
  }
  void until(const std::function<bool()>& done) {
    const auto end = Deadline::in(kLimit);
    while (!done()) {
      ASSERT_FALSE(end.passed());
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
  }

 private:
  static void finish(EventLoop& loop) {
    std::atomic<bool> done{false};
    loop.post([&] { done = true; });
    loop.drive([&] { return done.load(); });
  }
  void add(int rank) {
    Descriptor listening(::socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0));
    const SocketAddress any = socket_address("127.0.0.1", 0);
    ASSERT_EQ(::bind(listening.get(), any.get(), any.length), 0);
    ASSERT_EQ(::listen(listening.get(), 1024), 0);
    const Published own{"127.0.0.1", port_of(listening.get()), "token" + std::to_string(rank),
                        size_};
    addresses_.push_back(own);
    const auto loop = loops_[static_cast<std::size_t>(rank) % loops_.size()];
    const auto made = std::make_shared<Neighbours>(
        loop, rank, own, std::move(listening), secret_,
        Neighbours::Events{[this, rank](const Frame& frame) { hear(rank, frame); }, [] {}});
    owners_.push_back(made);
    ranks_.push_back(made);
    on(rank, [](Neighbours& one) { one.start(); });
  }
  void connect(int rank) {
    const int parent = static_parent(rank);
    if (rank > 0) {
      on(rank, [=, there = addresses_[static_cast<std::size_t>(parent)]](Neighbours& one) {
        one.adopt_parent(parent, there, dial_socket(there));
      });
    }
    on(rank, [](Neighbours& one) { one.settle({}); });
  }
  void hear(int rank, const Frame& frame) {
    Heard& one = heard(rank);
    const std::lock_guard lock(one.mutex);
    switch (frame.type) {
      case FrameType::Leaving: ++one.leaving[frame.rank]; break;
      case FrameType::Completed: ++one.completed[frame.rank]; break;
      case FrameType::Lost: one.lost.push_back(frame.rank); break;
      case FrameType::Goodbye: one.left.push_back(frame.rank); break;
      default: break;
    }
  }

  const int size_;
  const std::string secret_;
  std::vector<Heard> heard_;
  std::vector<std::shared_ptr<EventLoop>> loops_;
  std::vector<Published> addresses_;
  std::vector<std::shared_ptr<Neighbours>> owners_;
  std::vector<std::weak_ptr<Neighbours>> ranks_;
  std::set<int> dead_;
  std::atomic<int> leaving_{0}, out_of_order_{0};
};

Frame leaving() { return {FrameType::Leaving, 0, 0, "group", "0"}; }
Frame completed(int to) {
  return {FrameType::Completed, 0, static_cast<std::uint64_t>(to), "group", ""};
}

// Lets this process have as many descriptors as it may.
void raise_descriptors() {
  rlimit limit{};
  ::getrlimit(RLIMIT_NOFILE, &limit);
  limit.rlim_cur = limit.rlim_max;
  ::setrlimit(RLIMIT_NOFILE, &limit);
}

// Each living rank sends one frame to all, which arrives once, and others to the next.
void expect_talk(Tree& tree) {
  const auto ranks = tree.living();
  for (const int rank : ranks) {
    const std::lock_guard lock(tree.heard(rank).mutex);
    tree.heard(rank).leaving.clear();
    tree.heard(rank).completed.clear();
  }
  const auto count = ranks.size();
  for (std::size_t i = 0; i < count; ++i) tree.send(ranks[i], leaving());
  for (std::size_t i = 0; i < count; ++i) {
    Heard& heard = tree.heard(ranks[i]);
    const int before = ranks[(i + count - 1) % count];
    // A frame for one rank may be lost while ranks look for new parents, so it is repeated.
    tree.until([&] {
      tree.send(before, completed(ranks[i]));
      const std::lock_guard lock(heard.mutex);
      return heard.leaving.size() + 1 >= count && !heard.completed.empty();
    });
    const std::lock_guard lock(heard.mutex);
    ASSERT_EQ(heard.completed.size(), 1U);
    EXPECT_EQ(heard.completed.begin()->first, before);
    for (const auto& [rank, times] : heard.leaving) EXPECT_EQ(times, 1) << rank;
  }
}

TEST(TreeOfRanks, AFrameReachesEachRankOnce) {
  Tree tree(64);
  expect_talk(tree);
}

TEST(TreeOfRanks, RanksProveThatTheyKnowTheSecret) {
  Tree tree(30, "sixteen at random");
  expect_talk(tree);
  tree.kill(0);
  tree.expect_lost({0});
  expect_talk(tree);
}

TEST(TreeOfRanks, EachDeathIsKnownToAll) {
  Tree tree(64);
  std::vector<int> lost;
  for (const int victim : {63, 5, 0, 1, 2, 30}) {  // leaves, inner ranks, and roots
    tree.kill(victim);
    lost.push_back(victim);
    std::sort(lost.begin(), lost.end());
    tree.expect_lost(lost);
    expect_talk(tree);
  }
}

// A rank between the two hears of one from each side of the gap.
TEST(TreeOfRanks, DeathsAtOneMomentAreKnownToAll) {
  Tree tree(80);
  for (const int victim : {0, 1, 9, 2}) tree.kill(victim);
  tree.expect_lost({0, 1, 2, 9});
  expect_talk(tree);
}

// The children of a rank that has died connect to the root behind strangers that say nothing.
TEST(TreeOfRanks, SilentStrangersKeepNoRankOut) {
  constexpr std::size_t kRanks = 30, kMany = kRanks + kMaxStrangers + 100;
  raise_descriptors();
  Tree tree(kRanks);
  std::vector<Descriptor> strangers;
  while (strangers.size() < kMany) {
    strangers.push_back(dial_socket(tree.address(0)));
    pollfd connected{strangers.back().get(), POLLOUT, 0};
    ASSERT_EQ(::poll(&connected, 1, -1), 1);
  }
  tree.kill(1);
  tree.expect_lost({1});
  expect_talk(tree);
}

// A rank whose parent has died, and which dies before it has another, is nobody's child.
TEST(TreeOfRanks, DeathOfAParentAndItsChildrenIsKnownToAll) {
  Tree tree(64);
  const std::vector<int> victims{0, 1, 2, 9, 10, 11, 12, 13, 14, 15, 16};
  for (const int victim : victims) tree.kill(victim);
  tree.expect_lost(victims);
  expect_talk(tree);
}

TEST(TreeOfRanks, GoesOnWhenTheRootLeaves) {
  Tree tree(30);
  for (const int root : {0, 1}) {
    tree.leave(root);
    tree.until([&] {
      return tree.all([&](const Neighbours& one) { return one.known().left().contains(root); });
    });
  }
  tree.kill(4);
  tree.expect_lost({4});
  expect_talk(tree);
}

// Lets the ranks leave at one moment, in that order, and waits until all others know it.
void leave_together(Tree& tree, const std::vector<int>& leavers) {
  for (const int rank : leavers) tree.leave(rank);
  tree.until([&] {
    return tree.all([&](const Neighbours& one) {
      const auto& known = one.known();
      return std::all_of(leavers.begin(), leavers.end(), [&](int rank) {
        return known.left().contains(rank) || known.lost().contains(rank);
      });
    });
  });
  tree.expect_all_left();
}

// Their goodbyes pass through ranks that are leaving too.
TEST(TreeOfRanks, RanksThatLeaveTogetherAreNotTakenForLost) {
  std::vector<int> leavers{1, 9, 73};  // each is the parent of the next
  do {
    Tree tree(80);
    leave_together(tree, leavers);
    for (const int rank : tree.living()) {
      const std::lock_guard lock(tree.heard(rank).mutex);
      EXPECT_EQ(tree.heard(rank).left.size(), 3U) << "as rank " << rank << " has heard";
      EXPECT_EQ(tree.heard(rank).lost, std::vector<int>()) << "as rank " << rank << " has heard";
    }
    expect_talk(tree);
  } while (std::next_permutation(leavers.begin(), leavers.end()));
}

// Where the root and most others leave, a rank may take one of them for lost that it could not
// reach any more, but nobody who stays.
TEST(TreeOfRanks, MostRanksMayLeaveTogetherInAnyOrder) {
  const auto seed = std::random_device()();
  std::mt19937 random(seed);
  SCOPED_TRACE("seed " + std::to_string(seed));
  for (int round = 0; round < 5; ++round) {
    Tree tree(40);
    std::vector<int> leavers = tree.living();
    std::shuffle(leavers.begin(), leavers.end(), random);
    leavers.resize(37);
    leave_together(tree, leavers);
    for (const int rank : tree.living()) {
      const std::lock_guard lock(tree.heard(rank).mutex);
      for (const int lost : tree.heard(rank).lost)
        EXPECT_FALSE(tree.lives(lost)) << lost << " as rank " << rank << " has heard";
    }
    expect_talk(tree);
  }
}

TEST(TreeOfRanks, AllRanksMayLeaveTogether) {
  Tree tree(100);
  for (const int rank : tree.living()) tree.leave(rank);
  tree.expect_all_left();
}

TEST(TreeOfRanks, SurvivesDeathsAtRandomMoments) {
  const auto seed = std::random_device()();
  std::mt19937 random(seed);
  SCOPED_TRACE("seed " + std::to_string(seed));
  Tree tree(40);
  std::vector<int> lost;
  for (int i = 0; i < 30; ++i) {
    const auto living = tree.living();
    const int victim = living[random() % living.size()];
    for (const int rank : living) tree.send(rank, leaving());
    tree.kill(victim);
    lost.push_back(victim);
  }
  std::sort(lost.begin(), lost.end());
  tree.expect_lost(lost);
  expect_talk(tree);
}

TEST(TreeOfRanks, HoldsAThousandRanks) {
  if (!harness::runs_all_settings()) GTEST_SKIP() << "./dev test --all runs this";
  raise_descriptors();
  Tree tree(1024);
  expect_talk(tree);
  std::vector<int> lost;
  for (const int victim : {1000, 70, 0, 1}) {
    const auto start = std::chrono::steady_clock::now();
    tree.kill(victim);
    lost.push_back(victim);
    std::sort(lost.begin(), lost.end());
    tree.expect_lost(lost);
    const std::chrono::duration<double, std::milli> time = std::chrono::steady_clock::now() - start;
    std::printf("the death of rank %d was known to all after %.0f ms\n", victim, time.count());
  }
  expect_talk(tree);
}

TEST(TreeOfRanks, ARankHasAtMostNineNeighbours) {
  for (int size : {2, 9, 10, 64, 1024}) {
    std::vector<int> links(static_cast<std::size_t>(size), 0);
    const auto all = [](int) { return true; };
    for (int rank = 0; rank < size; ++rank) {
      const int parent = parent_of(rank, all);
      ASSERT_EQ(parent, rank == 0 ? -1 : static_parent(rank));
      if (rank == 0) continue;
      ++links[static_cast<std::size_t>(rank)];
      ++links[static_cast<std::size_t>(parent)];
    }
    EXPECT_LE(*std::max_element(links.begin(), links.end()), kChildren + 1);
  }
}

TEST(TreeOfRanks, ALivingAncestorOrTheLowestRankIsTheParent) {
  const std::set<int> dead{0, 1, 9};
  const auto present = [&](int rank) { return !dead.contains(rank); };
  EXPECT_EQ(parent_of(2, present), -1);
  EXPECT_EQ(parent_of(3, present), 2);
  EXPECT_EQ(parent_of(10, present), 2);  // 10's ancestors are 1 and 0
  EXPECT_EQ(parent_of(17, present), 2);
  EXPECT_EQ(parent_of(73, present), 2);  // 73's are 9, 1 and 0
  EXPECT_EQ(parent_of(25, present), 3);
}

TEST(Majority, IsMoreThanHalfOrHalfWithTheLowest) {
  constexpr auto kHere = Sight::Here, kEnded = Sight::Ended, kCut = Sight::Cut;
  EXPECT_TRUE(has_majority({kHere, kHere, kHere}));
  EXPECT_TRUE(has_majority({kHere, kHere, kCut}));
  EXPECT_FALSE(has_majority({kCut, kCut, kHere}));
  EXPECT_TRUE(has_majority({kHere, kCut, kCut, kHere}));
  EXPECT_FALSE(has_majority({kCut, kHere, kHere, kCut}));
  // Ranks that have ended do not count. Of the other two, rank 1 is the lower.
  EXPECT_TRUE(has_majority({kEnded, kHere, kCut, kEnded}));
  EXPECT_FALSE(has_majority({kEnded, kCut, kHere, kEnded}));
  EXPECT_TRUE(has_majority({kEnded, kEnded, kHere}));
}

}  // namespace
}  // namespace weft::group
