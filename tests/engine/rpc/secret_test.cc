// SPDX-License-Identifier: Apache-2.0
// Options::secret: a peer that does not know it is refused after its first message.
#include <barrier>
#include <thread>

#include <gtest/gtest.h>

#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <torch/types.h>

#include <weft/tests/engine/rpc/stranger.h>
#include <weft/tests/engine/rpc/workers.h>

namespace guarded {

using namespace weft;

std::atomic<int> runs{0};
int plus(int a, int b) {
  ++runs;
  return a + b;
}
RRef<int> own(int value) { return RRef<int>(value); }

}  // namespace guarded

namespace weft {
namespace {

using harness::after;
using harness::As;
using harness::error_of;
using harness::run_alone;
using harness::run_workers;
using harness::Setting;
using harness::Stranger;
using transport::Nonce;
using transport::Side;
using namespace std::chrono_literals;

class Secret : public testing::TestWithParam<Setting> {};

TEST_P(Secret, WorkersThatShareItCallEachOther) {
  run_workers(
      GetParam(),
      [](rpc::Agent& agent) {
        std::vector<Future<int>> calls;  // many wait at once for the first connection's challenge
        for (int i = 0; i < 50; ++i)
          calls.push_back(agent.async<&guarded::plus>(after(agent, 1), i, 1));
        for (int i = 0; i < 50; ++i) EXPECT_EQ(calls[static_cast<std::size_t>(i)].get(), i + 1);
        const auto there = agent.sync<&guarded::own>(after(agent, 1), 4);
        EXPECT_EQ(agent.async<&guarded::plus>(after(agent, 2), there.to_here(), 1).get(), 5);
      },
      {.secret = "a long and random text"});
}

// Both workers have a secret, so only the challenge finds that they differ.
class SecretMismatch : public testing::TestWithParam<std::string> {};

TEST_P(SecretMismatch, IsACallerErrorNamingTheOption) {
  guarded::runs = 0;
  std::barrier together(3);
  run_alone({As::Threads, GetParam(), 3}, [&](rpc::Options options) {
    options.secret = *options.rank == 0 ? "one text at random" : "another at random";
    rpc::Agent agent = rpc::init("worker" + std::to_string(*options.rank), options);
    const int wrong = agent.self().rank == 0 ? 1 : 0;
    for (int again = 0; again < 2; ++again) {
      const auto error = error_of([&] { agent.sync<&guarded::plus>(wrong, 1, 2); });
      EXPECT_EQ(error.blame(), Blame::Caller) << error.what();
      EXPECT_NE(error.text().find("give all workers of the job the same rpc::Options::secret"),
                std::string::npos)
          << error.what();
    }
    EXPECT_EQ(error_of([&] { agent.remote<&guarded::own>(wrong, 1).created().get(); }).blame(),
              Blame::Caller);
    EXPECT_EQ(guarded::runs, 0) << "a call without the secret has run";
    while (agent.debug_info().calls_waiting > 0)
      std::this_thread::yield();  // the reference's end is being retried
    together.arrive_and_wait();
    agent.leave();
  });
}

INSTANTIATE_TEST_SUITE_P(Rpc, SecretMismatch, testing::Values("inproc", "shm", "tcp"),
                         [](const auto& transport) { return transport.param; });

TEST_P(Secret, MissingSecretFailsJoining) {
  run_alone(GetParam(), [](rpc::Options options) {
    if (*options.rank == 1) options.secret = "a text of only mine";
    const auto error =
        error_of([&] { rpc::init("worker" + std::to_string(*options.rank), options); });
    EXPECT_EQ(error.blame(), Blame::Caller);
    EXPECT_NE(error.text().find("worker1 (rank 1) was given a secret and"), std::string::npos)
        << error.what();
  });
}

INSTANTIATE_TEST_SUITE_P(
    Rpc, Secret,
    testing::Values(Setting{As::Threads, "inproc", 2}, Setting{As::Threads, "shm", 2},
                    Setting{As::Threads, "tcp", 2}, Setting{As::Threads, "tcp", 4},
                    Setting{As::Processes, "shm", 2}, Setting{As::Processes, "tcp", 4}),
    harness::name_of);

TEST(SecretOfAnAgent, IsEmptyOrAtLeast16Characters) {
  const auto join = [](const std::string& secret) {
    return rpc::init("worker0", {.rank = 0,
                                 .world_size = 1,
                                 .store = c10::make_intrusive<c10d::HashStore>(),
                                 .secret = secret});
  };
  for (const std::size_t characters : {1, 8, 15}) {
    const std::string secret(characters, 'x');
    const auto error = error_of([&] { join(secret); });
    EXPECT_EQ(error.blame(), Blame::Caller) << error.what();
    EXPECT_NE(
        error.text().find("rpc::Options::secret has " + std::to_string(characters) + " characters"),
        std::string::npos)
        << error.text();
    EXPECT_NE(error.text().find("openssl rand -hex 16"), std::string::npos) << error.text();
    EXPECT_EQ(error.text().find("xxx"), std::string::npos) << "the error shows the secret";
  }
  EXPECT_EQ(join(std::string(16, 'x')).sync<&guarded::plus>("worker0", 1, 2), 3);
}

TEST(SecretOfOpenJobs, MissingSecretFailsJoining) {
  const auto store = c10::make_intrusive<c10d::HashStore>();
  const auto join = [&](int rank, const std::string& secret) {
    return rpc::init("worker" + std::to_string(rank),
                     {.rank = rank, .store = store, .transports = {"inproc"}, .secret = secret});
  };
  rpc::Agent first = join(0, "sixteen and mine");
  EXPECT_EQ(error_of([&] { join(1, ""); }).blame(), Blame::Caller);
  rpc::Agent second = join(2, "sixteen and mine");
  EXPECT_EQ(second.sync<&guarded::plus>(0, 1, 2), 3);
  second.shutdown();
  first.shutdown();
}

constexpr std::string_view kPurpose = "weft rpc challenge 1";  // as docs/wire.md says
const std::string kSecret = "a secret of the agent and no stranger";

class SecretAndStrangers : public testing::TestWithParam<std::string> {
 protected:
  rpc::Agent agent = rpc::init("guarded", {.rank = 0,
                                           .world_size = 1,
                                           .store = c10::make_intrusive<c10d::HashStore>(),
                                           .transports = {GetParam()},
                                           .secret = kSecret});
  // A hello with the right token, as a worker without the secret could send it.
  auto greeting() {
    return std::tuple(call::kWireVersion, agent.shared_core()->identity().token, agent.self(),
                      agent.self(), call::Generation{0},
                      agent.shared_core()->identity().generation);
  }
};

TEST_P(SecretAndStrangers, NothingIsReadBeforeTheProof) {
  {
    Stranger stranger(agent, GetParam());
    stranger.say(call::FrameKind::Hello, greeting());
    EXPECT_TRUE(stranger.is_refused());
  }
  {
    Stranger stranger(agent, GetParam());  // bytes that no decoder accepts, and a storage
    stranger.say(call::FrameKind::Call, std::vector<at::Tensor>{at::ones({100})});
    EXPECT_TRUE(stranger.is_refused());
  }
  {
    Stranger stranger(agent, GetParam());
    stranger.challenge(transport::make_nonce());
    ASSERT_TRUE(stranger.challenge_answered()) << "the agent answers a challenge";
    stranger.say(call::FrameKind::Hello, greeting());
    EXPECT_TRUE(stranger.is_refused()) << "a hello is accepted as a proof";
  }
}

TEST_P(SecretAndStrangers, WrongProofsAreRefused) {
  for (const std::size_t bytes : {0, 1, 31, 33, 64}) {
    Stranger stranger(agent, GetParam());
    stranger.challenge(std::vector<std::byte>(bytes));
    EXPECT_TRUE(stranger.is_refused()) << "a nonce of " << bytes << " bytes";
  }
  for (const bool reflects : {false, true}) {
    Stranger stranger(agent, GetParam());
    stranger.challenge(transport::make_nonce());
    const auto answer = stranger.challenge_answered();
    ASSERT_TRUE(answer);
    ASSERT_EQ(answer->size(), 64U);
    const auto shown = reflects ? std::vector<std::byte>(answer->begin() + 32, answer->end())
                                : std::vector<std::byte>(32);
    stranger.challenge(shown);
    EXPECT_TRUE(stranger.is_refused());
  }
}

// A peer repeats a proof that was sent over another connection.
TEST_P(SecretAndStrangers, ReplayedProofIsRefused) {
  const Nonce mine = transport::make_nonce();
  transport::Proof overheard{};
  for (const bool is_replay : {false, true}) {
    Stranger stranger(agent, GetParam());
    stranger.challenge(mine);
    const auto answer = stranger.challenge_answered();
    ASSERT_TRUE(answer);
    Nonce theirs{};
    std::copy_n(answer->begin(), theirs.size(), theirs.begin());
    if (!is_replay) {
      EXPECT_TRUE(
          transport::is_same(transport::prove(kSecret, kPurpose, Side::Listener, mine, theirs),
                             std::span(*answer).subspan(32)));
      overheard = transport::prove(kSecret, kPurpose, Side::Connector, mine, theirs);
    }
    stranger.challenge(overheard);
    stranger.say(call::FrameKind::Hello, greeting());
    stranger.say(call::FrameKind::Call, std::tuple(1, 2));  // the answer is a failure
    if (is_replay) {
      EXPECT_TRUE(stranger.is_refused());
    } else {
      EXPECT_TRUE(stranger.next()) << "a peer that knows the secret is not served";
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Rpc, SecretAndStrangers, testing::Values("inproc", "shm", "tcp"),
                         [](const auto& transport) { return transport.param; });

}  // namespace
}  // namespace weft
