// SPDX-License-Identifier: Apache-2.0
// Runs the claims about MPI under mpirun, with two ranks and with four.
#include <array>
#include <cstdio>
#include <cstdlib>
#include <regex>
#include <string>

#include <gtest/gtest.h>
#include <sys/wait.h>

#include <weft/tests/harness/folder.h>
#include <weft/transport/registry.h>

namespace weft::conformance {
namespace {

struct Outcome {
  int code = -1;
  std::string out;
};

Outcome run(const std::string& command) {
  Outcome outcome;
  FILE* const pipe = ::popen((command + " 2>&1").c_str(), "r");
  if (pipe == nullptr) return outcome;
  std::array<char, 4096> buffer{};
  while (const std::size_t count = std::fread(buffer.data(), 1, buffer.size(), pipe))
    outcome.out.append(buffer.data(), count);
  const int status = ::pclose(pipe);
  outcome.code = WIFEXITED(status) ? WEXITSTATUS(status) : -1;
  return outcome;
}

class Mpi : public testing::TestWithParam<int> {
 protected:
  void SetUp() override {
    const Outcome version = run("mpirun --version");
    if (version.code != 0) GTEST_SKIP() << "no mpirun: install openmpi-bin";
    if (version.out.find("Open MPI") == std::string::npos)
      GTEST_SKIP() << "mpirun is not Open MPI's: " << version.out;
  }
};

// `options` are further options of mpirun, `filter` selects the ranks' tests.
Outcome run_ranks(int ranks, const std::string& options, const std::string& filter) {
  const harness::Folder folder;
  return run(
      "OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1 mpirun --oversubscribe --timeout "
      "170 -n " +
      std::to_string(ranks) + " -x WEFT_TEST_FOLDER=" + folder.path() + options + " " +
      WEFT_MPI_RANKS + " --gtest_brief=1 '--gtest_filter=" + filter + "'");
}

void expect_claims(int ranks, const std::string& options, const std::string& filter) {
  const Outcome outcome = run_ranks(ranks, options, filter);
  EXPECT_EQ(outcome.code, 0) << outcome.out;
  // Every rank ran all of them.
  std::size_t passed = 0;
  for (std::size_t at = outcome.out.find("[  PASSED  ]"); at != std::string::npos;
       at = outcome.out.find("[  PASSED  ]", at + 1)) {
    ++passed;
  }
  EXPECT_EQ(passed, static_cast<std::size_t>(ranks)) << outcome.out;
  EXPECT_FALSE(std::regex_search(outcome.out, std::regex("[^0-9]0 tests from"))) << outcome.out;
}

constexpr const char* kAll = "*-*SingleThread*:MpiFaults.*";

TEST_P(Mpi, PassesTheClaimsUnderMpirun) { expect_claims(GetParam(), "", kAll); }
INSTANTIATE_TEST_SUITE_P(Ranks, Mpi, testing::Values(2, 4));

// As in a program that uses MPI itself: MPI_THREAD_SERIALIZED is 2, MPI_THREAD_SINGLE is 0.
class MpiOfTheProgram : public Mpi {};
TEST_P(MpiOfTheProgram, PassesTheClaimsWithSerializedThreads) {
  expect_claims(GetParam(), " -x WEFT_TEST_MPI_LEVEL=2", kAll);
}
TEST_P(MpiOfTheProgram, IsRefusedIfInitedForASingleThread) {
  expect_claims(GetParam(), " -x WEFT_TEST_MPI_LEVEL=0", "*SingleThread*");
}
INSTANTIATE_TEST_SUITE_P(Ranks, MpiOfTheProgram, testing::Values(2));

// mpirun ends all ranks when one was killed, so no rank is left that could report it.
TEST_P(Mpi, EndsAsAWholeWhenARankIsKilled) {
  const Outcome outcome = run_ranks(GetParam(), "", "MpiFaults.RankIsKilledMidway");
  EXPECT_NE(outcome.code, 0);
  EXPECT_NE(outcome.out.find("signal 9"), std::string::npos) << outcome.out;
  EXPECT_EQ(outcome.out.find("mpirun did not end this rank"), std::string::npos) << outcome.out;
}

TEST(MpiTransport, SaysWhyItNeedsMpirun) {
  if (std::getenv("OMPI_COMM_WORLD_SIZE") != nullptr)
    GTEST_SKIP() << "this test itself runs under mpirun";
  try {
    transport::open("mpi");
    FAIL() << "it was opened";
  } catch (const Error& error) {
    EXPECT_EQ(error.blame(), Blame::Unsupported);
    EXPECT_NE(error.text().find("mpirun -n RANKS"), std::string::npos) << error.what();
  }
}

}  // namespace
}  // namespace weft::conformance
