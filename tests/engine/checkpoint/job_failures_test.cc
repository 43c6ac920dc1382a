// SPDX-License-Identifier: Apache-2.0
// Checkpoints of an RPC job of which a worker dies, or has no room: the saver learns which, and
// there is the old checkpoint or the new one, whole.
#include <csignal>
#include <cstdint>
#include <set>
#include <string>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sched.h>
#include <sys/mount.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include <torch/serialize.h>

#include <weft/checkpoint.h>
#include <weft/engine/group/collective_error.h>
#include <weft/rpc.h>
#include <weft/tests/engine/checkpoint/checkpoints.h>
#include <weft/tests/engine/rpc/workers.h>
#include <weft/tests/harness/all_settings.h>
#include <weft/tests/harness/folder.h>
#include <weft/tests/harness/killed_anywhen.h>

namespace job_failures {

at::Tensor made(std::int64_t elements, double value) { return torch::full({elements}, value); }
void set_all(at::Tensor& tensor, double value) { tensor.fill_(value); }
// The value that all elements have; -1 if they differ.
double value_of(at::Tensor& tensor) {
  const auto first = tensor[0].item<double>();
  return tensor.eq(first).all().item<bool>() ? first : -1;
}

// This process writes files of some KiB only: its disk is full.
void allow_little() {
  ::signal(SIGXFSZ, SIG_IGN);
  const rlimit little{1 << 14, RLIM_INFINITY};
  ASSERT_EQ(::setrlimit(RLIMIT_FSIZE, &little), 0);
}
// This process has the rights of a user who may not write.
void take_rights() { ASSERT_EQ(::seteuid(65534), 0); }

// Kills its process when a load changes it: load() is called twice before, to compare.
struct Mortal {
  void save(torch::serialize::OutputArchive& archive) const {
    archive.write("value", torch::tensor(1));
  }
  void load(torch::serialize::InputArchive& archive) {
    torch::Tensor value;
    archive.read("value", value);
    if (++loads == 3) ::raise(SIGKILL);
  }
  int loads = 0;
};

}  // namespace job_failures

namespace weft::testing {
namespace {

using namespace job_failures;
using checkpoint::JobPart;
using harness::As;
using harness::error_of;
using harness::run_workers;
using ::testing::AllOf;
using ::testing::HasSubstr;

constexpr std::int64_t kSmall = 100, kMedium = 1 << 17, kLarge = 1 << 20;

class JobFailures : public ::testing::Test {
 protected:
  const harness::Folder temporary_;
  const std::string folder_ = temporary_.path() + "/run";

  // Worker 0 saves values of workers 1 and 2 twice; `change` is called between, and the second save
  // must fail, with that error. Then it loads what there is.
  void expect_old(
      As as, Blame blame, const std::vector<std::string>& sentences,
      const std::function<void(rpc::Agent&)>& change, const std::function<void()>& end = [] {}) {
    run_workers({as, as == As::Threads ? "inproc" : "shm", 3}, [&](rpc::Agent& agent) {
      if (agent.self().rank != 0) return;
      auto large = agent.remote<&made>(1, kLarge, 1.0), other = agent.remote<&made>(2, kSmall, 1.0);
      int own = 1;
      const std::vector<JobPart> parts = {{"large", large}, {"other", other}, {"own", own}};
      checkpoint::save_async(folder_, agent, parts).wait();
      change(agent);
      large.sync<&set_all>(2.0);
      other.sync<&set_all>(2.0);
      own = 2;
      const Error error = error_of([&] { checkpoint::save_async(folder_, agent, parts).wait(); });
      EXPECT_EQ(error.blame(), blame) << error.what();
      for (const std::string& sentence : sentences) EXPECT_THAT(error.text(), HasSubstr(sentence));
      end();
      EXPECT_EQ(files_in(folder_), std::set<std::string>{"1"});
      checkpoint::load(folder_, agent, parts);
      EXPECT_EQ(large.sync<&value_of>(), 1);
      EXPECT_EQ(other.sync<&value_of>(), 1);
      EXPECT_EQ(own, 1);
    });
  }
};

TEST_F(JobFailures, FullDiskOfOneOwnerKeepsTheOld) {
  expect_old(As::Processes, Blame::Busy,
             {"worker 'worker1': ", folder_ + "/2/rank00001.safetensors' cannot be written"},
             [](rpc::Agent& agent) { agent.sync<&allow_little>(1); });
}

// Three checkpoints of the large value do not fit.
TEST_F(JobFailures, FullFileSystemKeepsTheOld) {
  if (::unshare(CLONE_NEWNS) != 0 ||
      ::mount("none", "/", nullptr, MS_REC | MS_PRIVATE, nullptr) != 0 ||
      ::mount("weft", temporary_.path().c_str(), "tmpfs", 0, "size=6m") != 0)
    GTEST_SKIP() << "this process cannot mount a file system";
  expect_old(As::Threads, Blame::Busy,
             {"worker 'worker", "free some space on its disk", "No space left on device"},
             [](rpc::Agent&) {});
  ::umount(temporary_.path().c_str());
}

TEST_F(JobFailures, FolderThatOneOwnerCannotWriteIsNamed) {
  if (::geteuid() != 0) GTEST_SKIP() << "only root can give workers other rights";
  ASSERT_EQ(::chmod(temporary_.path().c_str(), 0755), 0);
  expect_old(As::Processes, Blame::Caller,
             {"worker 'worker1': ", folder_ + "/2' cannot be written"},
             [](rpc::Agent& agent) { agent.sync<&take_rights>(1); });
}

TEST_F(JobFailures, ReadOnlyFolderOfTheSaverIsNamed) {
  if (::geteuid() != 0) GTEST_SKIP() << "only root can give workers other rights";
  ASSERT_EQ(::chmod(temporary_.path().c_str(), 0755), 0);
  expect_old(
      As::Processes, Blame::Caller, {"'" + folder_ + "", "Permission denied"},
      [](rpc::Agent&) { take_rights(); }, [] { EXPECT_EQ(::seteuid(0), 0); });
}

// The others have the new values then, as load() says, and the checkpoint is there.
TEST_F(JobFailures, WorkerThatIsLostWhileValuesChangeIsNamed) {
  const auto body = [&](rpc::Agent& agent) {
    auto small = agent.remote<&made>(2, kSmall, 1.0);
    const auto mortal = agent.remote<Mortal>(1);
    int own = 1;
    const std::vector<JobPart> parts = {{"small", small}, {"mortal", mortal}, {"own", own}};
    checkpoint::save_async(folder_, agent, parts).wait();
    small.sync<&set_all>(2.0);
    own = 2;
    const Error error = error_of([&] { checkpoint::load(folder_, agent, parts); });
    EXPECT_EQ(error.blame(), Blame::PeerLost) << error.what();
    EXPECT_THAT(error.text(), HasSubstr("worker 'worker1'"));
    EXPECT_EQ(small.sync<&value_of>(), 1);
    EXPECT_EQ(own, 1);
    // A second attempt says the same, and what lives is loaded.
    EXPECT_EQ(error_of([&] { checkpoint::load(folder_, agent, parts); }).blame(), Blame::PeerLost);
    small.sync<&set_all>(3.0);
    checkpoint::load(folder_, agent, {{"small", small}, {"own", own}});
    EXPECT_EQ(small.sync<&value_of>(), 1);
    EXPECT_EQ(files_in(folder_), std::set<std::string>{"1"});
  };
  harness::Processes processes(3, [&](int rank) {
    rpc::Agent agent = rpc::init("worker" + std::to_string(rank), {.transports = {"shm"}});
    if (rank == 0) body(agent);
    const auto ended = group::error_of([&] { agent.shutdown(); });
    if (ended) EXPECT_EQ(ended->blame(), Blame::PeerLost) << ended->what();
  });
  processes.expect_success({1});
}

// Whenever the saver or an owner is killed, the old or the new checkpoint is whole.
TEST(JobKilled, OldOrNewIsWhole) {
  const int seeds = harness::runs_all_settings() ? 100 : 5;
  for (int seed = 0; seed < seeds; ++seed) {
    const harness::Folder folder;
    constexpr int kWorkers = 3;
    harness::Processes processes(kWorkers, [&](int rank) {
      rpc::Agent agent = rpc::init("worker" + std::to_string(rank), {.transports = {"shm"}});
      if (rank != 0) harness::Processes::say("ready");
      const auto save = [&] {
        auto a = agent.remote<&made>(1, kMedium, 0.0), b = agent.remote<&made>(2, kMedium, 0.0);
        torch::Tensor own = made(kMedium, 0);
        double round = 0;
        const std::vector<JobPart> parts = {{"a", a}, {"b", b}, {"own", own}, {"round", round}};
        checkpoint::save_async(folder.path(), agent, parts).wait();
        harness::Processes::say("ready");
        for (;;) {
          round += 1;
          own.fill_(round);
          a.sync<&set_all>(round);
          b.sync<&set_all>(round);
          checkpoint::save_async(folder.path(), agent, parts).wait();
        }
      };
      if (rank == 0) EXPECT_EQ(error_of(save).blame(), Blame::PeerLost);
      const auto ended = group::error_of([&] { agent.shutdown(); });
      if (ended) EXPECT_EQ(ended->blame(), Blame::PeerLost) << ended->what();
    });
    // The saver every other time.
    const int victim = seed % 2 == 0 ? 0 : 1 + seed / 2 % 2;
    harness::kill_anywhen(processes, kWorkers, victim, seed, std::chrono::milliseconds(60));
    run_workers({As::Processes, "shm", 3}, [&](rpc::Agent& agent) {
      if (agent.self().rank != 1) return;
      auto a = agent.remote<&made>(2, kMedium, -2.0), b = agent.remote<&made>(0, kMedium, -2.0);
      torch::Tensor own = made(kMedium, -2);
      double round = -1;
      const std::vector<JobPart> parts = {{"a", a}, {"b", b}, {"own", own}, {"round", round}};
      checkpoint::load(folder.path(), agent, parts);
      EXPECT_GE(round, 0);
      EXPECT_EQ(a.sync<&value_of>(), round);
      EXPECT_EQ(b.sync<&value_of>(), round);
      EXPECT_EQ(value_of(own), round);
      // The next save leaves nothing of the one that was cut off.
      checkpoint::save_async(folder.path(), agent, parts).wait();
      EXPECT_EQ(files_in(folder.path()).size(), 1U);
    });
  }
}

}  // namespace
}  // namespace weft::testing
