// SPDX-License-Identifier: Apache-2.0
// Options::secret: a peer that does not know it is refused after its first message, and so are
// values in the job's store that a process without it has written.
#include <atomic>
#include <string>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/types.h>

#include <weft/engine/call/announcements.h>
#include <weft/engine/store/store.h>
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
using testing::AllOf;
using testing::HasSubstr;
using testing::Not;
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

// Joins all workers, of which rank `odd` has the one secret and the others have the other. All must
// fail at once, with the remedy.
void expect_refused(const Setting& setting, int odd, const std::string& one,
                    const std::string& other) {
  run_alone(setting, [&](rpc::Options options) {
    options.secret = *options.rank == odd ? one : other;
    const auto error =
        error_of([&] { rpc::init("worker" + std::to_string(*options.rank), options); });
    EXPECT_EQ(error.blame(), Blame::Caller) << error.what();
    EXPECT_THAT(error.text(),
                AllOf(HasSubstr("the value of '"),
                      HasSubstr("give all workers of the job the same rpc::Options::secret"),
                      Not(HasSubstr("at random"))));
  });
}

TEST_P(Secret, DifferentSecretsFailJoining) {
  for (const int odd : {0, 1})
    expect_refused(GetParam(), odd, "one text at random", "another at random");
}

TEST_P(Secret, MissingSecretFailsJoining) {
  for (const int odd : {0, 1}) {
    expect_refused(GetParam(), odd, "one text at random", "");
    expect_refused(GetParam(), odd, "", "one text at random");
  }
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

// --- Values that a stranger writes into the job's store ---

// The part of the store in which workers that are given the store keep the job's keys.
group::StoreBootstrap keys_of(const c10::intrusive_ptr<c10d::Store>& store) {
  return group::StoreBootstrap(c10::make_intrusive<c10d::PrefixStore>("rpc", store));
}

template <class T>
transport::Bootstrap::Bytes bytes_of(const T& value) {
  const auto encoded = codec::Writer().write([&](codec::Packer& packer) { packer.pack(value); });
  const auto* begin = reinterpret_cast<const std::byte*>(encoded.body.data());
  return {begin, begin + encoded.body.size()};
}

call::WorkerRecord forged_record(call::Standing standing, call::Generation generation) {
  call::WorkerRecord record;
  record.name = "worker1";
  record.rank = 1;
  record.offers = {{"tcp", "127.0.0.1:9"}};
  record.standing = static_cast<int>(standing);
  record.generation = generation;
  record.why = "a stranger says so";
  return record;
}

void expect_names(const Error& error, const std::string& key) {
  EXPECT_EQ(error.blame(), Blame::Caller) << error.what();
  EXPECT_THAT(error.text(),
              AllOf(HasSubstr("the value of '" + key + "' in the store has no signature"),
                    HasSubstr("a process outside the job has written it"),
                    HasSubstr("give all workers of the job the same rpc::Options::secret")));
  EXPECT_THAT(error.text(), Not(HasSubstr("a stranger says so"))) << "the stranger is believed";
}

class ForgedValues : public testing::TestWithParam<std::string> {
 protected:
  // A value that workers without a secret believe.
  static transport::Bootstrap::Bytes value_of(const std::string& key) {
    if (key == "size") return group::to_bytes("0 7");
    if (key == "worker/2") return bytes_of(forged_record(call::Standing::Joined, 0));
    return group::to_bytes("a stranger says so");
  }
};

TEST_P(ForgedValues, AreRefusedByName) {
  const auto store = c10::make_intrusive<c10d::HashStore>();
  keys_of(store).set(GetParam(), value_of(GetParam()));
  // Workers read these while one of them is missing.
  const bool is_read_by_waiting = GetParam() == "worker/2" || GetParam() == "refused";
  harness::run_threads(2, [&](int rank) {
    expect_names(error_of([&] {
                   rpc::init("worker" + std::to_string(rank),
                             {.rank = rank,
                              .world_size = is_read_by_waiting ? 3 : 2,
                              .store = store,
                              .transports = {"inproc"},
                              .secret = "sixteen and mine"});
                 }),
                 GetParam());
  });
}

INSTANTIATE_TEST_SUITE_P(, ForgedValues, testing::Values("token", "size", "refused", "worker/2"),
                         [](const auto& key) {
                           return key.param == "worker/2" ? "worker" : key.param;
                         });

class ForgedNews : public testing::Test {
 protected:
  rpc::Agent join(int rank) {
    return rpc::init(
        "worker" + std::to_string(rank),
        {.rank = rank, .store = store, .transports = {"inproc"}, .secret = "sixteen and mine"});
  }
  c10::intrusive_ptr<c10d::Store> store = c10::make_intrusive<c10d::HashStore>();
};

// The workers that the stranger calls lost stay, and news behind it is heard.
TEST_F(ForgedNews, LossIsPassedOver) {
  rpc::Agent first = join(0), second = join(1);
  std::atomic<int> lost{0}, joined{0};
  first.on_worker_lost([&](const rpc::WorkerInfo&, const Error&) { ++lost; });
  first.on_worker_joined([&](const rpc::WorkerInfo& worker) { joined += worker.rank; });
  const int before = joined;
  const call::Announcement loss{static_cast<int>(call::Standing::Lost),
                                {"worker1", 1},
                                second.shared_core()->identity().generation,
                                "a stranger says so"};
  for (const int number : {3, 4})  // each of the two has announced itself
    keys_of(store).set("announcement/" + std::to_string(number), bytes_of(loss));
  rpc::Agent third = join(2);
  EXPECT_TRUE(harness::comes_true([&] { return joined >= before + 2; })) << "no news is heard";
  EXPECT_EQ(lost, 0);
  EXPECT_EQ(second.sync<&guarded::plus>(2, 1, 2), 3);
  EXPECT_EQ(first.sync<&guarded::plus>(1, 1, 2), 3);
  third.leave();
  second.leave();
  first.leave();
}

TEST_F(ForgedNews, RecordIsRefusedByName) {
  rpc::Agent first = join(0), second = join(1);
  EXPECT_EQ(first.sync<&guarded::plus>(1, 1, 2), 3);
  const auto right = keys_of(store).get("worker/1", Deadline::never());
  for (const auto standing : {call::Standing::Lost, call::Standing::Joined}) {
    keys_of(store).set("worker/1", bytes_of(forged_record(standing, 5)));
    expect_names(error_of([&] { join(2); }), "worker/1");
    expect_names(error_of([&] { first.workers(); }), "worker/1");
    EXPECT_EQ(first.sync<&guarded::plus>(1, 1, 2), 3) << "the stranger ends a connection";
  }
  keys_of(store).set("worker/1", right);
  EXPECT_EQ(join(2).sync<&guarded::plus>(1, 1, 2), 3);
  second.leave();
  first.leave();
}

// --- Strangers that connect ---

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
