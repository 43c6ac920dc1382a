// SPDX-License-Identifier: Apache-2.0
// Measures the cost of tracing: the training step of examples/digits without a timeline, where only
// the flight recorder writes, and with one; the cost of one operation and of one range; and whether
// the exposed communication in the timeline agrees with the program's own measurement.
//
// The program is examples/digits on two ranks, as a user would start it; its settings take turns,
// so that noise of the machine affects both. WEFT_BENCH_UNTRACED names a second program, built with
// WEFT_TRACE=OFF and otherwise equal, which is measured too; ./dev bench timeline --untraced builds
// it.
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <functional>
#include <string>

#include <weft/profiling/bench/report.h>
#include <weft/profiling/bench/timelines.h>
#include <weft/profiling/bench/workers.h>
#include <weft/profiling/trace/operation.h>
#include <weft/profiling/trace/timeline.h>
#include <weft/profiling/trace/trace.h>

namespace {

using weft::bench::beside;
using weft::bench::exposed_in;
using weft::bench::new_folder;
using weft::bench::Report;
using weft::bench::Samples;

constexpr int kRanks = 2;
constexpr int kBatch = 64;   // digits of a step on each rank
constexpr int kEach = 2000;  // operations between two readings of the clock

[[noreturn]] void fail(const std::string& why) {
  std::fprintf(stderr, "timeline_bench: %s\n", why.c_str());
  std::exit(2);
}

// Returns the number that follows `text` in the program's output.
double number_after(const std::string& printed, const std::string& text) {
  const auto found = printed.find(text);
  if (found == std::string::npos) fail("the digits print no '" + text + "'");
  return std::atof(printed.c_str() + found + text.size());
}

struct Run {
  double step = 0;    // seconds
  double waited = 0;  // percent of the step, as the program measures it
};

Run train(const std::string& folder, const std::string& timeline,
          const std::string& digits = beside("digits")) {
  const auto output =
      weft::bench::run_workers({digits, "--epochs", "3", "--batch-size", std::to_string(kBatch),
                                "--checkpoint", folder + "/digits.pt"},
                               kRanks, {{"WEFT_TIMELINE", timeline}});
  return {kRanks * kBatch / number_after(output.text, "throughput"),
          number_after(output.text, "waiting for others")};
}

void steps(Report& report) {
  const std::string folder = new_folder();
  const std::string file = folder + "/run.json";
  const char* const untraced = std::getenv("WEFT_BENCH_UNTRACED");
  Samples without;
  Samples off;
  Samples on;
  Samples said;
  Samples seen;
  train(folder, "");  // warms up the page cache
  for (int round = 0; round < report.runs(); ++round) {
    if (untraced != nullptr) without.add(train(folder, "", untraced).step);
    off.add(train(folder, "").step);
    const Run looked_at = train(folder, file);
    on.add(looked_at.step);
    said.add(looked_at.waited);
    seen.add(exposed_in(file));
    std::filesystem::remove(file);
  }
  report.add(weft::bench::time_row("digits step", "flight recorder only", 0, off, 1e3, "ms"));
  report.add(weft::bench::time_row("digits step", "with a timeline", 0, on, 1e3, "ms"));
  if (untraced != nullptr) {
    report.add(weft::bench::time_row("digits step", "WEFT_TRACE=OFF", 0, without, 1e3, "ms"));
  }
  const auto share = [&](const char* who, const Samples& percent) {
    report.add({"digits, exposed communication", who, 0, "share of the step", "%",
                percent.quantile(0.5), percent.quantile(0.99), percent.count()});
  };
  share("the program's own clock", said);
  share("weft-timeline summary", seen);
  char text[160];
  std::snprintf(text, sizeof text,
                "with a timeline a step takes %+.2f %% (aim: at most 1 %%); the two shares differ "
                "by %.1f points (aim: 5)",
                100 * (on.quantile(0.5) / off.quantile(0.5) - 1),
                std::abs(seen.quantile(0.5) - said.quantile(0.5)));
  report.note(text);
  if (untraced != nullptr) {
    std::snprintf(
        text, sizeof text,
        "tracing that is off adds %+.2f %% to a step, compared with a build without tracing",
        100 * (off.quantile(0.5) / without.quantile(0.5) - 1));
    report.note(text);
  }
  std::filesystem::remove_all(folder);
}

Samples time_each(int runs, const std::function<void()>& run) {
  Samples samples;
  run();
  for (int round = 0; round < runs * 10; ++round) {
    const double start = weft::bench::now();
    for (int i = 0; i < kEach; ++i) run();
    samples.add((weft::bench::now() - start) / kEach);
  }
  return samples;
}

constinit weft::trace::Name range_name{weft::trace::Layer::User, "range"};

void events(Report& report) {
  const weft::trace::Member member = weft::trace::Member::join({"group", "bench", 0, {0}});
  const auto operation = [&] {
    weft::trace::Operation::begin(member, weft::trace::Kind::Collective,
                                  {.name = "all_reduce", .bytes = 4})
        .end();
  };
  const auto range = [] { const weft::trace::Range here(range_name); };
  const Samples operation_off = time_each(report.runs(), operation);
  const Samples range_off = time_each(report.runs(), range);
  const std::string folder = new_folder();
  weft::trace::timeline::join(folder + "/run.json", {"0123456789abcdef", 0, 1, {}});
  // Few enough events for the timeline's thread to keep up.
  const Samples operation_on = time_each(1, operation);
  const Samples range_on = time_each(1, range);
  weft::trace::timeline::finish();
  std::filesystem::remove_all(folder);
  report.add(
      weft::bench::time_row("one operation", "flight recorder only", 0, operation_off, 1e9, "ns"));
  report.add(weft::bench::time_row("one operation", "with a timeline", 0, operation_on, 1e9, "ns"));
  report.add(weft::bench::time_row("one range", "without a timeline", 0, range_off, 1e9, "ns"));
  report.add(weft::bench::time_row("one range", "with a timeline", 0, range_on, 1e9, "ns"));
}

}  // namespace

int main(int argc, char** argv) {
  Report report("timeline", argc, argv, /*default_runs=*/7);
  if (report.wants("one operation")) events(report);
  if (report.wants("digits step")) steps(report);
  return report.finish();
}
