// SPDX-License-Identifier: Apache-2.0
// ProcessGroupOptions::secret: ranks that share it work together, and others are refused when they
// join.
#include <algorithm>
#include <atomic>
#include <memory>
#include <mutex>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/types.h>

#include <weft/engine/group/core.h>
#include <weft/engine/group/secret.h>
#include <weft/group.h>
#include <weft/tests/harness/memory_bootstrap.h>
#include <weft/tests/harness/on_ranks.h>
#include <weft/transport/registry.h>

namespace weft {
namespace {

using harness::As;
using harness::Setting;
using testing::AllOf;
using testing::AnyOf;
using testing::ElementsAre;
using testing::HasSubstr;
using testing::Not;

const std::string kSecret = "sixteen at random";
const std::string kOther = "sixteen but other";

class GroupSecret : public harness::OnRanks {};
INSTANTIATE_TEST_SUITE_P(, GroupSecret,
                         testing::Values(Setting{As::Threads, "weft"}, Setting{As::Threads, "shm"},
                                         Setting{As::Threads, "tcp"},
                                         Setting{As::Processes, "weft"},
                                         Setting{As::Processes, "tcp"}),
                         harness::name_of_setting);

TEST_P(GroupSecret, RanksThatShareItWorkTogether) {
  harness::run_ranks(GetParam().as, 3,
                     [](ProcessGroup& group) {
                       at::Tensor sum = at::full({4}, group.rank() + 1.0);
                       group.all_reduce(sum).wait();
                       EXPECT_TRUE(sum.equal(at::full({4}, 6.0)));
                       ProcessGroup part = group.split(group.rank() == 2 ? 1 : 0, group.rank());
                       if (part.size() == 1) return;
                       at::Tensor passed = at::full({2}, group.rank() + 0.0);
                       if (part.rank() == 0) part.send(passed, 1).wait();
                       if (part.rank() == 1) part.recv(passed, 0).wait();
                       EXPECT_TRUE(passed.equal(at::zeros({2})));
                     },
                     {.backend = GetParam().backend, .secret = kSecret});
}

class SecretsThatDiffer : public testing::TestWithParam<const char*> {
 protected:
  // Joins two ranks with these secrets, which must fail at once on both sides.
  static void expect_refused(const std::string& one, const std::string& other) {
    const auto store = c10::make_intrusive<c10d::HashStore>();
    std::atomic<int> named = 0;
    harness::run_threads(2, [&](int rank) {
      const Error error = harness::error_of([&] {
        init_process_group({.backend = GetParam(),
                            .rank = rank,
                            .world_size = 2,
                            .store = store,
                            .timeout = std::chrono::minutes(5),
                            .device = at::kCPU,
                            .secret = rank == 0 ? one : other});
      });
      EXPECT_THAT(error.text(), Not(HasSubstr("sixteen")));
      if (error.text().find("give all ranks the same ProcessGroupOptions::secret") !=
          std::string::npos) {
        ++named;
        EXPECT_THAT(error.blame(), AnyOf(Blame::Caller, Blame::PeerLost)) << error.what();
      } else {
        // The other rank has gone for that reason before this one has read the store. The ranks of
        // a mesh alone are both told (tests/transport/mesh/challenge_test.cc).
        EXPECT_EQ(error.blame(), Blame::PeerLost) << error.what();
        EXPECT_THAT(error.ranks(), ElementsAre(1 - rank)) << error.what();
      }
    });
    EXPECT_GE(named, 1);
  }
};
INSTANTIATE_TEST_SUITE_P(Over, SecretsThatDiffer, testing::Values("weft", "shm", "tcp"),
                         [](const auto& info) { return std::string(info.param); });

TEST_P(SecretsThatDiffer, AreNamed) { expect_refused(kSecret, kOther); }

TEST_P(SecretsThatDiffer, MissingOneIsNamed) {
  expect_refused(kSecret, "");
  expect_refused("", kSecret);
}

// A stranger has written the value into the store before the rank comes.
Error error_of_forged(const std::string& place, const std::string& key, const std::string& value) {
  const auto store = c10::make_intrusive<c10d::HashStore>();
  static_cast<c10d::Store&>(*store).set(place + key, value);
  return harness::error_of([&] {
    init_process_group({.backend = "tcp",
                        .rank = 1,
                        .world_size = 2,
                        .store = store,
                        .timeout = std::chrono::minutes(5),
                        .device = at::kCPU,
                        .secret = kSecret});
  });
}

TEST(GroupSecrets, ForgedValuesAreRefusedByName) {
  for (const auto& [place, key, value] :
       {std::tuple("0//cpu//", "mesh/table", "forged"),
        std::tuple("0//", "weft/member/0", "127.0.0.1 9 token 2 cpu:tcp"),
        std::tuple("0//", "weft/failed", "0 no memory")}) {
    const Error error = error_of_forged(place, key, value);
    EXPECT_EQ(error.blame(), Blame::Caller) << error.what();
    EXPECT_THAT(error.text(),
                AllOf(HasSubstr("'" + std::string(key) + "'"), HasSubstr("has no signature"),
                      HasSubstr("give all ranks the same "
                                "ProcessGroupOptions::secret")));
    EXPECT_THAT(error.text(), Not(HasSubstr("no memory"))) << "the stranger is believed";
    EXPECT_THAT(error.ranks(), testing::IsEmpty());
  }
}

// A rank's last failure lies in the store, where a stranger can copy it.
TEST(GroupSecrets, FailureOfAnEarlierLifeIsRefused) {
  const auto shared = c10::make_intrusive<c10d::HashStore>();
  const auto life = [&](const std::string& name) {
    group::CoreOptions options;
    options.name = "default";
    options.secret = kSecret;
    options.store = c10::make_intrusive<c10d::PrefixStore>(
        "0/", c10::make_intrusive<c10d::PrefixStore>(name, shared));
    options.own_store = options.store;
    return options;
  };
  const group::CoreOptions first = life("life2"), next = life("life3");
  group::tell_failure(first, Error(Blame::Busy, "no memory"));
  EXPECT_THAT(
      group::to_text(group::signed_store_of(life("life2")).get("weft/failed", Deadline::never())),
      HasSubstr("no memory"));
  next.store->set("weft/failed", first.store->get("weft/failed"));
  EXPECT_THAT(harness::error_of([&] {
                group::signed_store_of(next).get("weft/failed", Deadline::never());
              }).text(),
              HasSubstr("was not signed with this rank's secret"));
}

TEST(GroupSecrets, ShortOnesAreRefused) {
  for (const std::size_t bytes : {1, 15}) {
    const Error error = harness::error_of([&] {
      init_process_group({.rank = 0,
                          .world_size = 1,
                          .store = c10::make_intrusive<c10d::HashStore>(),
                          .device = at::kCPU,
                          .secret = std::string(bytes, 'x')});
    });
    EXPECT_EQ(error.blame(), Blame::Caller);
    EXPECT_THAT(error.text(), AllOf(HasSubstr("ProcessGroupOptions::secret has " +
                                              std::to_string(bytes) + " bytes"),
                                    HasSubstr("openssl rand -hex 16"), Not(HasSubstr("xx"))));
  }
  const ProcessGroup alone = init_process_group({.rank = 0,
                                                 .world_size = 1,
                                                 .store = c10::make_intrusive<c10d::HashStore>(),
                                                 .device = at::kCPU,
                                                 .secret = std::string(16, 'x')});
  EXPECT_EQ(alone.size(), 1);
}

// The lines of the log that guard() writes.
std::string said_by_guard(const std::string& backend, const std::string& address,
                          const std::string& secret) {
  std::mutex mutex;
  std::string lines;
  const log::Capture capture([&](LogLevel level, std::string_view text) {
    std::lock_guard lock(mutex);
    lines += (level == LogLevel::Warn ? "W " : "I ") + std::string(text) + "\n";
  });
  transport::JoinOptions join;
  join.size = 2;
  join.group_name = "x";
  join.interface_address = address;
  join.secret = secret;
  join.store = std::make_shared<harness::MemoryBootstrap>();
  group::guard(join, *transport::open(backend), "cpu/");
  return lines;
}

// True from the second call on: a process logs it once, so a repeated test has nothing to read.
bool is_repeated() {
  static bool is_known = false;
  return std::exchange(is_known, true);
}

TEST(GroupSecrets, LogSaysWhatIsNotKeptOut) {
  if (is_repeated()) GTEST_SKIP() << "it is said once a process";
  EXPECT_EQ(said_by_guard("tcp", "127.0.0.1", ""), "");
  EXPECT_EQ(said_by_guard("tcp", "10.1.2.3", kSecret), "");
  EXPECT_EQ(said_by_guard("weft", "10.1.2.3", kSecret), "");
  EXPECT_THAT(said_by_guard("tcp", "10.1.2.3", ""),
              AllOf(HasSubstr("W group 'x' listens on 10.1.2.3 and has neither a secret nor TLS"),
                    HasSubstr("ProcessGroupOptions::secret")));
  EXPECT_EQ(said_by_guard("shm", "10.1.2.3", ""), "");
}

TEST(GroupSecrets, BackendsThatDoNotAskForItSaySo) {
  try {
    static_cast<void>(transport::open("gloo"));
  } catch (const Error& error) {
    GTEST_SKIP() << error.text();
  }
  std::string said;
  harness::run_ranks(As::Threads, 2,
                     [&](ProcessGroup& group) {
                       at::Tensor sum = at::ones({4});
                       group.all_reduce(sum).wait();
                       EXPECT_TRUE(sum.equal(at::full({4}, 2.0)));
                       if (group.rank() == 0) said = harness::LogWatch::current().text();
                     },
                     {.backend = "gloo", .secret = kSecret});
  static bool is_known = false;
  if (std::exchange(is_known, true)) return;
  EXPECT_THAT(said, HasSubstr("the backend 'gloo' leaves connections to its library"));
  EXPECT_EQ(said_by_guard("gloo", "127.0.0.1", kSecret), "") << "it is said again";
}

// The values of backends that leave connections to a library: NCCL's id, the addresses of Gloo.
TEST(GroupSecrets, EveryBackendReadsSignedValuesOnly) {
  for (const auto& [name, make] : transport::backends()) {
    const std::string backend(name);
    std::shared_ptr<transport::Transport> opened;
    try {
      opened = transport::open(backend);
    } catch (const Error&) {
      continue;  // not on this machine
    }
    const auto store = std::make_shared<harness::MemoryBootstrap>();
    transport::JoinOptions join;
    join.size = 2;
    join.group_name = "x";
    join.secret = kSecret;
    join.store = store;
    group::guard(join, *opened, "cuda/");
    store->set("nccl_id", group::to_bytes("forged"));
    const Error error = harness::error_of([&] { join.store->get("nccl_id", Deadline::never()); });
    EXPECT_EQ(error.blame(), Blame::Caller) << backend;
    EXPECT_THAT(error.text(), HasSubstr("'nccl_id'")) << backend;
  }
}

// A stranger has erased the key by which a rank says that it runs Weft.
class ErasedKey final : public c10d::HashStore {
 public:
  bool check(const std::vector<std::string>& keys) override {
    const bool is_erased = std::ranges::any_of(keys, [](const std::string& key) {
      return key.find("weft/member/1") != std::string::npos;
    });
    return !is_erased && HashStore::check(keys);
  }
};

TEST(GroupSecrets, LaterGroupsDoNotMeetInTheJobsStore) {
  try {
    static_cast<void>(transport::open("gloo"));
  } catch (const Error& error) {
    GTEST_SKIP() << error.text();
  }
  const auto store = c10::make_intrusive<ErasedKey>();
  harness::run_threads(2, [&](int rank) {
    ProcessGroup group = init_process_group({.backend = "gloo",
                                             .rank = rank,
                                             .world_size = 2,
                                             .store = store,
                                             .device = at::kCPU,
                                             .secret = kSecret});
    EXPECT_TRUE(group::kept_by_members(group::Core::of(group).options))
        << "the ranks meet where a stranger can write";
    ProcessGroup part = group.split(0, rank);
    at::Tensor sum = at::ones({4});
    part.all_reduce(sum).wait();
    EXPECT_TRUE(sum.equal(at::full({4}, 2.0)));
  });
}

}  // namespace
}  // namespace weft
