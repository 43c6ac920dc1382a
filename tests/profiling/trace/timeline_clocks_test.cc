// SPDX-License-Identifier: Apache-2.0
// How the times of machines with different clocks are merged.
#include <algorithm>
#include <map>
#include <set>

#include <weft/profiling/trace/merge.h>
#include <weft/profiling/trace/operation.h>
#include <weft/tests/profiling/trace/timeline_of_children.h>

namespace weft::trace {
namespace {

class TimelineClocks : public Timeline {
 protected:
  // Writes a part of rank 1 whose clock had an offset of 500 at its time 1000, with these lines
  // after the header, and merges.
  Json merged_with(const std::vector<std::string>& lines) {
    std::ofstream part(timeline::folder_of_parts(file_) + "/" + kJob + ".1.9");
    part << R"({"weft":"timeline part 1","job":"0123456789abcdef","rank":1,"ranks":2,"host":"h",)"
            R"("machine":"m","pid":1,"ranges":true,"offset":500,"error":40,"measured":1000})"
         << "\n";
    for (const std::string& line : lines) part << line << "\n";
    part.close();
    timeline::merge(file_);
    return read();
  }
  static std::string mark(const std::string& name, int time) {
    return R"(["M",1,)" + std::to_string(time) + R"(,")" + name + R"(","engine",0,1])";
  }
};

TEST_F(TimelineClocks, AreShiftedAndTheirErrorIsStated) {
  constexpr std::int64_t kHour = 3'600'000'000'000;
  run(0, 2, [] {
    Operation::begin(member(0, 2), Kind::Collective, {.name = "all_reduce", .sequence = 1}).end();
  });
  run(1, 2,
      [] {
        Operation::begin(member(1, 2), Kind::Collective, {.name = "all_reduce", .sequence = 1})
            .end();
      },
      {kHour, 1'500'000});
  const Json json = read();
  std::map<int, double> begins;
  for (const Json& span : events(json, "X")) begins[span.at("pid")] = span.at("ts");
  EXPECT_GE(begins[1] - begins[0], kHour / 1000.0);
  EXPECT_EQ(json.at("otherData").at("ranks")[1].at("clock_error_ns"), 1'500'000);
  EXPECT_EQ(json.at("otherData").at("clock_error_is_of"), "the job's start");
  std::set<std::string> names;
  for (const Json& meta : events(json, "M")) {
    if (meta.at("name") == "process_name")
      names.insert(meta.at("args").at("name").get<std::string>());
  }
  EXPECT_TRUE(std::any_of(names.begin(), names.end(), [](const auto& name) {
    return name.ends_with("clock ± 1500 µs at the start");
  }));
}

TEST_F(TimelineClocks, DriftIsCorrectedBetweenComparisons) {
  run(0, 2, [] {});
  const Json json = merged_with({mark("before", 0), mark("first", 1000), mark("between", 2000),
                                 mark("last", 3000), mark("after", 4000),
                                 R"({"clock":3000,"offset":700,"error":70})", R"({"end":4000})"});
  std::map<std::string, double> times;
  for (const Json& mark : events(json, "i")) times[mark.at("name")] = mark.at("ts");
  const std::map<std::string, double> expected{
      {"before", 0}, {"first", 1.0}, {"between", 2.1}, {"last", 3.2}, {"after", 4.2}};
  EXPECT_EQ(times, expected);
  EXPECT_EQ(json.at("otherData").at("ranks")[1].at("clock_error_ns"), 70);
  EXPECT_TRUE(json.at("otherData").at("ranks")[1].at("clock_measured_again").get<bool>());
}

TEST_F(TimelineClocks, SecondComparisonIsStated) {
  run(0, 2, [] {
    Operation::begin(member(0, 2), Kind::Collective, {.name = "all_reduce", .sequence = 1}).end();
  });
  const std::int64_t time = now();
  run(1, 2,
      [&] {
        Operation::begin(member(1, 2), Kind::Collective, {.name = "all_reduce", .sequence = 1})
            .end();
        timeline::measured_again({1000, 2'500'000, time + 1'000'000'000});
        timeline::measured_again({1000, 1'500'000, time + 1'000'000'000});
      },
      {0, 1'200'000, time});
  const Json json = read();
  EXPECT_EQ(json.at("otherData").at("ranks")[1].at("clock_error_ns"), 1'500'000);
  EXPECT_EQ(json.at("otherData").at("clock_error_is_of"), "the job's start and end");
  std::set<std::string> names;
  for (const Json& meta : events(json, "M")) {
    if (meta.at("name") == "process_name")
      names.insert(meta.at("args").at("name").get<std::string>());
  }
  EXPECT_TRUE(std::any_of(names.begin(), names.end(), [](const auto& name) {
    return name.ends_with("clock ± 1500 µs at the start and the end");
  }));
}

// A damaged comparison is ignored too.
TEST_F(TimelineClocks, ImpossibleComparisonsAreIgnored) {
  run(0, 2, [] {});
  for (const char* again : {R"({"clock":3000,"offset":9223372036854775807,"error":70})",
                            R"({"clock":1000,"offset":7,"error":1})", R"({"clock":3000})",
                            R"({"clock":"x","offset":7,"error":1})", R"({"clock)"}) {
    SCOPED_TRACE(again);
    const Json json = merged_with({mark("first", 1000), mark("last", 3000), again});
    const auto marks = events(json, "i");
    ASSERT_EQ(marks.size(), 2u);
    EXPECT_DOUBLE_EQ(marks[1].at("ts"), 2.0);
    EXPECT_EQ(json.at("otherData").at("ranks")[1].at("clock_error_ns"), 40);
    EXPECT_EQ(json.at("otherData").at("clock_error_is_of"), "the job's start");
  }
}

}  // namespace
}  // namespace weft::trace
