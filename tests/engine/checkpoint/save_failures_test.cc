// SPDX-License-Identifier: Apache-2.0
// Saves that fail on one rank: all ranks learn the same error, and the former checkpoint is whole.
#include <csignal>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sched.h>
#include <sys/mount.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include <torch/csrc/distributed/c10d/TCPStore.hpp>

#include <weft/engine/checkpoint/folder.h>
#include <weft/tests/harness/all_settings.h>
#include <weft/tests/harness/folder.h>
#include <weft/tests/harness/killed_anywhen.h>

#include "checkpoints.h"

namespace weft::testing {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

class SaveFailures : public ::testing::Test {
 protected:
  const harness::Folder temporary_;
  const std::string folder_ = temporary_.path() + "/run";
};

// The disk of one rank is full: it may write files of some KiB only.
TEST_F(SaveFailures, FullDiskOfOneRankKeepsTheOld) {
  harness::run_ranks(harness::As::Processes, 3, [&](ProcessGroup group) {
    int round = 1;
    torch::Tensor large = torch::zeros({1 << 16});
    const std::vector<checkpoint::Part> parts = {{"round", round},
                                                 {"large", checkpoint::per_rank(large)}};
    checkpoint::save_async(folder_, group, parts).wait();
    round = 2;
    if (group.rank() == 1) {
      ::signal(SIGXFSZ, SIG_IGN);
      const rlimit little{1 << 14, RLIM_INFINITY};
      ASSERT_EQ(::setrlimit(RLIMIT_FSIZE, &little), 0);
    }
    checkpoint::Saving saving = checkpoint::save_async(folder_, group, parts);
    EXPECT_EQ(refused(group, Blame::Busy, [&] { saving.wait(); }),
              "rank 1: the checkpoint's file '" + folder_ +
                  "/2/rank00001.safetensors' cannot be written: File too large");
    checkpoint::load(folder_, group, parts);
    EXPECT_EQ(round, 1);
    // An error for which nobody waits is logged.
    harness::LogWatch::current().allow("rank 1: the checkpoint's file");
    { const auto dropped = checkpoint::save_async(folder_, group, parts); }
    EXPECT_THAT(harness::LogWatch::current().text(),
                HasSubstr("checkpoint::save_async: rank 1: the checkpoint's file"));
    harness::meet(group);
  });
  EXPECT_EQ(files_in(folder_), std::set<std::string>{"1"});
}

// A file system of 8 MiB, of which the checkpoints of three ranks need more.
TEST_F(SaveFailures, FullFileSystemKeepsTheOld) {
  if (::unshare(CLONE_NEWNS) != 0 ||
      ::mount("none", "/", nullptr, MS_REC | MS_PRIVATE, nullptr) != 0 ||
      ::mount("weft", temporary_.path().c_str(), "tmpfs", 0, "size=8m") != 0)
    GTEST_SKIP() << "this process cannot mount a file system";
  harness::run_ranks(harness::As::Threads, 3, [&](ProcessGroup group) {
    int round = 1;
    checkpoint::save_async(folder_, group, {{"round", round}}).wait();
    torch::Tensor large = torch::zeros({1 << 20});
    checkpoint::Saving saving = checkpoint::save_async(
        folder_, group, {{"round", round}, {"large", checkpoint::per_rank(large)}});
    EXPECT_THAT(refused(group, Blame::Busy, [&] { saving.wait(); }),
                AllOf(HasSubstr("cannot be written, free some space on its disk"),
                      HasSubstr("No space left on device")));
    round = 2;
    checkpoint::load(folder_, group, {{"round", round}});
    EXPECT_EQ(round, 1);
    harness::meet(group);
  });
  EXPECT_EQ(files_in(folder_), std::set<std::string>{"1"});
  ::umount(temporary_.path().c_str());
}

// Writes with the rights of a user who may not; root may write anywhere.
class Unprivileged {
 public:
  Unprivileged() {
    if (::geteuid() == 0) EXPECT_EQ(::seteuid(65534), 0);
  }
  ~Unprivileged() {
    if (::getuid() == 0) EXPECT_EQ(::seteuid(0), 0);
  }
  Unprivileged(const Unprivileged&) = delete;
  Unprivileged& operator=(const Unprivileged&) = delete;
};

TEST_F(SaveFailures, ReadOnlyFolderIsNamed) {
  ASSERT_EQ(::chmod(temporary_.path().c_str(), 0755), 0);
  harness::run_ranks(harness::As::Processes, 3, [&](ProcessGroup group) {
    int round = 1;
    const auto save = [&] { checkpoint::save_async(folder_, group, {{"round", round}}).wait(); };
    save();
    if (group.rank() == 0) ASSERT_EQ(::chmod(folder_.c_str(), 0555), 0);
    harness::meet(group);
    {
      const Unprivileged here;
      EXPECT_THAT(refused(group, Blame::Caller, save),
                  HasSubstr("the checkpoint's folder '" + folder_ + "/2' cannot be written"));
      EXPECT_THAT(
          refused(group, Blame::Caller, [&] { checkpoint::check_writable(folder_, group); }),
          HasSubstr("the checkpoint's folder '" + folder_ + "' cannot be written"));
    }
    round = 2;
    checkpoint::load(folder_, group, {{"round", round}});
    EXPECT_EQ(round, 1);
    harness::meet(group);
    if (group.rank() == 0) EXPECT_EQ(::chmod(folder_.c_str(), 0755), 0);
  });
  EXPECT_EQ(files_in(folder_), std::set<std::string>{"1"});
}

TEST_F(SaveFailures, FolderThatOneRankCannotWriteIsNamed) {
  if (::geteuid() != 0) GTEST_SKIP() << "only root can give ranks other rights";
  ASSERT_EQ(::chmod(temporary_.path().c_str(), 0755), 0);
  harness::run_ranks(harness::As::Processes, 3, [&](ProcessGroup group) {
    int round = 1;
    const auto save = [&] { checkpoint::save_async(folder_, group, {{"round", round}}).wait(); };
    save();
    round = 2;
    std::optional<Unprivileged> here;
    if (group.rank() == 1) here.emplace();
    EXPECT_THAT(refused(group, Blame::Caller, save),
                AllOf(HasSubstr("rank 1"), HasSubstr(folder_ + "/2' cannot be written")));
    here.reset();
    checkpoint::load(folder_, group, {{"round", round}});
    EXPECT_EQ(round, 1);
    harness::meet(group);
  });
  EXPECT_EQ(files_in(folder_), std::set<std::string>{"1"});
}

// Rank 1 is killed when it has begun to write, long before it ends.
TEST_F(SaveFailures, RankThatDiesWhileOthersWriteIsNamed) {
  constexpr int kRanks = 3;
  harness::Processes processes(kRanks, [&](int rank) {
    ProcessGroup group =
        init_process_group({.backend = "gloo", .timeout = std::chrono::seconds(20)});
    int round = 1;
    torch::Tensor own = torch::zeros({rank == 1 ? 64 << 20 : 1});
    const std::vector<checkpoint::Part> parts = {{"round", round},
                                                 {"own", checkpoint::per_rank(own)}};
    checkpoint::save_async(folder_, group, {{"round", round}}).wait();
    checkpoint::Saving saving = checkpoint::save_async(folder_, group, parts);
    if (rank == 1) ::raise(SIGKILL);
    const Error error = harness::error_of([&] { saving.wait(); });
    EXPECT_EQ(error.blame(), Blame::PeerLost) << error.what();
    EXPECT_THAT(error.text(), HasSubstr("rank 1"));
    EXPECT_EQ(error.ranks(), std::vector<int>{1});
  });
  processes.expect_success({1});
  harness::run_ranks(harness::As::Processes, 2, [&](ProcessGroup group) {
    int round = 2;
    checkpoint::load(folder_, group, {{"round", round}});
    EXPECT_EQ(round, 1);
  });
}

// A rank is stopped while it writes, until the others have given it up.
TEST_F(SaveFailures, LateRankIsNamedByAllAndByItself) {
  constexpr int kRanks = 3, late = 1;
  c10d::TCPStoreOptions options;
  options.isServer = true;
  options.port = 0;
  options.waitWorkers = false;
  const auto hosted = c10::make_intrusive<c10d::TCPStore>("127.0.0.1", options);
  options.isServer = false;
  options.port = hosted->getPort();
  harness::Processes processes(kRanks, [&](int rank) {
    ProcessGroup group =
        init_process_group({.backend = "gloo",
                            .rank = rank,
                            .world_size = kRanks,
                            .store = c10::make_intrusive<c10d::TCPStore>("127.0.0.1", options),
                            .timeout = std::chrono::seconds(5)});
    torch::Tensor own = torch::zeros({rank == late ? 64 << 20 : 1});
    checkpoint::Saving saving =
        checkpoint::save_async(folder_, group, {{"own", checkpoint::per_rank(own)}});
    if (rank == late) ::raise(SIGSTOP);
    const Error error = harness::error_of([&] { saving.wait(); });
    EXPECT_EQ(error.blame(), Blame::Timeout) << error.what();
    EXPECT_EQ(error.ranks(), std::vector<int>{late});
    EXPECT_THAT(error.text(), HasSubstr("rank " + std::to_string(late) + " has not written"));
    harness::Processes::say("told");
    harness::meet(group);
  });
  for (int rank = 0; rank < kRanks; ++rank) {
    if (rank != late) processes.wait_for(rank, "told");
  }
  processes.signal(late, SIGCONT);
  processes.expect_success();
  EXPECT_TRUE(files_in(folder_).empty());
}

// A job that was killed has left folders without a manifest.
TEST_F(SaveFailures, CutOffGivesItsSpaceToTheNextSave) {
  for (const char* const one : {"/1", "/2", "/5/of the user"})
    std::filesystem::create_directories(folder_ + one);
  put(folder_ + "/1/manifest", "whole");
  for (const char* const one : {"/1", "/2"})
    put(folder_ + one + "/rank00000.safetensors", "values");
  const checkpoint::Numbered next(folder_);
  EXPECT_EQ(next.number(), 6U);
  EXPECT_EQ(files_in(folder_), (std::set<std::string>{"1", "5", "6"}));
}

// Whenever a rank is killed, the others learn it, and the old or the new checkpoint is whole.
TEST(SaveAsyncKilled, OldOrNewIsWhole) {
  const int seeds = harness::runs_all_settings() ? 100 : 5;
  for (int seed = 0; seed < seeds; ++seed) {
    const harness::Folder folder;
    constexpr int kRanks = 3;
    const auto tensor_of = [](std::int64_t round) { return torch::full({3, 1 << 17}, round); };
    harness::Processes processes(kRanks, [&](int) {
      ProcessGroup group =
          init_process_group({.backend = "gloo", .timeout = std::chrono::seconds(20)});
      std::int64_t round = 0;
      torch::Tensor large = tensor_of(0);
      const std::vector<checkpoint::Part> parts = {{"large", checkpoint::per_rank(large)},
                                                   {"round", round}};
      checkpoint::save_async(folder.path(), group, parts).wait();
      harness::Processes::say("ready");
      const Error error = harness::error_of([&] {
        for (;;) {
          large.fill_(++round);
          checkpoint::save_async(folder.path(), group, parts).wait();
        }
      });
      EXPECT_EQ(error.blame(), Blame::PeerLost) << error.what();
    });
    harness::kill_anywhen(processes, kRanks, seed % kRanks, seed, std::chrono::milliseconds(60));
    harness::Processes after(kRanks, [&](int) {
      ProcessGroup group = init_process_group({.backend = "gloo"});
      std::int64_t round = -1;
      torch::Tensor large;
      checkpoint::load(folder.path(), group,
                       {{"large", checkpoint::per_rank(large)}, {"round", round}});
      EXPECT_GE(round, 0);
      EXPECT_TRUE(torch::equal(large, tensor_of(round))) << round;
    });
    after.expect_success();
  }
}

}  // namespace
}  // namespace weft::testing
