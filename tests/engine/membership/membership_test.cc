// SPDX-License-Identifier: Apache-2.0
#include <atomic>
#include <future>
#include <optional>
#include <sstream>

#include <gtest/gtest.h>
#include <sys/resource.h>
#include <sys/time.h>

#include <torch/csrc/distributed/c10d/HashStore.hpp>

#include <weft/engine/membership/membership.h>
#include <weft/engine/store/address.h>

namespace weft::group {
namespace {

// Plays rank 1 of a job of two ranks for rank 0.
class Member {
 public:
  explicit Member(StoreBootstrap& store) {
    std::istringstream text(
        to_text(store.get("weft/member/0", Deadline::in(std::chrono::seconds(20)))));
    std::string host, token;
    int port = 0;
    text >> host >> port >> token;
    const SocketAddress there = socket_address(host, port);
    const int little = 4096;
    const timeval limit{20, 0};
    ::setsockopt(socket_.get(), SOL_SOCKET, SO_RCVBUF, &little, sizeof little);
    ::setsockopt(socket_.get(), SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof limit);
    EXPECT_EQ(::connect(socket_.get(), there.get(), there.length), 0);
    send({FrameType::Hello, 1, 0, "", token});
  }

  // Returns how many frames arrive up to the one with this number, or until no more arrive.
  int read_until(std::uint64_t number) {
    for (int frames = 0;;) {
      const auto frame = next(FrameType::Leaving);
      if (!frame) return frames;
      ++frames;
      if (frame->number == number) return frames;
    }
  }

  void send(const Frame& frame) {
    const std::string bytes = encode(frame);
    EXPECT_EQ(::send(socket_.get(), bytes.data(), bytes.size(), 0),
              static_cast<ssize_t>(bytes.size()));
  }

  // Returns the next frame of that type, or nothing if no more arrive.
  std::optional<Frame> next(FrameType type) {
    char buffer[65536];
    Frame frame;
    for (;;) {
      for (auto whole = reader_.next(frame); whole && whole.value(); whole = reader_.next(frame)) {
        if (frame.type == type) return frame;
      }
      const auto count = ::recv(socket_.get(), buffer, sizeof buffer, 0);
      if (count <= 0) return std::nullopt;
      reader_.append({buffer, static_cast<std::size_t>(count)});
    }
  }

 private:
  const Descriptor socket_{::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0)};
  FrameReader reader_{2};
};

// As when a thousand ranks leave groups at one moment while the process is busy.
TEST(Membership, KeepsFramesForASlowReader) {
  constexpr int kFrames = 300;
  const auto loop = std::make_shared<EventLoop>("membership");
  const auto store =
      std::make_shared<StoreBootstrap>(c10::make_intrusive<c10d::HashStore>(), [] {});
  const auto hub = Membership::make(0, 2, "127.0.0.1", store, loop);
  hub->publish("");
  hub->connect_early([] { return false; }, Deadline::in(std::chrono::seconds(20)));
  Member member(*store);
  for (std::uint64_t number = 1; number <= kFrames; ++number) {
    hub->send({FrameType::Leaving, 0, number, "group", std::string(kMaxFrameText / 2, ' ')});
  }
  EXPECT_EQ(member.read_until(kFrames), kFrames);
}

// The first answer may have been lost with a rank on its way, and this rank may have left the group
// since then.
TEST(Membership, AnswersALeaverOfAGroupThatThisRankHasLeft) {
  const auto loop = std::make_shared<EventLoop>("membership");
  const auto store =
      std::make_shared<StoreBootstrap>(c10::make_intrusive<c10d::HashStore>(), [] {});
  const auto hub = Membership::make(0, 2, "127.0.0.1", store, loop);
  hub->publish("");
  hub->connect_early([] { return false; }, Deadline::in(std::chrono::seconds(20)));
  hub->listen("left", {});
  hub->forget("left");
  Member member(*store);
  Frame leaving{FrameType::Leaving, 1, 0, "never seen", ""};
  leaving.sequence = 1;
  member.send(leaving);
  leaving.group = "left";
  leaving.sequence = 2;
  member.send(leaving);
  const auto answer = member.next(FrameType::Completed);
  ASSERT_TRUE(answer);
  EXPECT_EQ(answer->group, "left");
  EXPECT_EQ(answer->number, 1u);
}

TEST(Membership, GivesUpAPeerThatReadsNothing) {
  const auto loop = std::make_shared<EventLoop>("membership");
  const auto store =
      std::make_shared<StoreBootstrap>(c10::make_intrusive<c10d::HashStore>(), [] {});
  const auto hub = Membership::make(0, 2, "127.0.0.1", store, loop);
  std::promise<std::string> lost;
  Membership::Listener listener;
  listener.lost = [&](int rank, const std::string& how) {
    lost.set_value(std::to_string(rank) + ": " + how);
  };
  listener.gone = [](int) {};
  hub->listen("group", listener);
  hub->publish("");
  hub->connect_early([] { return false; }, Deadline::in(std::chrono::seconds(20)));
  const Member member(*store);
  auto told = lost.get_future();
  // The kernel's buffers hold some of the frames.
  for (int i = 0; i < 2000 && told.wait_for(std::chrono::seconds(0)) != std::future_status::ready;
       ++i) {
    hub->send({FrameType::Leaving, 0, 0, "group", std::string(kMaxFrameText, ' ')});
  }
  ASSERT_EQ(told.wait_for(std::chrono::seconds(60)), std::future_status::ready);
  EXPECT_EQ(told.get(), "1: it reads too slowly: 64 MiB of messages wait for it");
  hub->forget("group");
}

// A rank that has published its address, and whose process may end now.
class EarlyRank {
 public:
  EarlyRank(StoreBootstrap& store, int rank) {
    store.set("weft/member/" + std::to_string(rank),
              to_bytes("127.0.0.1 " + std::to_string(port_of(listening_.get())) + " token 3"));
  }
  void die() { listening_ = Descriptor(); }

 private:
  Descriptor listening_ = open_listener(AF_INET, 0);
};

class Awaiting : public testing::TestWithParam<bool> {};
INSTANTIATE_TEST_SUITE_P(, Awaiting, testing::Bool(), [](const auto& given) {
  return std::string(given.param ? "DeadSinceLong" : "DiesLater");
});

// Otherwise it would be waited for until the timeout.
TEST_P(Awaiting, RankThatDiesBeforeItConnectsIsLost) {
  const auto loop = std::make_shared<EventLoop>("membership");
  const auto store =
      std::make_shared<StoreBootstrap>(c10::make_intrusive<c10d::HashStore>(), [] {});
  EarlyRank other(*store, 1);
  if (GetParam()) other.die();
  const auto hub = Membership::make(0, 2, "127.0.0.1", store, loop);
  std::promise<std::string> lost;
  Membership::Listener listener;
  listener.lost = [&](int rank, const std::string& how) {
    lost.set_value(std::to_string(rank) + ": " + how);
  };
  hub->listen("group", listener);
  hub->publish("");
  hub->connect_early([] { return false; }, Deadline::in(std::chrono::seconds(20)));
  hub->look_for_published();
  other.die();
  auto told = lost.get_future();
  ASSERT_EQ(told.wait_for(std::chrono::seconds(60)), std::future_status::ready);
  EXPECT_EQ(told.get(), "1: its process ended before it had connected to rank 0");
  hub->forget("group");
}

// A rank closes its listening socket when it has connected. Rank 2 dies a moment later.
TEST(Membership, RankThatConnectsIsAwaitedNoMore) {
  const auto loop = std::make_shared<EventLoop>("membership");
  const auto store =
      std::make_shared<StoreBootstrap>(c10::make_intrusive<c10d::HashStore>(), [] {});
  EarlyRank connects(*store, 1), dies(*store, 2);
  const auto hub = Membership::make(0, 3, "127.0.0.1", store, loop);
  std::promise<int> lost;
  Membership::Listener listener;
  listener.lost = [&](int rank, const std::string&) { lost.set_value(rank); };
  listener.gone = [](int) {};
  hub->listen("group", listener);
  hub->publish("");
  hub->connect_early([] { return false; }, Deadline::in(std::chrono::seconds(20)));
  hub->look_for_published();
  const Member member(*store);
  connects.die();
  dies.die();
  auto told = lost.get_future();
  ASSERT_EQ(told.wait_for(std::chrono::seconds(60)), std::future_status::ready);
  EXPECT_EQ(told.get(), 2);
  hub->forget("group");
  std::atomic<bool> forgotten{false};
  loop->post([&] { forgotten = true; });
  loop->drive([&] { return forgotten.load(); });
}

TEST(Membership, IsBusyWithoutDescriptors) {
  const auto loop = std::make_shared<EventLoop>("membership");
  const auto store =
      std::make_shared<StoreBootstrap>(c10::make_intrusive<c10d::HashStore>(), [] {});
  rlimit limit{};
  ::getrlimit(RLIMIT_NOFILE, &limit);
  const rlimit none{0, limit.rlim_max};
  ::setrlimit(RLIMIT_NOFILE, &none);
  std::optional<Blame> blame;
  try {
    Membership::make(0, 2, "127.0.0.1", store, loop);
  } catch (const Error& error) {
    blame = error.blame();
  }
  ::setrlimit(RLIMIT_NOFILE, &limit);
  EXPECT_EQ(blame, Blame::Busy);
}

}  // namespace
}  // namespace weft::group
