// SPDX-License-Identifier: Apache-2.0
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <limits>
#include <random>
#include <sstream>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <nlohmann/json.hpp>

#include <weft/base/error.h>
#include <weft/profiling/tools/html_report.h>
#include <weft/profiling/tools/intervals.h>
#include <weft/tests/harness/folder.h>

namespace weft::tools {
namespace {

using testing::HasSubstr;

Span span(const std::string& kind, std::uint64_t sequence, double begin, double end, int rank,
          int peer = -1) {
  Span made;
  made.begin = begin;
  made.end = end;
  made.name = kind == "collective" ? "all_reduce" : kind;
  made.kind = kind;
  made.group = "default";
  made.sequence = sequence;
  made.rank = rank;
  made.peer = peer;
  made.bytes = 1'000'000;
  made.state = "done";
  made.row = 2000;
  return made;
}

std::string page_of(const Run& run) {
  return to_html(run, summarize(run), whole(run), middle_steps(run), "run.json");
}

// The data that the page's script draws.
nlohmann::json data_in(const std::string& page) {
  const std::string head = "id=\"data\">";
  const auto begin = page.find(head) + head.size();
  return nlohmann::json::parse(page.substr(begin, page.find("</script>", begin) - begin));
}

Span wait(double begin, double end) {
  Span made;
  made.begin = begin;
  made.end = end;
  made.name = "wait";
  made.kind = "engine";
  made.row = 1;
  return made;
}

// Four steps of 1000 µs on two ranks. In each, an all_reduce takes from 600 to 900 on rank 0; rank
// 1 enters it at 700; both wait for it from 800 on.
Run steps() {
  tools::Run run;
  for (int rank = 0; rank < 2; ++rank) {
    RankRun& one = run.ranks[rank];
    one.name = "rank " + std::to_string(rank) + " <on> host";
    one.rows = {{1, "thread main"}, {2000, "collective"}};
    for (int i = 0; i < 4; ++i) {
      const double start = i * 1000;
      one.steps.push_back(start);
      one.operations.push_back(span("collective", static_cast<std::uint64_t>(i) + 1,
                                    start + (rank == 0 ? 600 : 700), start + 900, rank));
      one.ranges.push_back(wait(start + 800, start + 900));
    }
    one.end = 4000;
  }
  return run;
}

TEST(Summary, SplitsStepsIntoComputeAndExposed) {
  const Summary summary = summarize(steps());
  ASSERT_EQ(summary.steps.size(), 4u);
  const Times& times = summary.ranks.at(0);
  EXPECT_DOUBLE_EQ(times.total, 1000);
  EXPECT_DOUBLE_EQ(times.communication, 300);
  EXPECT_DOUBLE_EQ(times.exposed, 100);
  EXPECT_DOUBLE_EQ(times.compute, 900);
  EXPECT_DOUBLE_EQ(times.waiting, 100);
  EXPECT_DOUBLE_EQ(summary.ranks.at(1).waiting, 0);
}

TEST(Summary, StreamWaitsAreExposed) {
  auto run = steps();
  Span waits = wait(150, 250);
  waits.kind = "device";
  run.ranks[0].operations.push_back(waits);
  EXPECT_DOUBLE_EQ(summarize(run).steps[0].ranks.at(0).exposed, 200);
  run.ranks[0].operations.back().kind = "call";  // a function that is called "wait"
  EXPECT_DOUBLE_EQ(summarize(run).steps[0].ranks.at(0).exposed, 100);
}

// A range of a thread; `row` is the thread.
Span range(const char* name, int row, double begin, double end, const char* layer = "engine") {
  Span made = wait(begin, end);
  made.name = name;
  made.kind = layer;
  made.row = row;
  return made;
}

// One step of 1000 µs in which the main thread waits from 0 to 1000.
Times times_of_server(std::vector<Span> ranges) {
  tools::Run run;
  RankRun& one = run.ranks[0];
  one.end = 1000;
  one.ranges = std::move(ranges);
  one.ranges.push_back(range("wait", 1, 0, 1000));
  return summarize(run).ranks.at(0);
}

TEST(Summary, ServingACallIsCompute) {
  for (const char* serves : {"run", "continuations", "backward of a gradient",
                             "backward of the roots", "optimizer step"}) {
    const Times times = times_of_server({range(serves, 2, 100, 300), range(serves, 3, 250, 400)});
    EXPECT_DOUBLE_EQ(times.compute, 300) << serves;
    EXPECT_DOUBLE_EQ(times.exposed, 700) << serves;
  }
  EXPECT_DOUBLE_EQ(times_of_server({range("bucket", 2, 100, 300)}).compute, 0);
  EXPECT_DOUBLE_EQ(times_of_server({range("run", 2, 100, 300, "user")}).compute, 0)
      << "the program's own range of that name";
}

TEST(Summary, WaitingWithinACallIsExposed) {
  EXPECT_DOUBLE_EQ(times_of_server({range("run", 2, 100, 500), range("wait", 2, 200, 450)}).compute,
                   150);
  const Times two = times_of_server(
      {range("run", 2, 100, 500), range("wait", 2, 200, 450), range("run", 3, 300, 400)});
  EXPECT_DOUBLE_EQ(two.compute, 250) << "another call runs meanwhile";
}

TEST(Summary, WaitingThreadMayServe) {
  const Times times = times_of_server({range("run", 1, 100, 300), range("wait", 1, 150, 200)});
  EXPECT_DOUBLE_EQ(times.compute, 150) << "the main thread drives the agent's loop while it waits";
  // Of ranges that begin in the same microsecond, the longer one contains the other.
  EXPECT_DOUBLE_EQ(times_of_server({range("wait", 2, 100, 150), range("run", 2, 100, 300)}).compute,
                   150);
}

TEST(Summary, StreamWaitsAreExposedDespiteServing) {
  tools::Run run;
  RankRun& one = run.ranks[0];
  one.end = 1000;
  one.ranges = {range("run", 2, 0, 1000)};
  one.operations = {range("wait", 9, 400, 600, "device")};
  EXPECT_DOUBLE_EQ(summarize(run).ranks.at(0).exposed, 200);
}

TEST(Intervals, WithoutKeepsTheUncoveredParts) {
  const Intervals all{{0, 10}, {20, 30}, {40, 50}};
  EXPECT_EQ(without(all, {}), all);
  EXPECT_EQ(without({}, all), Intervals());
  EXPECT_EQ(without(all, {{0, 50}}), Intervals());
  EXPECT_EQ(without(all, {{2, 3}, {5, 22}, {29, 45}}),
            (Intervals{{0, 2}, {3, 5}, {22, 29}, {45, 50}}));
  EXPECT_EQ(without(all, {{10, 20}, {30, 40}, {50, 60}}), all);
  EXPECT_DOUBLE_EQ(within(all, 5, 45), 20);
  EXPECT_DOUBLE_EQ(within(all, 10, 20), 0);
}

TEST(Summary, NamesTheRankThatComesLast) {
  const Summary summary = summarize(steps());
  EXPECT_EQ(summary.slowest_rank, 1);
  EXPECT_EQ(summary.collectives, 4u);
  EXPECT_EQ(summary.last.at(1), 4u);
}

// A rank that is late once, by much, costs more than one that is last by a little each time.
TEST(Summary, TheSlowestRankIsTheOneThatIsLateByMost) {
  tools::Run run;
  for (std::uint64_t i = 1; i <= 3; ++i) {
    const double begin = static_cast<double>(i) * 10'000;
    run.ranks[0].operations.push_back(span("collective", i, begin + 10, begin + 6000, 0));
    run.ranks[1].operations.push_back(
        span("collective", i, begin + (i == 3 ? 5000 : 0), begin + 6000, 1));
  }
  const Summary summary = summarize(run);
  EXPECT_EQ(summary.slowest_rank, 1);
  EXPECT_THAT(
      to_text(run, summary),
      HasSubstr("slowest rank: 1 came last to 1 of 3 collectives, in all 4.990 ms later than "));
}

TEST(Summary, OverlappingOperationsCountOnce) {
  auto run = steps();
  run.ranks[0].operations.push_back(span("send", 1, 650, 950, 0, 1));
  EXPECT_DOUBLE_EQ(summarize(run).steps[0].ranks.at(0).communication, 350);
}

TEST(Summary, NamesTheSlowestLinkAndTheLongestGap) {
  auto run = steps();
  run.ranks[0].operations.push_back(span("send", 1, 100, 110, 0, 1));
  run.ranks[1].operations.push_back(span("receive", 1, 50, 200, 1, 0));
  run.ranks[1].operations.push_back(span("send", 1, 100, 110, 1, 0));
  run.ranks[0].operations.push_back(span("receive", 1, 50, 1100, 0, 1));
  const Summary summary = summarize(run);
  ASSERT_EQ(summary.links.size(), 2u);
  EXPECT_EQ(summary.links[0].from, 1);
  EXPECT_EQ(summary.links[0].to, 0);
  EXPECT_DOUBLE_EQ(summary.links[0].gigabytes_per_second(), 1.0);
  EXPECT_DOUBLE_EQ(summary.links[1].gigabytes_per_second(), 10.0);
  ASSERT_FALSE(summary.gaps.empty());
  EXPECT_DOUBLE_EQ(summary.gaps[0].end - summary.gaps[0].begin, 800);
}

TEST(Summary, RunWithoutMarksIsOneStep) {
  auto run = steps();
  for (auto& [rank, one] : run.ranks) one.steps.clear();
  EXPECT_EQ(summarize(run).steps.size(), 1u);
  EXPECT_DOUBLE_EQ(summarize(run).ranks.at(0).total, 4000);
}

TEST(Summary, RankWithoutMarksUsesAnothers) {
  auto run = steps();
  run.ranks[0].steps.clear();  // a parameter server
  const Summary summary = summarize(run);
  ASSERT_EQ(summary.steps.size(), 4u);
  for (const Step& step : summary.steps)
    EXPECT_DOUBLE_EQ(step.ranks.at(0).exposed, 100) << step.number;
}

TEST(Summary, TextAndJsonSayTheSame) {
  const auto run = steps();
  const Summary summary = summarize(run);
  EXPECT_THAT(to_text(run, summary), HasSubstr("slowest rank: 1 came last to 4 of 4 collectives"));
  EXPECT_THAT(to_text(run, summary), HasSubstr("0.100 (10.0%)"));
  EXPECT_THAT(to_json(summary), HasSubstr("\"exposed_share\": 0.1"));
}

// As from a build with WEFT_TRACE=OFF.
TEST(Summary, DoesNotGuessExposureWithoutRanges) {
  auto run = steps();
  run.ranks[1].has_ranges = false;
  run.ranks[1].ranges.clear();
  const Summary summary = summarize(run);
  const std::string text = to_text(run, summary);
  EXPECT_THAT(
      text, HasSubstr("rank 1: compute and exposed are not recorded (built with WEFT_TRACE=OFF)"));
  EXPECT_THAT(text, HasSubstr("all steps of rank 1: 4.000 ms, exposed not recorded"));
  EXPECT_THAT(text, HasSubstr("0.100 (10.0%)")) << "the exposure of rank 0 is known";
  EXPECT_EQ(text.find(" 0.0%"), std::string::npos) << text;
  EXPECT_THAT(to_json(summary), HasSubstr("\"exposed_us\": null"));
  const std::string page = page_of(run);
  EXPECT_THAT(page, HasSubstr("rank 1: compute and exposed are not recorded"));
  EXPECT_THAT(page, HasSubstr("<td>–</td>"));
  EXPECT_THAT(page, HasSubstr("not recorded: compute or exposed"));
  EXPECT_TRUE(data_in(page).at("steps").at("ranks").at(1).at("exposed").at(0).is_null());
  EXPECT_THAT(page_of(steps()), testing::Not(HasSubstr("not recorded: compute or exposed")));
}

TEST(Summary, SaysWhatItsTimesAre) {
  auto run = steps();
  EXPECT_THAT(
      to_text(run, summarize(run)),
      HasSubstr("2 ranks, 4 steps, 4 collectives\ntimes are means of all steps except the first"));
  EXPECT_THAT(to_text(run, summarize(run)), HasSubstr("mean step ms"));
  for (auto& [rank, one] : run.ranks) one.steps.clear();
  const std::string text = to_text(run, summarize(run));
  EXPECT_THAT(text, HasSubstr("no steps are marked"));
  EXPECT_EQ(text.find("step ms"), std::string::npos);
  EXPECT_EQ(text.find("all steps"), std::string::npos);
}

TEST(Summary, SaysWhetherAClockMayDrift) {
  auto run = steps();
  run.ranks[0].clock_error = 12.5;
  run.ranks[1].clock_error = 7;
  run.ranks[1].clock_again = true;
  const std::string text = to_text(run, summarize(run));
  EXPECT_THAT(text,
              HasSubstr("the clock of rank 0 was known to 12.5 us at the start, and may drift\n"));
  EXPECT_THAT(text,
              HasSubstr("the clock of rank 1 was known to 7.0 us at the start and at the end\n"));
}

TEST(Summary, EmptyLinkIsNotTheSlowest) {
  auto run = steps();
  run.ranks[0].operations.push_back(span("send", 1, 100, 110, 0, 1));
  run.ranks[1].operations.push_back(span("receive", 1, 50, 200, 1, 0));
  for (RankRun* one : {&run.ranks[0], &run.ranks[1]}) one->operations.back().bytes = 0;
  EXPECT_THAT(to_text(run, summarize(run)), HasSubstr("slowest link: none"));
  run.ranks[1].operations.push_back(span("send", 1, 100, 110, 1, 0));
  run.ranks[0].operations.push_back(span("receive", 1, 50, 1100, 0, 1));
  run.ranks[0].operations.back().bytes = 4;
  EXPECT_THAT(to_text(run, summarize(run)),
              HasSubstr("slowest link: rank 1 to rank 0, 4 kB/s in 1 message of 4 bytes"));
}

// Adds a call of 1 MB from rank 0 that takes `whole` for the caller and `there` for the callee.
void add_call(Run& run, std::uint64_t number, int to, double whole, double there) {
  run.ranks[0].operations.push_back(span("call", number, 100, 100 + whole, 0, to));
  run.ranks[to].operations.push_back(span("served", number, 110, 110 + there, to, 0));
}

TEST(Summary, CallsCountForLinksAndRanks) {
  tools::Run run;
  for (int rank = 0; rank < 3; ++rank) run.ranks[rank].end = 1000;
  add_call(run, 1, 1, 250, 50);
  add_call(run, 2, 1, 350, 50);
  add_call(run, 3, 2, 500, 400);
  const Summary summary = summarize(run);
  ASSERT_EQ(summary.links.size(), 2u);
  EXPECT_EQ(summary.links[0].to, 1);
  EXPECT_EQ(summary.links[0].calls, 2u);
  EXPECT_DOUBLE_EQ(summary.links[0].gigabytes_per_second(), 4.0);
  EXPECT_DOUBLE_EQ(summary.links[1].gigabytes_per_second(), 10.0);
  EXPECT_EQ(summary.slowest_rank, 2);
  const std::string text = to_text(run, summary);
  EXPECT_THAT(text, HasSubstr("slowest rank: 2 took 0.500 ms to answer a call, the mean of 1\n"));
  EXPECT_THAT(
      text,
      HasSubstr("slowest link: rank 0 to rank 1, 4 GB/s in 2 calls of 2000000 bytes together"));
}

// Each agent of a process counts its calls from 1.
TEST(Summary, CallsOfSuccessiveAgentsDiffer) {
  tools::Run run;
  for (int agent = 0; agent < 2; ++agent) {
    for (std::uint64_t number = 1; number <= 3; ++number) {
      const double begin = 10'000.0 * agent + 1'000.0 * static_cast<double>(number);
      run.ranks[0].operations.push_back(
          span("call", number, begin, begin + (agent == 0 ? 10 : 500), 0, 1));
      run.ranks[0].operations.back().bytes = agent == 0 ? 1'000 : 1;
      run.ranks[1].operations.push_back(span("served", number, begin + 5, begin + 6, 1, 0));
    }
  }
  const Summary summary = summarize(run);
  ASSERT_EQ(summary.links.size(), 1u);
  EXPECT_EQ(summary.links[0].bytes, 3'003u);
  EXPECT_DOUBLE_EQ(summary.answers.at(1).mean(), 255);
}

TEST(Summary, SaysIfNoRankOrLinkIsSlowest) {
  tools::Run run;
  run.ranks[0].end = 1000;
  const std::string text = to_text(run, summarize(run));
  EXPECT_THAT(
      text,
      HasSubstr("slowest rank: none: no collectives of several ranks, and no calls to several"));
  EXPECT_THAT(text, HasSubstr("slowest link: none: no messages or calls carried bytes"));
}

TEST(Summary, ListsEachStepOrTheLongestOfMany) {
  auto run = steps();
  const std::string all = to_text(run, summarize(run));
  EXPECT_THAT(all, testing::ContainsRegex("\nstep +rank +step ms"));
  for (const char* step : {"0", "1", "2", "3"})
    EXPECT_THAT(all, testing::ContainsRegex(std::string("\n") + step +
                                            " +0 +1.000 +0.900 +0.300 +0.100 .10.0%. +0.100\n"));
  EXPECT_EQ(all.find("longest"), std::string::npos);
  for (RankRun* one : {&run.ranks[0], &run.ranks[1]})
    one->steps[2] = 1500;  // now step 1 is shorter, and step 2 longer
  const std::string two = to_text(run, summarize(run), 2);
  EXPECT_THAT(two, HasSubstr("the 2 longest of 4 steps (--steps 4 shows all):"));
  EXPECT_THAT(two, testing::ContainsRegex("\n0 +1 +1.000 .*\n2 +0 +1.500 "));
  EXPECT_EQ(two.find("\n1  "), std::string::npos);
  EXPECT_THAT(to_text(run, summarize(run), 0), testing::Not(HasSubstr("\nstep ")));
}

TEST(Page, AcceptsOnlyTimesWithinTheRun) {
  const auto run = steps();
  const Window window = window_of(run, 1.5, 2.5);
  EXPECT_DOUBLE_EQ(window.begin, 1500);
  EXPECT_DOUBLE_EQ(window.end, 2500);
  EXPECT_DOUBLE_EQ(window_of(run, 1.5, {}).end, 4000);
  EXPECT_DOUBLE_EQ(window_of(run, {}, 2.5).begin, 0);
  const double infinity = std::numeric_limits<double>::infinity();
  const std::vector<std::pair<double, double>> wrong{
      {-5, -1}, {std::nan(""), 1}, {0, infinity}, {4.5, 5}, {2, 2}};
  for (const auto& [from, to] : wrong)
    EXPECT_THROW(window_of(run, from, to), Error) << from << " " << to;
}

// Counts the spans of that name that the blocks of all rows stand for, in the whole page.
std::size_t spans_named(const nlohmann::json& data, int rank, const std::string& name) {
  std::size_t count = 0;
  for (const auto& lane : data.at("ranks").at(static_cast<std::size_t>(rank)).at("lanes")) {
    for (std::size_t i = 0; i < lane.at("label").size(); ++i) {
      if (data.at("names").at(lane.at("label").at(i).get<std::size_t>()) == name)
        count += lane.at("count").at(i).get<std::size_t>();
    }
  }
  return count;
}

TEST(Page, JoinsShortSpansOfBusyRanks) {
  auto run = steps();
  constexpr std::size_t kMany = 200'000;
  for (std::uint64_t i = 0; i < kMany; ++i) {
    const double begin = 0.02 * static_cast<double>(i);
    run.ranks[0].operations.push_back(span("send", i, begin, begin + 0.015, 0, 1));
    run.ranks[0].operations.back().row = 4000;
    if (i == 100'000) run.ranks[0].operations.back().state = "failed";
  }
  const std::string page = page_of(run);
  EXPECT_THAT(page, HasSubstr("There are too many spans to draw each"));
  const auto data = data_in(page);
  EXPECT_EQ(spans_named(data, 0, "send"), kMany) << "each span must be in one of the blocks";
  EXPECT_EQ(spans_named(data, 0, "all_reduce"), 4u);
  EXPECT_EQ(spans_named(data, 1, "all_reduce"), 4u);
  std::size_t drawn = 0, bad = 0;
  for (const auto& lane : data.at("ranks").at(0).at("lanes")) {
    drawn += lane.at("begin").size();
    for (std::size_t i = 0; i < lane.at("bad").size(); ++i)
      bad += lane.at("bad").at(i) == 1 && lane.at("count").at(i) == 1;
  }
  EXPECT_LE(drawn, 150'000u);
  EXPECT_EQ(bad, 1u) << "the failed span must be drawn by itself";
  EXPECT_THAT(page_of(steps()), testing::Not(HasSubstr("too many spans")));
}

TEST(Page, HasAllStepsOrTheirMeans) {
  auto run = steps();
  EXPECT_THAT(page_of(run), HasSubstr("All 4 steps"));
  EXPECT_EQ(data_in(page_of(run)).at("steps").at("ranks").at(0).at("exposed"),
            nlohmann::json({100.0, 100.0, 100.0, 100.0}));
  for (int rank = 0; rank < 2; ++rank) {
    RankRun& one = run.ranks[rank];
    one.steps.clear();
    for (int i = 0; i < 60'000; ++i) one.steps.push_back(0.05 * i);
  }
  const std::string page = page_of(run);
  EXPECT_THAT(page, HasSubstr("All 60000 steps"));
  EXPECT_THAT(page, HasSubstr("each bar is the mean of 3 steps"));
  EXPECT_EQ(data_in(page).at("steps").at("ranks").at(1).at("total").size(), 20'000u);
}

TEST(Page, MarksStepsBeyondTheAxis) {
  auto run = steps();
  for (auto& [rank, one] : run.ranks) {
    one.steps.clear();
    for (int i = 0; i < 100; ++i) one.steps.push_back(rank == 0 && i > 0 ? 3000 + i : i);
    one.end = 4000;
  }
  EXPECT_THAT(page_of(run), HasSubstr("reach beyond it, which a mark on top shows"));
  EXPECT_THAT(page_of(steps()), testing::Not(HasSubstr("beyond it")));
}

TEST(Page, ExplainsItsContentAndColours) {
  auto run = steps();
  const std::string all = page_of(run);
  for (const char* said :
       {"<h3>rank 0 &lt;on&gt; host</h3>", "<h3>rank 1 &lt;on&gt; host</h3>", "time in ms",
        "collective</li>", "thread or stream: waiting</li>", "a step begins</li>", "compute</li>",
        "2 ranks, 4 steps, 4 collectives, 4.000 ms"})
    EXPECT_THAT(all, HasSubstr(said));
  EXPECT_THAT(all, testing::Not(HasSubstr("receive</li>"))) << "the run has no receive";
  const auto data = data_in(all);
  EXPECT_EQ(data.at("view"), nlohmann::json({0.0, 4000.0})) << "few steps are all shown";
  EXPECT_EQ(spans_named(data, 0, "all_reduce"), 4u);
  const std::string some = to_html(run, summarize(run), {1500, 2500}, {1500, 2500}, "run.json");
  EXPECT_THAT(some, HasSubstr("The page has the spans from 1.500 ms to 2.500 ms of the run's 4.000 "
                              "ms, as chosen by --from and --to"));
  EXPECT_EQ(spans_named(data_in(some), 0, "all_reduce"), 1u);
  EXPECT_EQ(data_in(some).at("steps").at("count"), 4u)
      << "the drawing of steps must have all of them";
  EXPECT_THAT(to_html(run, summarize(run), {0, 10}, {0, 10}, "run.json"),
              HasSubstr("This rank has recorded nothing in this time."));
}

TEST(Page, OpensInTheMiddleOfALongRun) {
  auto run = steps();
  for (int i = 4; i < 100; ++i) run.ranks[0].steps.push_back(i * 1000);
  run.ranks[0].end = 100'000;
  EXPECT_EQ(data_in(page_of(run)).at("view"), nlohmann::json({47'000.0, 52'000.0}));
  EXPECT_EQ(data_in(page_of(run)).at("end"), 100'000.0) << "the page must hold the whole run";
}

TEST(Page, HasWhatCalledAnOperation) {
  auto run = steps();
  run.ranks[0].operations[2].called_by = "unit 'a'";
  const auto data = data_in(page_of(run));
  const auto& lane = data.at("ranks").at(0).at("lanes").at(1);
  EXPECT_EQ(data.at("names").at(lane.at("called_by").at(2).get<std::size_t>()), "unit 'a'");
  EXPECT_EQ(data.at("names").at(lane.at("called_by").at(1).get<std::size_t>()), "");
}

TEST(Page, RangesOfAThreadNest) {
  tools::Run run;
  RankRun& one = run.ranks[0];
  one.end = 100;
  one.rows = {{1, "thread main"}, {2, "thread server"}};
  one.ranges = {range("run", 2, 0, 100), range("wait", 2, 10, 50), range("run", 2, 20, 30),
                range("pack", 1, 60, 70)};
  const auto lanes = data_in(page_of(run)).at("ranks").at(0).at("lanes");
  EXPECT_EQ(lanes.at(0).at("name"), "thread main");
  EXPECT_EQ(lanes.at(1).at("depth"), nlohmann::json({0, 1, 2}));
  EXPECT_EQ(lanes.at(1).at("rows"), 3);
}

TEST(Page, RefersToNothingOutside) {
  auto run = steps();
  run.ranks[0].operations[0].name = "</script><img src=x>";
  const std::string page = page_of(run);
  for (const char* outside : {"http:", "https:", "<img", "href=", "@import", "url("})
    EXPECT_EQ(page.find(outside), std::string::npos) << outside;
  EXPECT_EQ(spans_named(data_in(page), 0, "</script><img src=x>"), 1u);
  EXPECT_THAT(page, HasSubstr("default-src 'none'"))
      << "a timeline must not make the page fetch anything";
}

std::string text_of(const std::string& path) {
  std::ostringstream text;
  text << std::ifstream(path, std::ios::binary).rdbuf();
  return text.str();
}

std::string base64(const std::string& bytes) {
  constexpr const char* kLetters =
      "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
  std::string text;
  for (std::size_t i = 0; i < bytes.size(); i += 3) {
    std::uint32_t word = 0;
    for (std::size_t j = i; j < i + 3; ++j)
      word = word << 8 | (j < bytes.size() ? static_cast<unsigned char>(bytes[j]) : 0);
    for (std::size_t j = 0; j < 4; ++j)
      text += i + j <= bytes.size() ? kLetters[word >> (18 - 6 * j) & 63] : '=';
  }
  return text;
}

// Has a browser count the pixels of a picture: makes a page whose script does it, since browsers
// can read PNG, and returns that page as the browser leaves it.
std::string colors_in(const std::string& picture, const std::string& browser,
                      const std::string& folder) {
  std::ofstream(folder + "/colors.html")
      << "<img src=\"data:image/png;base64," << base64(text_of(picture))
      << "\"><script>onload=()=>{const "
         "i=document.images[0],c=document.createElement('canvas');c.width=i.width;"
         "c.height=i.height;const x=c.getContext('2d');x.drawImage(i,0,0);"
         "const d=x.getImageData(0,0,i.width,i.height).data,n=[0,0,0];"
         "const w=[[0x64,0x74,0x8b],[0xdc,0x26,0x26],[0x3b,0x76,0xc4]];"
         "for(let p=0;p<d.length;p+=4)w.forEach((v,k)=>{if(v.every((b,j)=>d[p+j]===b))++n[k]});"
         "document.title='colors '+n.join(' ')}</script>";
  const std::string output = folder + "/colors";
  const std::string command = browser + "--dump-dom file://" + folder + "/colors.html > " + output +
                              " 2> " + output + ".err";
  return std::system(command.c_str()) == 0 ? text_of(output) : text_of(output + ".err");
}

// The picture that a browser draws must contain the colours of compute, exposed communication and
// collectives.
TEST(Page, IsDrawnByABrowser) {
  std::string browser;
  for (const char* name :
       {"chromium-headless-shell", "chromium", "chromium-browser", "google-chrome"}) {
    if (browser.empty() &&
        std::system(("command -v " + std::string(name) + " > /dev/null 2>&1").c_str()) == 0)
      browser = name;
  }
  if (browser.empty())
    GTEST_SKIP()
        << "no chromium and no chromium-headless-shell: install one to check the drawn page";
  std::string folder = std::filesystem::temp_directory_path() / "weft-page-XXXXXX";
  ::mkdtemp(folder.data());
  auto run = steps();
  run.ranks[1].operations[1].called_by = "unit 'a'";
  std::ofstream(folder + "/page.html") << page_of(run);
  const std::string options =
      " --headless --no-sandbox --disable-gpu --user-data-dir=" + folder + "/profile ";
  const std::string quiet = " > " + folder + "/out 2> " + folder + "/err";
  ASSERT_EQ(std::system((browser + options + "--window-size=1200,1000 --screenshot=" + folder +
                         "/page.png file://" + folder + "/page.html" + quiet)
                            .c_str()),
            0);
  EXPECT_THAT(colors_in(folder + "/page.png", browser + options, folder),
              testing::ContainsRegex("<title>colors [1-9][0-9]+ [1-9][0-9]+ [1-9][0-9]+</title>"))
      << "compute, exposed communication, collectives: how many pixels of each";
  // A script added here uses the page as a person does, and reports what the page showed.
  std::ofstream(folder + "/probe.html") << page_of(run) << R"(<script>
const said = [], shown = () => document.getElementById('shown').textContent;
const key = (id, name) => document.getElementById(id).dispatchEvent(new KeyboardEvent('keydown', {key: name}));
const press = (id) => document.getElementById(id).click();
const say = (what) => said.push(what + ' {' + shown() + '}');
say('first'); key('rank0', ']'); key('rank0', ']'); say('step'); key('rank0', '+'); say('closer'); press('whole'); say('all');
key('steps1', 'ArrowRight'); key('steps1', 'ArrowRight'); said.push('bar {' + document.getElementById('picked').textContent + '}');
key('steps1', 'Enter'); say('its step'); key('rank1', '.'); key('rank1', '>'); said.push('span {' + document.getElementById('picked').textContent + '}');
document.getElementById('axis').dispatchEvent(new WheelEvent('wheel', {ctrlKey: true, deltaY: -1, cancelable: true})); say('wheel');
said.push('canvases ' + document.querySelectorAll('canvas').length + ', wide ' + (document.getElementById('rank0').width > 1000));
document.title = said.join('; ').replaceAll('\n', ' / ');
</script>)";
  ASSERT_EQ(std::system((browser + options + "--window-size=1200,1000 --dump-dom file://" + folder +
                         "/probe.html" + quiet)
                            .c_str()),
            0);
  const std::string done = text_of(folder + "/out");
  for (const char* said :
       {"first {Shown: 0.000 ms to 4.000 ms, 4.000 ms of the run's 4.000 ms (steps 0 to 3 of 4).}",
        "step {Shown: 2.000 ms to 3.000 ms, 1.000 ms of the run's 4.000 ms (in step 2 of 4).}",
        "closer {Shown: 2.250 ms to 2.750 ms", "all {Shown: 0.000 ms to 4.000 ms",
        "rank 1, step 1: 1.000 ms / compute 0.900 ms, exposed 0.100 ms, waiting 0.000 ms}",
        "its step {Shown: 1.000 ms to 2.000 ms", "wheel {Shown: ", "canvases 5, wide true",
        "span {unit 'a': all_reduce #2: 0.200 ms from 1.700 ms / 1,000,000 bytes, in default / "
        "rank 1, "
        "collective}"})
    EXPECT_THAT(done, HasSubstr(said));
  std::filesystem::remove_all(folder);
}

TEST(Run, NonTimelinesAreRefusedByName) {
  std::string folder = std::filesystem::temp_directory_path() / "weft-run-XXXXXX";
  ::mkdtemp(folder.data());
  const auto message_for = [&](const std::string& text) -> std::string {
    std::ofstream(folder + "/run.json") << text;
    try {
      read_run(folder + "/run.json");
    } catch (const Error& error) {
      return error.text();
    }
    return "";
  };
  EXPECT_THAT(message_for("{}"), HasSubstr("run.json' is not a timeline of Weft"));
  EXPECT_THAT(message_for(R"({"otherData":{"weft":"timeline 1"},"traceEvents":[{"ph":1}]})"),
              HasSubstr("is damaged"));
  EXPECT_THAT(message_for(R"({"otherData":{"weft":"timeline 1","ranks":[]},"traceEvents":[]})"),
              "");
  EXPECT_THROW(read_run(folder + "/none.json"), Error);
  std::filesystem::remove_all(folder);
}

TEST(Run, DamagedFileIsReadOrRefused) {
  const harness::Folder folder;
  const std::string file = folder.path() + "/run.json";
  const std::string whole =
      R"({"displayTimeUnit":"ms","traceEvents":[
{"ph":"M","name":"process_name","pid":0,"tid":0,"args":{"name":"rank 0"}},
{"ph":"M","name":"thread_name","pid":0,"tid":1,"args":{"name":"thread main"}},
{"ph":"i","name":"step","cat":"engine","pid":0,"tid":1,"ts":10.5},
{"ph":"i","name":"step","cat":"engine","pid":0,"tid":1,"ts":20.5},
{"ph":"B","name":"wait","cat":"engine","pid":0,"tid":1,"ts":11},
{"ph":"E","pid":0,"tid":1,"ts":12},
{"ph":"X","name":"send","cat":"send","pid":0,"tid":2,"ts":11,"dur":3,)"
      R"("args":{"rank":0,"peer":1,"group":"g","state":"done","sequence":1,"bytes":8}},
{"ph":"X","name":"recv","cat":"receive","pid":1,"tid":2,"ts":11,"dur":3,)"
      R"("args":{"rank":1,"peer":0,"group":"g","state":"done","sequence":1,"bytes":8}},
{"ph":"X","name":"all_reduce","cat":"collective","pid":0,"tid":3,"ts":15,"dur":3,)"
      R"("args":{"rank":0,"group":"g","state":"done","sequence":1,"bytes":8}},
{"ph":"X","name":"all_reduce","cat":"collective","pid":1,"tid":3,"ts":16,"dur":3,)"
      R"("args":{"rank":1,"group":"g","state":"done","sequence":1,"bytes":8}}
],"otherData":{"weft":"timeline 1","job_ranks":2,"ranks":[
{"rank":0,"clock_error_ns":0,"events_lost":0,"ended_in_order":true},)"
      R"({"rank":1,"clock_error_ns":7,"events_lost":1,"ranges":false,"ended_in_order":false}]}})";
  std::mt19937 random(7);
  for (int round = 0; round < 3000; ++round) {
    std::string damaged = whole;
    if (round > 0) damaged[random() % damaged.size()] = "0123456789-eE.[]{}\",:x"[random() % 22];
    std::ofstream(file) << damaged;
    try {
      const auto run = read_run(file);
      if (round == 0) {
        EXPECT_TRUE(run.ranks.at(0).has_ranges) << "older timelines do not say so, and have ranges";
        EXPECT_FALSE(run.ranks.at(1).has_ranges);
      }
      const Summary summary = summarize(run);
      to_text(run, summary);
      to_json(summary);
      page_of(run);
    } catch (const Error& error) {
      EXPECT_GT(round, 0) << error.text();
      EXPECT_EQ(error.blame(), Blame::Caller);
      EXPECT_THAT(error.text(), HasSubstr(file)) << damaged;
    }
  }
}

}  // namespace
}  // namespace weft::tools
