// SPDX-License-Identifier: Apache-2.0
#include <array>
#include <cstdlib>
#include <fstream>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <weft/profiling/bench/report.h>
#include <weft/tests/harness/folder.h>

namespace weft::bench {
namespace {

Report report_of(std::string only, std::string option = "--case", bool takes_before = true) {
  std::string program = "a_bench";
  std::array<char*, 3> arguments{program.data(), option.data(), only.data()};
  return Report("a", static_cast<int>(arguments.size()), arguments.data(), 1, takes_before);
}

TEST(Report, UnknownCaseIsAnError) {
  Report report = report_of("nosuchcase");
  EXPECT_FALSE(report.wants("one"));
  EXPECT_FALSE(report.wants("two"));
  testing::internal::CaptureStderr();
  EXPECT_EQ(report.finish(), 2);
  EXPECT_EQ(testing::internal::GetCapturedStderr(),
            "a_bench: --case: no case's name contains 'nosuchcase'; there are:\n  one\n  two\n");
}

TEST(Report, KnownCaseMayHaveNoRows) {
  Report report = report_of("on");
  EXPECT_TRUE(report.wants("one"));
  EXPECT_EQ(report.finish(), 0);
}

TEST(Report, RowIsInTheFileAtOnce) {
  const harness::Folder folder;
  const std::string file = folder.path() + "/rows.json";
  std::ofstream(file) << "of another run\n";
  Report report = report_of(file, "--json");
  report.add({.name = "one",
              .peer = "weft",
              .bytes = 8,
              .metric = "time",
              .unit = "us",
              .p50 = 1.5,
              .p99 = 2,
              .runs = 3});
  std::ifstream written(file);
  std::string first, more;
  std::getline(written, first);
  EXPECT_FALSE(std::getline(written, more));
  EXPECT_EQ(first,
            R"({"bench":"a","case":"one","peer":"weft","bytes":8,"metric":"time","unit":"us",)"
            R"("p50":1.5,"p99":2.0,"runs":3})");
  EXPECT_EQ(report.finish(), 0);
}

TEST(Report, UnwritableFileEndsTheBench) {
  Report report = report_of("/nowhere/rows.json", "--json");
  EXPECT_EXIT(report.add({.name = "one", .peer = "weft"}), testing::ExitedWithCode(1),
              "a_bench: cannot write /nowhere/rows.json");
}

Row row_of(const char* peer, double p50, double spread = 0) {
  return {.name = "one",
          .peer = peer,
          .bytes = 8,
          .metric = "time",
          .unit = "us",
          .p50 = p50,
          .p99 = p50,
          .runs = 3,
          .spread = spread};
}

TEST(Report, NamesRowsSlowerThanBefore) {
  Report report = report_of("/bin/sh", "--before");
  testing::internal::CaptureStdout();
  report.add(row_of("weft shm", 107));
  report.add(row_of("weft shm before", 100, 0.03));
  report.add(row_of("weft tcp", 107));
  report.add(row_of("weft tcp before", 100, 0.04));  // within twice the spread
  report.add(row_of("gloo", 200));                   // of this build only
  EXPECT_EQ(report.finish(), 0);
  EXPECT_THAT(
      testing::internal::GetCapturedStdout(),
      testing::AllOf(
          testing::HasSubstr("weft shm is 0.93 x"), testing::HasSubstr("weft tcp is 0.93 x"),
          testing::HasSubstr("# 1 of 2 rows are slower than before"),
          testing::HasSubstr(
              "# one, weft shm: 1.07 times as slow as before, whose rounds differ by 3 %\n"),
          testing::Not(testing::HasSubstr("weft tcp: "))));
}

TEST(Report, RefusesAnUnusableEarlierBuild) {
  EXPECT_EXIT(
      report_of("/nowhere/a_bench", "--before"), testing::ExitedWithCode(2),
      "a_bench: --before: '/nowhere/a_bench' is not a program; name the a_bench of another build");
}

TEST(Report, RefusesBeforeWhereItIsUnsupported) {
  EXPECT_EXIT(report_of("/bin/sh", "--before", false), testing::ExitedWithCode(2),
              "usage: a_bench .*\\[--runs N\\]\n$");
}

TEST(Samples, SpreadIsBetweenRoundMedians) {
  Samples samples;
  EXPECT_EQ(samples.spread(), 0);
  for (const double value : {9, 10, 11}) samples.add(value);
  samples.end_round();
  EXPECT_EQ(samples.spread(), 0);
  for (const double value : {10, 12, 14}) samples.add(value);
  samples.end_round();
  EXPECT_DOUBLE_EQ(samples.spread(), 2.0 / samples.quantile(0.5));
}

}  // namespace
}  // namespace weft::bench
