// SPDX-License-Identifier: Apache-2.0
// Groups whose connections speak TLS. The whole program is given a certificate.
#include <csignal>
#include <functional>
#include <utility>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <torch/types.h>

#include <weft/group.h>
#include <weft/tests/harness/on_ranks.h>
#include <weft/tests/harness/tls_environment.h>
#include <weft/transport/registry.h>

namespace weft {
namespace {

using harness::As;
using harness::Setting;
using testing::HasSubstr;

harness::TlsEnvironment environment;
// Whether groups of this very process have read the environment: forked ranks cannot change it any
// more.
bool is_read = false;
constexpr const char* kIsRead = "an earlier test of this process has read the environment";

class GroupTls : public harness::OnRanks {};
INSTANTIATE_TEST_SUITE_P(, GroupTls,
                         testing::Values(Setting{As::Threads, "tcp"}, Setting{As::Threads, "weft"},
                                         Setting{As::Processes, "tcp"},
                                         Setting{As::Processes, "weft"}),
                         harness::name_of_setting);

TEST_P(GroupTls, CarriesCollectivesAndMessages) {
  is_read |= GetParam().as == As::Threads;
  for (const int ranks : {2, 3, 4}) {
    on_ranks(ranks, [](ProcessGroup& group) {
      const int size = group.size();
      for (const int elements : {1, 1'000, 1'500'000}) {
        at::Tensor sum = at::full({elements}, group.rank() + 1.0);
        group.all_reduce(sum).wait();
        EXPECT_TRUE(sum.equal(at::full({elements}, size * (size + 1) / 2.0)));
      }
      const int to = (group.rank() + 1) % size;
      const int from = (group.rank() + size - 1) % size;
      at::Tensor heard = at::zeros({700'001});
      Work receives = group.recv(heard, from);
      group.send(at::full({700'001}, group.rank() + 0.5), to).wait();
      receives.wait();
      EXPECT_TRUE(heard.equal(at::full({700'001}, from + 0.5)));
      ProcessGroup part = group.split(group.rank() % 2, group.rank());
      at::Tensor ones = at::ones({1'000});
      part.all_reduce(ones).wait();
      EXPECT_TRUE(ones.equal(at::full({1'000}, static_cast<double>(part.size()))));
      if (std::string(GetParam().backend) == "tcp") EXPECT_EQ(group.transport(to), "tcp");
      harness::meet(group);
    });
  }
}

// Joins two ranks, of which the second first changes its environment. Both must fail, and one of
// them says why: the other may hear only that it is gone. Over shm the ranks have no connections
// but those by which they watch each other.
void expect_refused(const std::function<void()>& change) {
  for (const std::string backend : {"tcp", "shm"}) {
    harness::Processes ranks(2, [&](int rank) {
      if (rank == 1) change();
      const Error error = harness::error_of([&] {
        ProcessGroup group = init_process_group(
            {.backend = backend, .timeout = std::chrono::seconds(40), .device = at::kCPU});
        at::Tensor sum = at::ones({4});
        group.all_reduce(sum).wait();
      });
      const bool is_named = error.text().find("WEFT_TLS_C") != std::string::npos;
      harness::Processes::say(is_named ? "named" : error.text());
    });
    const std::string first = ranks.next_word(0);
    const std::string second = ranks.next_word(1);
    EXPECT_TRUE(first == "named" || second == "named") << backend << ": " << first << "\n"
                                                       << second;
    ranks.expect_success();
  }
}

TEST(GroupTlsMismatch, RankWithoutTlsIsRefused) {
  if (is_read) GTEST_SKIP() << kIsRead;
  expect_refused([] {
    for (const char* const name : {"WEFT_TLS_CERT", "WEFT_TLS_KEY", "WEFT_TLS_CA"})
      ::unsetenv(name);
  });
}

TEST(GroupTlsMismatch, RankOfAnotherAuthorityIsRefused) {
  if (is_read) GTEST_SKIP() << kIsRead;
  harness::Authority other("another authority");
  expect_refused([&] { harness::set_environment(other.issue()); });
}

TEST(GroupTlsMismatch, WrongFilesFailJoining) {
  if (is_read) GTEST_SKIP() << kIsRead;
  harness::Processes ranks(1, [&](int) {
    ::setenv("WEFT_TLS_KEY", "/nowhere.key", 1);
    const Error error = harness::error_of(
        [] { init_process_group({.backend = "tcp", .rank = 0, .world_size = 1}); });
    EXPECT_EQ(error.blame(), Blame::Caller);
    EXPECT_THAT(error.text(), HasSubstr("WEFT_TLS_KEY ('/nowhere.key') cannot be used"));
  });
  ranks.expect_success();
}

TEST(GroupTlsLinks, TellADeathByName) {
  for (const int victim : {0, 3}) {
    harness::Processes ranks(4, [&](int rank) {
      ProcessGroup group = init_process_group(
          {.backend = "shm", .timeout = std::chrono::minutes(5), .device = at::kCPU});
      group.barrier().wait();
      harness::Processes::say("ready");
      while (rank == victim) ::pause();
      const Error error = harness::error_of([&] { group.all_reduce(at::ones({1'000})).wait(); });
      EXPECT_THAT(error.text(), HasSubstr("rank " + std::to_string(victim) + " is lost"));
    });
    for (int rank = 0; rank < 4; ++rank) ranks.wait_for(rank, "ready");
    ranks.signal(victim, SIGKILL);
    ranks.expect_success({victim});
  }
}

TEST(GroupTlsOverOthers, LibrariesThatDoNotEncryptSaySo) {
  try {
    static_cast<void>(transport::open("gloo"));
  } catch (const Error& error) {
    GTEST_SKIP() << error.text();
  }
  is_read = true;
  std::string said;
  harness::run_ranks(As::Threads, 2,
                     [&](ProcessGroup& group) {
                       at::Tensor sum = at::ones({4});
                       group.all_reduce(sum).wait();
                       if (group.rank() == 0) said = harness::LogWatch::current().text();
                     },
                     {.backend = "gloo"});
  static bool is_known = false;
  if (std::exchange(is_known, true)) return;
  EXPECT_THAT(said, HasSubstr("does not encrypt them, although WEFT_TLS_CERT is set"));
}

}  // namespace
}  // namespace weft
