// SPDX-License-Identifier: Apache-2.0
// Runs join_and_reduce below other launchers, and in one job with Python's torch.distributed.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <weft/tests/engine/launch/command.h>

namespace weft::launch {
namespace {

using testing::ElementsAre;

constexpr const char* kRank0 = "rank 0 of 2: sum 3, from the left 1";
constexpr const char* kRank1 = "rank 1 of 2: sum 3, from the left 0";

// Uses the loopback address. By default torchrun uses the host's name, which may not resolve while
// an image is built.
TEST(Torchrun, RanksJoinAndReduce) {
  const auto outcome = run(path_of("torchrun") +
                           " --no-python --standalone --local-addr 127.0.0.1 --nproc-per-node 2 " +
                           path_of("join_and_reduce"));
  EXPECT_EQ(outcome.code, 0) << outcome.err;
  EXPECT_THAT(outcome.lines(), ElementsAre(kRank0, kRank1));
}

class Mpirun : public testing::Test {
 protected:
  void SetUp() override {
    const auto version = run("mpirun --version");
    if (version.code != 0) GTEST_SKIP() << "no mpirun: install openmpi-bin";
    if (version.out.find("Open MPI") == std::string::npos)
      GTEST_SKIP() << "mpirun is not Open MPI's: " << version.out;
  }
  static Outcome start(const std::string& options) {
    return run(
        "OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1 mpirun --oversubscribe -n 2 " +
        options + " " + path_of("join_and_reduce"));
  }
};

TEST_F(Mpirun, RanksMeetWithoutAnAddress) {
  const auto outcome = start("");
  EXPECT_EQ(outcome.code, 0) << outcome.err;
  EXPECT_THAT(outcome.lines(), ElementsAre(kRank0, kRank1));
}

TEST_F(Mpirun, RanksMeetAtAGivenAddress) {
  const auto outcome = start("-x MASTER_ADDR=127.0.0.1 -x MASTER_PORT=$(( 20000 + $$ % 10000 ))");
  EXPECT_EQ(outcome.code, 0) << outcome.err;
  EXPECT_THAT(outcome.lines(), ElementsAre(kRank0, kRank1));
}

TEST_F(Mpirun, RanksUseTheMpiBackend) {
  const auto outcome = start("-x WEFT_BACKEND=mpi");
  if (outcome.err.find("no backend 'mpi' in this build") != std::string::npos)
    GTEST_SKIP() << outcome.err;
  EXPECT_EQ(outcome.code, 0) << outcome.err;
  EXPECT_THAT(outcome.lines(), ElementsAre(kRank0, kRank1)) << outcome.err;
}

// Runs one rank of each language. `python` is the rank that runs Python; rank 0 hosts the store.
Outcome mixed(int python) {
  return run(path_of("weft-run") + " --no-prefix --nproc-per-node 2 sh -c 'if [ $RANK = " +
             std::to_string(python) + " ]; then exec " + path_of("python") + " " +
             path_of("sources") + "/join_and_reduce.py; else exec env WEFT_BACKEND=gloo " +
             path_of("join_and_reduce") + "; fi'");
}

TEST(PythonAndCpp, MeetWhereCppHostsTheStore) {
  const auto outcome = mixed(1);
  EXPECT_EQ(outcome.code, 0) << outcome.err;
  EXPECT_THAT(outcome.lines(), ElementsAre(kRank0, kRank1)) << outcome.err;
}

TEST(PythonAndCpp, MeetWherePythonHostsTheStore) {
  const auto outcome = mixed(0);
  EXPECT_EQ(outcome.code, 0) << outcome.err;
  EXPECT_THAT(outcome.lines(), ElementsAre(kRank0, kRank1)) << outcome.err;
}

}  // namespace
}  // namespace weft::launch
