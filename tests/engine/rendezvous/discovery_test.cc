// SPDX-License-Identifier: Apache-2.0
// The agreement on the processes of a rendezvous by multicast, over a scripted network: the test
// decides which datagrams are lost, doubled or late, and sets the clock.
#include <algorithm>

#include <gtest/gtest.h>

#include <weft/engine/rendezvous/discovery.h>

namespace weft::group {
namespace {

using std::chrono::milliseconds;
using Time = DiscoveryState::Time;

Announcement of(std::uint64_t nonce, int world_size, std::optional<int> rank = {},
                const std::string& group = "job") {
  Announcement announcement;
  announcement.nonce = nonce;
  announcement.world_size = world_size;
  announcement.rank = rank;
  announcement.port = static_cast<int>(1000 + nonce);
  announcement.group = group;
  return announcement;
}

std::string address_of(std::uint64_t nonce) { return "10.0.0." + std::to_string(nonce); }

// Processes that hear each other.
struct Crowd {
  Time now{};
  std::map<std::uint64_t, DiscoveryState> members;

  void come(const Announcement& announcement) {
    members.emplace(announcement.nonce, DiscoveryState(announcement, now));
  }

  // Every process announces itself and all others hear it, through the bytes of a datagram; `lost`
  // drops some.
  void round(const std::function<bool(std::uint64_t from, std::uint64_t to)>& lost = {}) {
    now += milliseconds(100);
    for (auto& [from, sender] : members) {
      const auto heard = decode(encode(sender.to_announce(now)));
      ASSERT_TRUE(heard);
      for (auto& [to, receiver] : members) {
        if (to != from && !(lost && lost(from, to))) receiver.hear(*heard, address_of(from), now);
      }
    }
  }
  bool all_decided() const {
    return std::all_of(members.begin(), members.end(),
                       [](const auto& one) { return one.second.decided(); });
  }
};

TEST(DiscoveryState, RanksFollowTheOrderOfNonces) {
  Crowd crowd;
  for (const std::uint64_t nonce : {30, 10, 20}) crowd.come(of(nonce, 3));
  for (int i = 0; i < 3; ++i) crowd.round();
  ASSERT_TRUE(crowd.all_decided());
  int rank = 0;
  for (const auto& [nonce, state] : crowd.members) {
    EXPECT_EQ(state.rank(), rank++);
    EXPECT_EQ(state.hosts(), nonce == 10);
    EXPECT_EQ(state.host_port(), 1010);
    if (nonce != 10) {
      EXPECT_EQ(state.host_address(), address_of(10));
    }
  }
}

TEST(DiscoveryState, KeepsGivenRanksAndFillsTheRest) {
  Crowd crowd;
  crowd.come(of(1, 4));
  crowd.come(of(2, 4, 0));
  crowd.come(of(3, 4, 2));
  crowd.come(of(4, 4));
  for (int i = 0; i < 3; ++i) crowd.round();
  ASSERT_TRUE(crowd.all_decided());
  EXPECT_EQ(crowd.members.at(1).rank(), 1);
  EXPECT_EQ(crowd.members.at(2).rank(), 0);
  EXPECT_EQ(crowd.members.at(3).rank(), 2);
  EXPECT_EQ(crowd.members.at(4).rank(), 3);
}

TEST(DiscoveryState, DecidesAJobOfOneAtOnce) {
  Crowd crowd;
  crowd.come(of(9, 1));
  EXPECT_TRUE(crowd.all_decided());
  EXPECT_TRUE(crowd.members.at(9).hosts());
}

TEST(DiscoveryState, WaitsForMissingProcesses) {
  Crowd crowd;
  crowd.come(of(1, 3));
  crowd.come(of(2, 3));
  for (int i = 0; i < 50; ++i) crowd.round();
  for (const auto& [nonce, state] : crowd.members) EXPECT_FALSE(state.decided());
  EXPECT_EQ(crowd.members.at(1).describe(crowd.now), "2 of 3 processes (this one, 10.0.0.2)");
}

TEST(DiscoveryState, AgreesThoughDatagramsAreLost) {
  Crowd crowd;
  for (std::uint64_t nonce = 1; nonce <= 5; ++nonce) crowd.come(of(nonce, 5));
  // Every third datagram is lost: a different one each time, and none twice in a row.
  unsigned count = 0;
  for (int i = 0; i < 12; ++i) crowd.round([&](auto, auto) { return ++count % 3 == 0; });
  ASSERT_TRUE(crowd.all_decided());
  std::set<int> ranks;
  for (const auto& [nonce, state] : crowd.members) ranks.insert(state.rank());
  EXPECT_EQ(ranks, (std::set<int>{0, 1, 2, 3, 4}));
}

TEST(DiscoveryState, FirstToDecideConvincesTheOthers) {
  Crowd crowd;
  crowd.come(of(1, 2));
  crowd.come(of(2, 2));
  crowd.round();  // 2 hears 1, and then 1 hears that 2 sees both
  EXPECT_TRUE(crowd.members.at(1).decided());
  EXPECT_FALSE(crowd.members.at(2).decided());
  crowd.round([](auto from, auto) { return from == 2; });
  EXPECT_TRUE(crowd.members.at(2).decided());
}

TEST(DiscoveryState, ForgetsSilentProcesses) {
  Crowd crowd;
  crowd.come(of(1, 3));
  crowd.come(of(2, 3));
  crowd.come(of(3, 3));
  crowd.round([](auto, auto) { return false; });
  crowd.members.erase(2);  // killed before all had seen the whole set
  crowd.now += DiscoveryState::kPatience + milliseconds(1);
  crowd.come(of(7, 3));
  for (int i = 0; i < 4; ++i) crowd.round();
  ASSERT_TRUE(crowd.all_decided());
  EXPECT_EQ(crowd.members.at(1).rank(), 0);
  EXPECT_EQ(crowd.members.at(3).rank(), 1);
  EXPECT_EQ(crowd.members.at(7).rank(), 2);
}

TEST(DiscoveryState, SeparatesJobsByName) {
  Crowd crowd;
  crowd.come(of(1, 2, 0, "a"));
  crowd.come(of(2, 2, 0, "b"));
  crowd.come(of(3, 2, 1, "a"));
  crowd.come(of(4, 2, 1, "b"));
  for (int i = 0; i < 3; ++i) crowd.round();
  ASSERT_TRUE(crowd.all_decided());
  EXPECT_EQ(crowd.members.at(3).host_address(), address_of(1));
  EXPECT_EQ(crowd.members.at(4).host_address(), address_of(2));
}

TEST(DiscoveryState, DuplicateRanksConflictOnBothSides) {
  Crowd crowd;
  crowd.come(of(1, 3, 1));
  crowd.come(of(2, 3, 1));
  crowd.round();
  for (const auto& [nonce, state] : crowd.members) {
    ASSERT_TRUE(state.conflict());
    EXPECT_EQ(state.conflict()->blame(), Blame::Caller);
    EXPECT_EQ(state.conflict()->text(), "rank 1 is given to this process and to the process at " +
                                            address_of(nonce == 1 ? 2 : 1));
  }
}

TEST(DiscoveryState, DifferentWorldSizesConflict) {
  Crowd crowd;
  crowd.come(of(1, 2));
  crowd.come(of(2, 3));
  crowd.round();
  ASSERT_TRUE(crowd.members.at(1).conflict());
  EXPECT_EQ(crowd.members.at(1).conflict()->text(),
            "the process at 10.0.0.2 gives the world size 3, this one gives 2");
}

TEST(DiscoveryState, SurplusProcessIsRefused) {
  Crowd crowd;
  crowd.come(of(1, 2));
  crowd.come(of(2, 2));
  for (int i = 0; i < 3; ++i) crowd.round();
  ASSERT_TRUE(crowd.all_decided());
  crowd.come(of(3, 2));
  crowd.round();
  ASSERT_TRUE(crowd.members.at(3).conflict());
  EXPECT_EQ(crowd.members.at(3).conflict()->text(),
            "2 other processes have joined already; this one is too many");
  EXPECT_FALSE(crowd.members.at(1).conflict());
}

TEST(Announcement, SurvivesItsDatagram) {
  Announcement sent = of(77, 8, 3, "the name of a group");
  sent.kind = AnnouncementKind::Decided;
  sent.set = 0x0123456789abcdef;
  const auto heard = decode(encode(sent));
  ASSERT_TRUE(heard);
  EXPECT_EQ(heard->kind, sent.kind);
  EXPECT_EQ(heard->nonce, sent.nonce);
  EXPECT_EQ(heard->world_size, sent.world_size);
  EXPECT_EQ(heard->rank, sent.rank);
  EXPECT_EQ(heard->port, sent.port);
  EXPECT_EQ(heard->set, sent.set);
  EXPECT_EQ(heard->group, sent.group);
  EXPECT_FALSE(decode(encode(of(77, 8)))->rank);
}

TEST(Announcement, AnyWrongFieldIsRefused) {
  const std::string good = encode(of(1, 2, 1, "job"));
  EXPECT_TRUE(decode(good));
  EXPECT_FALSE(decode(good.substr(0, good.size() - 1)));
  EXPECT_FALSE(decode(good + "x"));
  EXPECT_FALSE(decode(std::string()));
  const auto with = [&](std::size_t place, std::initializer_list<unsigned char> bytes) {
    std::string text = good;
    for (const unsigned char byte : bytes) text[place++] = static_cast<char>(byte);
    return decode(text);
  };
  EXPECT_FALSE(with(0, {0}));  // magic
  EXPECT_FALSE(with(4, {0}));  // kind
  EXPECT_FALSE(with(4, {9}));
  EXPECT_FALSE(with(5, {200}));         // length of the name
  EXPECT_FALSE(with(6, {0, 0}));        // port
  EXPECT_FALSE(with(8, {0, 0, 0, 0}));  // world size
  EXPECT_FALSE(with(8, {255, 255, 255, 255}));
  EXPECT_FALSE(with(8, {0, 0, 0, 127}));
  EXPECT_FALSE(with(12, {2, 0, 0, 0}));  // rank
  EXPECT_FALSE(with(12, {254, 255, 255, 255}));
  EXPECT_FALSE(with(16, {0, 0, 0, 0, 0, 0, 0, 0}));  // nonce
}

}  // namespace
}  // namespace weft::group
