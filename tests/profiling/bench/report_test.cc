#include <array>
#include <cstdlib>
#include <fstream>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <weft/profiling/bench/report.h>
#include <weft/tests/harness/folder.h>

namespace weft::bench {
namespace {

Report report_of(std::string only, std::string option = "--case") {
  std::string program = "a_bench";
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

TEST(Report, ARowIsInTheFileWhenItIsThere) {
  const harness::Folder folder;
  const std::string file = folder.path() + "/rows.json";
  std::ofstream(file) << "of another run\n";
  Report report = report_of(file, "--json");
  report.add({.name = "one", .peer = "weft", .bytes = 8, .metric = "time", .unit = "us", .p50 = 1.5, .p99 = 2, .runs = 3});
  std::ifstream written(file);
  std::string first, more;
  std::getline(written, first);
  EXPECT_FALSE(std::getline(written, more));
  EXPECT_EQ(
      first,
      R"({"bench":"a","case":"one","peer":"weft","bytes":8,"metric":"time","unit":"us","p50":1.5,"p99":2.0,"runs":3})");
  EXPECT_EQ(report.finish(), 0);
}

TEST(Report, AFileThatCannotBeWrittenEndsTheBenchAtTheFirstRow) {
  Report report = report_of("/nowhere/rows.json", "--json");
  EXPECT_EXIT(report.add({.name = "one", .peer = "weft"}), testing::ExitedWithCode(1),
              "a_bench: cannot write /nowhere/rows.json");
}

}  // namespace
}  // namespace weft::bench
