#include <array>
#include <cstdlib>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <weft/profiling/bench/report.h>

namespace weft::bench {
namespace {

Report report_of(std::string only) {
  std::string program = "a_bench";
  std::string option = "--case";
  std::array<char*, 3> arguments{program.data(), option.data(), only.data()};
  return Report("a", static_cast<int>(arguments.size()), arguments.data(), 1);
}

TEST(Report, ACaseThatThereIsNotIsAMistake) {
  Report report = report_of("nosuchcase");
  EXPECT_FALSE(report.wants("one"));
  EXPECT_FALSE(report.wants("two"));
  testing::internal::CaptureStderr();
  EXPECT_EQ(report.finish(), 2);
  EXPECT_EQ(testing::internal::GetCapturedStderr(),
            "a_bench: --case: no case's name contains 'nosuchcase'; there are:\n  one\n  two\n");
}

TEST(Report, ACaseThatThereIsMayHaveNothingToShow) {
  Report report = report_of("on");
  EXPECT_TRUE(report.wants("one"));
  EXPECT_EQ(report.finish(), 0);
}

}  // namespace
}  // namespace weft::bench
