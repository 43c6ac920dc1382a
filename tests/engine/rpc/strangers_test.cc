// SPDX-License-Identifier: Apache-2.0
// Connections to an agent whose other ends do not say who they are.
#include <algorithm>
#include <deque>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/resource.h>

#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include <weft/base/strangers.h>
#include <weft/engine/call/records.h>
#include <weft/engine/store/store.h>
#include <weft/tests/engine/rpc/stranger.h>
#include <weft/tests/engine/rpc/workers.h>
#include <weft/tests/harness/few_descriptors.h>

namespace from_strangers {

int plus(int a, int b) { return a + b; }

}  // namespace from_strangers

namespace weft {
namespace {

using harness::Stranger;
using testing::AllOf;
using testing::Each;
using testing::HasSubstr;
using testing::SizeIs;

rpc::Agent alone() {
  return rpc::init("worker0", {.rank = 0,
                               .world_size = 1,
                               .store = c10::make_intrusive<c10d::HashStore>(),
                               .transports = {"tcp"}});
}

// A worker's connection: the agent serves its call.
void expect_served(rpc::Agent& agent, Stranger& worker) {
  worker.greet(agent, 1);
  worker.call<&from_strangers::plus>(1, rpc::MessageKind::Call, 1, 2);
  const auto said = worker.next();
  ASSERT_TRUE(said);
  EXPECT_EQ(said->head.kind, call::FrameKind::Reply);
}

class SilentOnes {
 public:
  SilentOnes(const std::vector<transport::Offer>& offers, std::size_t count) {
    for (std::size_t i = 0; i < count; ++i) {
      connections_.push_back(routes_.connect(offers, {loop_, Deadline::in(harness::kLimit)}));
      connections_.back()->receive({[](const transport::Arrival&) {},
                                    [this](const Error& why) {
                                      std::lock_guard lock(mutex_);
                                      ends_.push_back(why.text());
                                    }});
    }
  }
  ~SilentOnes() {
    for (const auto& one : connections_) one->close(Error(Blame::Cancelled, "enough"));
    loop_->drive([this] { return ends().size() == connections_.size(); });
  }
  SilentOnes(const SilentOnes&) = delete;
  SilentOnes& operator=(const SilentOnes&) = delete;

  // How connections have ended.
  std::vector<std::string> ends() {
    std::lock_guard lock(mutex_);
    return ends_;
  }
  // Waits until so many have.
  std::vector<std::string> ends(std::size_t count) {
    EXPECT_TRUE(
        loop_->drive([&] { return ends().size() >= count; }, Deadline::in(harness::kLimit)));
    return ends();
  }

 private:
  const std::shared_ptr<EventLoop> loop_ = std::make_shared<EventLoop>("silent");
  transport::Routes routes_{{"tcp"}};
  std::vector<std::shared_ptr<transport::Connection>> connections_;
  std::mutex mutex_;
  std::vector<std::string> ends_;
};

// Connections wait without a time limit until the agent has joined.
TEST(SilentStrangers, OldestOnesMakeRoomWhileAnAgentJoins) {
  constexpr int kWorldSize = 2;
  constexpr std::size_t kBeyond = 5;
  constexpr rlim_t kDescriptors = 2 * kMaxStrangers + 400;
  rlimit limit{};
  ::getrlimit(RLIMIT_NOFILE, &limit);
  limit.rlim_cur = std::max(limit.rlim_cur, std::min(limit.rlim_max, kDescriptors));
  if (limit.rlim_cur < kDescriptors || ::setrlimit(RLIMIT_NOFILE, &limit) != 0)
    GTEST_SKIP() << "this process may not have as many descriptors";
  const auto store = c10::make_intrusive<c10d::HashStore>();
  const auto join = [&](int rank) {
    return rpc::init("worker" + std::to_string(rank), {.rank = rank,
                                                       .world_size = kWorldSize,
                                                       .store = store,
                                                       .timeout = std::chrono::minutes(5),
                                                       .transports = {"tcp"}});
  };
  std::thread other([&] {
    rpc::Agent agent = join(0);
    EXPECT_EQ(agent.sync<&from_strangers::plus>(1, 1, 2), 3);
    agent.shutdown();
  });
  group::StoreBootstrap keys(c10::make_intrusive<c10d::PrefixStore>("rpc", store));
  const auto record = call::read_record(keys.get(call::slot(0), Deadline::in(harness::kLimit)));
  SilentOnes silent(call::entry_of(record).offers, kMaxStrangers + kWorldSize + kBeyond);
  auto ends = silent.ends(kBeyond);
  EXPECT_THAT(ends, AllOf(SizeIs(kBeyond), Each(HasSubstr(kTooManyStrangers))));
  rpc::Agent agent = join(1);
  EXPECT_EQ(agent.sync<&from_strangers::plus>(0, 1, 2), 3);
  agent.shutdown();
  other.join();
}

// Otherwise it would have to wait until their time for a hello is over.
TEST(SilentStrangers, KeepNoWorkerOutThatLacksADescriptor) {
  rpc::Agent agent = alone();
  constexpr std::size_t kSilent = 20;
  const auto offers = agent.shared_core()->directory().find(agent.self().rank).offers;
  SilentOnes silent(offers, kSilent);
  const auto are_taken_in = [&] {
    return agent.shared_core()->connections().inbound().size() == kSilent;
  };
  ASSERT_TRUE(harness::comes_true(are_taken_in, harness::kLimit));
  // Just as many descriptors are left as this end of a worker's connection needs.
  std::deque<Stranger> workers;
  for (int left = 0; workers.empty(); ++left) {
    const harness::FewDescriptors few(left);
    try {
      workers.emplace_back(agent, "tcp");
    } catch (const Error& error) {
      ASSERT_EQ(error.blame(), Blame::Busy) << error.what();
      continue;
    }
    expect_served(agent, workers.back());
  }
  EXPECT_THAT(silent.ends(1).front(), HasSubstr(kNoDescriptorForStrangers));
}

}  // namespace
}  // namespace weft
