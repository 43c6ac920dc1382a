// SPDX-License-Identifier: Apache-2.0
// Tests the reports of ranks that a signal ends.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <weft/tests/engine/launch/command.h>
#include <weft/tests/harness/sanitized.h>

namespace weft::launch {
namespace {

using testing::ContainsRegex;
using testing::HasSubstr;
using testing::Not;

class CrashOfARank : public testing::Test {
 protected:
  void SetUp() override {
    if (harness::kSanitized)
      GTEST_SKIP() << "the sanitizer reports crashes, and Weft leaves its handlers alone";
  }
  // A pattern for a frame of `function`, or for any frame if the build reads no symbols.
  static std::string frame(const std::string& function) {
    return WEFT_TEST_SYMBOLS ? "#[0-9]+ " + function : "#[0-9]+ ";
  }
};

TEST_F(CrashOfARank, PrintsItsStackBeforeJoining) {
  const auto outcome = run(path_of("weft-run") + " --grace 1 " + path_of("crashing") + " main");
  EXPECT_EQ(outcome.code, 128 + 11);
  EXPECT_THAT(outcome.err, HasSubstr("[rank 0] weft: rank 0, process "));
  EXPECT_THAT(outcome.err, HasSubstr("SIGSEGV, invalid access to memory, at address 0x0"));
  EXPECT_THAT(outcome.err, ContainsRegex(frame("crashing::read_from\\(int const volatile\\*\\)")));
  EXPECT_THAT(outcome.err, ContainsRegex(frame("main.*\\(crashing\\+0x")));
}

TEST_F(CrashOfARank, PrintsStackAndDumpBelowAScript) {
  const auto outcome = run("d=$(mktemp -d); WEFT_DUMP_DIR=$d " + path_of("weft-run") +
                           " --nproc-per-node 2 --grace 5 sh -c '" + path_of("crashing") +
                           " group; exit $?'; code=$?; cat $d/*.json; rm -r $d; exit $code");
  EXPECT_EQ(outcome.code, 128 + 11) << outcome.err;
  EXPECT_THAT(
      outcome.err,
      ContainsRegex("\\[rank 1\\] weft: rank 1, process [0-9]+, crashed in thread 'crashing'"));
  EXPECT_THAT(outcome.err, ContainsRegex(frame("crashing::read_from\\(int const volatile\\*\\)")));
  EXPECT_THAT(outcome.out, HasSubstr("\"reason\":\"SIGSEGV, invalid access to memory\""));
  EXPECT_THAT(outcome.out, HasSubstr("[rank 1] rank 1 has joined"));  // printed before the crash
  EXPECT_THAT(outcome.err, Not(HasSubstr("was not written")));
}

TEST_F(CrashOfARank, StackOfSpawnNamesTheLibrary) {
  const auto outcome = run("env -u WEFT_CRASH_TRACE " + path_of("crashing") + " spawn");
  EXPECT_EQ(outcome.code, 1);
  EXPECT_THAT(outcome.err, HasSubstr("caught: rank 1 ended with signal 11 (Segmentation fault)"));
  EXPECT_THAT(outcome.err, ContainsRegex("weft: rank 1, process [0-9]+, crashed in thread "));
  EXPECT_THAT(outcome.err, ContainsRegex(frame("crashing::read_from\\(int const volatile\\*\\)")));
  EXPECT_THAT(outcome.err, ContainsRegex(frame(".*weft::.*run_rank.*\\(libweft")));
}

TEST_F(CrashOfARank, PrintsNothingWhenTurnedOff) {
  const auto outcome = run("WEFT_CRASH_TRACE=off " + path_of("crashing") + " spawn");
  EXPECT_EQ(outcome.code, 1);
  EXPECT_THAT(outcome.err, Not(HasSubstr("crashed in thread")));
  const auto launched = run("WEFT_CRASH_TRACE=off " + path_of("weft-run") + " --grace 1 " +
                            path_of("crashing") + " main");
  EXPECT_EQ(launched.code, 128 + 11);
  EXPECT_THAT(launched.err, Not(HasSubstr("crashed in thread")));
}

TEST_F(CrashOfARank, WithoutLauncherPrintsOnlyIfAsked) {
  const auto alone = run("env -u WEFT_CRASH_TRACE " + path_of("crashing") + " main");
  EXPECT_THAT(alone.err, Not(HasSubstr("crashed in thread")));
  const auto asked = run("WEFT_CRASH_TRACE=on " + path_of("crashing") + " main");
  EXPECT_THAT(asked.err, ContainsRegex("weft: process [0-9]+, crashed in thread 'crashing'"));
}

}  // namespace
}  // namespace weft::launch
