// SPDX-License-Identifier: Apache-2.0
// The fault matrix for communicators over connections (docs/faults.md): rank 1 is a process that is
// killed or stopped while it joins, while large reductions run, or while it is idle. Rank 0 notices
// within its timeout, its error names rank 1, and every later operation fails at once.
#include <csignal>
#include <filesystem>
#include <future>

#include <gmock/gmock.h>

#include <weft/tests/conformance/connection/child.h>
#include <weft/tests/conformance/connection/connection_pair.h>
#include <weft/tests/conformance/connection/leaving.h>
#include <weft/tests/harness/file_bootstrap.h>
#include <weft/tests/harness/mail.h>
#include <weft/transport/registry.h>

namespace weft::conformance {
namespace {

using harness::failure_of;
using std::chrono::milliseconds;
using transport::Communicator;

// A backend that does not leave the process is left out: there is no process to kill.
std::vector<std::string> joining_backends() {
  auto names = connecting_backends();
  std::erase_if(names,
                [](const std::string& name) { return why_within_the_process(name).has_value(); });
  names.emplace_back("weft");  // it has connections of these
  return names;
}

class CommunicatorFaults : public testing::TestWithParam<std::string> {
 protected:
  CommunicatorFaults() : folder_(std::filesystem::temp_directory_path() / "weft-faults-XXXXXX") {
    if (::mkdtemp(folder_.data()) == nullptr)
      throw Error(Blame::Busy, "no folder for the ranks' store");
  }
  ~CommunicatorFaults() override {
    other_.reset();
    std::filesystem::remove_all(folder_);
  }

  std::shared_ptr<Communicator> join(int rank, const std::shared_ptr<EventLoop>& loop,
                                     milliseconds timeout,
                                     std::shared_ptr<transport::Bootstrap> store = nullptr) const {
    if (!store) store = std::make_shared<harness::FileBootstrap>(folder_);
    return transport::open(GetParam())
        ->join({.rank = rank,
                .size = 2,
                .group_name = "faults",
                .store = std::move(store),
                .timeout = timeout,
                .loop = loop});
  }

  // Forks rank 1, which joins and then runs `body`. Call it before this process makes threads.
  void start(const std::function<void(Communicator&, Child&)>& body) {
    other_ = std::make_unique<Child>([&](Child& self) {
      const auto loop = std::make_shared<EventLoop>("rank 1");
      const auto communicator = join(1, loop, std::chrono::minutes(1));
      body(*communicator, self);
      static_cast<void>(self.hear());
    });
  }

  static Op all_reduce(Communicator& communicator, std::vector<float>& numbers) {
    const Slice slice{numbers.data(), numbers.size() * sizeof(float), Device::host()};
    return communicator.all_reduce({slice, Dtype::Float32}, ReduceOp::Sum, {}, {});
  }

  static Op broadcast_of(int root, Communicator& communicator, std::vector<float>& numbers) {
    const Slice slice{numbers.data(), numbers.size() * sizeof(float), Device::host()};
    return communicator.broadcast({slice, Dtype::Float32}, root, {}, {});
  }

  static void expect_broken(Communicator& communicator, const Error& why, Blame blame) {
    EXPECT_EQ(why.blame(), blame) << why.what();
    EXPECT_THAT(why.text(), testing::HasSubstr("rank 1"));
    std::vector<float> numbers(10);
    EXPECT_EQ(failure_of(all_reduce(communicator, numbers)).blame(), blame);
    EXPECT_EQ(failure_of(communicator.barrier({})).blame(), blame);
  }

  std::string folder_;
  std::unique_ptr<Child> other_;
};

// Returns once everything posted to the loop before this call has run.
void turn_of(EventLoop& loop) {
  std::atomic<bool> is_over{false};
  loop.post([&] { is_over = true; });
  EXPECT_TRUE(loop.drive([&] { return is_over.load(); }, harness::patience()));
}

void reduce_for_ever(Communicator& communicator, Child&) {
  std::vector<float> numbers(4 << 20, 1.0F);
  const Slice slice{numbers.data(), numbers.size() * sizeof(float), Device::host()};
  for (bool goes_on = true; goes_on;) {
    const Op op = communicator.all_reduce({slice, Dtype::Float32}, ReduceOp::Max, {}, {});
    goes_on = op.done().synchronize(harness::patience()) && !op.error();
  }
}

TEST_P(CommunicatorFaults, JoiningNamesAKilledRank) {
  other_ =
      std::make_unique<Child>([](Child& self) { static_cast<void>(self.hear()); });  // never joins
  other_->kill();
  const auto loop = std::make_shared<EventLoop>("rank 0");
  try {
    join(0, loop, milliseconds(300));
    ADD_FAILURE() << "joined without rank 1";
  } catch (const Error& error) {
    EXPECT_TRUE(error.blame() == Blame::Timeout || error.blame() == Blame::PeerLost)
        << error.what();
    EXPECT_THAT(error.text(), testing::HasSubstr("rank 1"));
  }
}

// Rank 0's store. When rank 0 publishes its address, this waits until rank 1 has published its own,
// and then stops rank 1.
class StoppingStore final : public harness::FileBootstrap {
 public:
  StoppingStore(const std::string& folder, Child& rank_1)
      : FileBootstrap(folder), rank_1_(rank_1) {}
  void set(const std::string& key, const Bytes& value) override {
    if (key == "mesh/address/0") {
      get("mesh/address/1", harness::patience());
      rank_1_.signal(SIGSTOP);
    }
    FileBootstrap::set(key, value);
  }

 private:
  Child& rank_1_;
};

TEST_P(CommunicatorFaults, JoiningNamesAStoppedRank) {
  start([](Communicator&, Child&) {});
  const auto loop = std::make_shared<EventLoop>("rank 0");
  try {
    join(0, loop, milliseconds(700), std::make_shared<StoppingStore>(folder_, *other_));
    ADD_FAILURE() << "joined with a rank that is stopped";
  } catch (const Error& error) {
    EXPECT_EQ(error.blame(), Blame::Timeout) << error.what();
    EXPECT_THAT(error.text(), testing::HasSubstr("rank 1"));
  }
}

TEST_P(CommunicatorFaults, RankStoppedIdleTimesOutNextOperation) {
  start([](Communicator&, Child&) {});
  const auto loop = std::make_shared<EventLoop>("rank 0");
  const auto communicator = join(0, loop, std::chrono::seconds(2));
  other_->signal(SIGSTOP);
  std::vector<float> numbers(10);
  expect_broken(*communicator, failure_of(all_reduce(*communicator, numbers)), Blame::Timeout);
}

TEST_P(CommunicatorFaults, LeavingDoesNotWaitForAStoppedRank) {
  start([](Communicator& communicator, Child& self) {
    self.say("joined");
    static_cast<void>(self.hear());
    const Error why = failure_of(communicator.barrier({}));
    EXPECT_EQ(why.blame(), Blame::PeerLost) << why.what();
    EXPECT_THAT(why.text(), testing::HasSubstr("rank 0"));
  });
  const auto loop = std::make_shared<EventLoop>("rank 0");
  auto communicator = join(0, loop, std::chrono::minutes(1));
  EXPECT_EQ(other_->hear(), "joined");
  other_->signal(SIGSTOP);
  const auto left = std::async(std::launch::async, [&] { communicator.reset(); });
  ASSERT_EQ(left.wait_for(std::chrono::seconds(20)), std::future_status::ready)
      << "leaving waits for a stopped rank";
  other_->signal(SIGCONT);
  other_->say("go on");
  other_->say("enough");
  other_->expect_success();
}

TEST_P(CommunicatorFaults, FinishedWorkSurvivesAKilledLeaver) {
  other_ = std::make_unique<Child>([&](Child& self) {
    const auto loop = std::make_shared<EventLoop>("rank 1");
    auto communicator = join(1, loop, std::chrono::minutes(1));
    std::vector<float> numbers(10'000, 7);
    harness::expect_good(broadcast_of(1, *communicator, numbers));
    communicator.reset();
    self.say("left");
    static_cast<void>(self.hear());
  });
  const auto loop = std::make_shared<EventLoop>("rank 0");
  const auto communicator = join(0, loop, std::chrono::minutes(1));
  std::vector<float> numbers(10'000);
  const Op broadcast = broadcast_of(1, *communicator, numbers);
  EXPECT_EQ(other_->hear(), "left");
  other_->kill();
  harness::expect_good(broadcast);
  EXPECT_EQ(numbers, std::vector<float>(10'000, 7));
  expect_broken(*communicator, failure_of(all_reduce(*communicator, numbers)), Blame::PeerLost);
}

// Broadcasts of 80 MiB in all; the other rank enters them only when told to.
TEST_P(CommunicatorFaults, FasterRankIsHeldBackWithoutLoss) {
  constexpr int kRounds = 10;
  constexpr std::size_t kElements = 2 << 20;
  start([](Communicator& communicator, Child& self) {
    static_cast<void>(self.hear());
    std::vector<float> numbers(kElements);
    for (int round = 0; round < kRounds; ++round) {
      harness::expect_good(broadcast_of(0, communicator, numbers));
      EXPECT_EQ(numbers, std::vector<float>(kElements, static_cast<float>(round))) << round;
    }
  });
  const auto loop = std::make_shared<EventLoop>("rank 0");
  const auto communicator = join(0, loop, std::chrono::minutes(1));
  std::vector<std::vector<float>> sent;
  std::vector<Op> ops;
  for (int round = 0; round < kRounds; ++round)
    sent.emplace_back(kElements, static_cast<float>(round));
  for (auto& numbers : sent) ops.push_back(broadcast_of(0, *communicator, numbers));
  for (int turn = 0; turn < 100; ++turn) turn_of(*loop);
  EXPECT_FALSE(ops.back().ended())
      << "80 MiB were buffered though the other rank has taken none of it";
  other_->say("now");
  for (const Op& op : ops) harness::expect_good(op);
  other_->say("enough");
  other_->expect_success();
}

TEST_P(CommunicatorFaults, RankKilledMidReductionFailsIt) {
  start(reduce_for_ever);
  const auto loop = std::make_shared<EventLoop>("rank 0");
  const auto communicator = join(0, loop, std::chrono::minutes(1));
  std::vector<float> numbers(4 << 20, 1.0F);
  const Slice slice{numbers.data(), numbers.size() * sizeof(float), Device::host()};
  const auto reduce = [&] {
    return communicator->all_reduce({slice, Dtype::Float32}, ReduceOp::Max, {}, {});
  };
  for (int i = 0; i < 3; ++i) harness::expect_good(reduce());
  const Op hit = reduce();
  other_->kill();
  // The reduction that was under way may have ended just before.
  static_cast<void>(hit.done().synchronize(harness::patience()));
  expect_broken(*communicator, hit.error() ? *hit.error() : failure_of(reduce()), Blame::PeerLost);
}

TEST_P(CommunicatorFaults, RankKilledWhileIdleFailsNextOperation) {
  start([](Communicator&, Child&) {});
  const auto loop = std::make_shared<EventLoop>("rank 0");
  const auto communicator = join(0, loop, std::chrono::minutes(1));
  other_->kill();
  std::vector<float> numbers(10);
  expect_broken(*communicator, failure_of(all_reduce(*communicator, numbers)), Blame::PeerLost);
}

TEST_P(CommunicatorFaults, StoppedRankIsNamedAtTheDeadline) {
  start(reduce_for_ever);
  const auto loop = std::make_shared<EventLoop>("rank 0");
  const auto communicator = join(0, loop, std::chrono::seconds(2));
  other_->signal(SIGSTOP);
  std::vector<float> numbers(4 << 20, 1.0F);
  const Slice slice{numbers.data(), numbers.size() * sizeof(float), Device::host()};
  std::optional<Error> why;
  for (int i = 0; i < 3 && !why; ++i) {  // one or two may have ended before the stop
    const Op op = communicator->all_reduce({slice, Dtype::Float32}, ReduceOp::Max, {}, {});
    ASSERT_TRUE(op.done().synchronize(harness::patience()));
    why = op.error();
  }
  ASSERT_TRUE(why);
  expect_broken(*communicator, *why, Blame::Timeout);
}

INSTANTIATE_TEST_SUITE_P(Mesh, CommunicatorFaults, testing::ValuesIn(joining_backends()),
                         [](const auto& one) { return one.param; });
GTEST_ALLOW_UNINSTANTIATED_PARAMETERIZED_TEST(CommunicatorFaults);

}  // namespace
}  // namespace weft::conformance
