// SPDX-License-Identifier: Apache-2.0
// The timeline of a sharded transformer shows that communication runs beside compute.
#include <algorithm>
#include <fstream>
#include <map>
#include <optional>
#include <set>

#include <gtest/gtest.h>
#include <nlohmann/json.hpp>

#include <ATen/Parallel.h>

#include <weft/engine/instruments/range.h>
#include <weft/tests/harness/folder.h>
#include <weft/tests/harness/ranks.h>

#include "transformer.h"

namespace weft::testing {
namespace {

// Draws a range around each block's forward, and one around its backward.
struct DrawnImpl : TransformerImpl {
  using TransformerImpl::TransformerImpl;
  torch::Tensor forward(torch::Tensor x) {
    for (int i = 0; i < kBlocks; ++i) {
      const Range range("forward " + std::to_string(i));
      x = blocks[static_cast<std::size_t>(i)](x);
      x.register_hook([this, i](const torch::Tensor&) {
        backward.reset();
        backward.emplace("backward " + std::to_string(i));
      });
    }
    const Range range("forward " + std::to_string(kBlocks));
    x = head(norm(x));
    x.register_hook(
        [this](const torch::Tensor&) { backward.emplace("backward " + std::to_string(kBlocks)); });
    return x;
  }
  std::optional<Range> backward;
};

void train(int steps) {
  at::set_num_threads(1);
  auto group = init_process_group({.backend = "shm", .device = c10::Device(c10::kCPU)});
  auto model = std::make_shared<DrawnImpl>(16);
  FullyShardedDataParallel sharded(model, group, {.units = units_of<TransformerBlock>()});
  for (int step = 0; step < steps; ++step) {
    const Range range("step");
    sharded(torch::ones({2, 8, 16})).sum().backward();
    model->backward.reset();
  }
}

struct Span {
  std::string name;
  double begin = 0, end = 0;
  bool holds(double time) const { return begin <= time && time <= end; }
};

// What one rank's part of the timeline shows.
struct Shown {
  std::vector<Span> ranges;     // the program's own
  std::vector<double> gathers;  // their begins
};

Shown read(const std::string& file, int rank) {
  Shown shown;
  std::map<std::uint64_t, std::vector<Span>> open;  // by thread
  const auto json = nlohmann::json::parse(std::ifstream(file));
  for (const auto& event : json.at("traceEvents")) {
    if (event.at("pid") != rank) continue;
    const std::string phase = event.at("ph");
    if (phase == "B") {
      const std::string kind = event.at("cat");
      open[event.at("tid")].push_back(
          {kind == "user" ? event.at("name").get<std::string>() : "", event.at("ts"), 0});
    } else if (phase == "E") {
      auto& spans = open[event.at("tid")];
      spans.back().end = event.at("ts");
      if (!spans.back().name.empty()) shown.ranges.push_back(spans.back());
      spans.pop_back();
    } else if (phase == "X" && event.at("name") == "all_gather") {
      shown.gathers.push_back(event.at("ts"));
    }
  }
  std::ranges::sort(shown.gathers);
  return shown;
}

// The range before the one that uses what a step's gather brings. Each unit is gathered for
// forward, and again for backward, except those with which it begins: the root's own parameters and
// the last block.
std::string range_before(int gather) {
  if (gather <= kBlocks) return "forward " + std::to_string(gather - 1);
  return "backward " + std::to_string(2 * kBlocks - gather);
}

TEST(ShardedOverlap, GathersBeginWithinTheUnitBefore) {
  constexpr int kTimed = 4, kGathers = 2 * kBlocks;
  const harness::Folder folder;
  const std::string file = folder.path() + "/run.json";
  ::setenv("WEFT_TIMELINE", file.c_str(), 1);
  harness::Processes ranks(2, [](int) { train(kTimed); });
  ranks.expect_success();
  for (const int rank : {0, 1}) {
    const Shown shown = read(file, rank);
    int within = 0, all = 0, steps = 0;
    for (const Span& step : shown.ranges) {
      if (step.name != "step" || ++steps == 1) continue;  // the first step records the order
      int gather = 0;
      for (const double begin : shown.gathers) {
        if (!step.holds(begin)) continue;
        within += std::ranges::any_of(shown.ranges, [&](const Span& span) {
          return span.name == range_before(gather) && span.holds(begin);
        });
        ++gather;
      }
      EXPECT_EQ(gather, kGathers);
      all += gather;
    }
    EXPECT_EQ(steps, kTimed);
    EXPECT_GE(within, 0.9 * all) << "of " << all;
    EXPECT_EQ(all - within, kTimed - 1) << "a step's first gather has no unit before it";
  }
}

TEST(ShardedOverlap, OperationsHaveTheNamesOfTheirUnits) {
  const harness::Folder folder;
  const std::string file = folder.path() + "/run.json";
  ::setenv("WEFT_TIMELINE", file.c_str(), 1);
  harness::Processes ranks(2, [](int) { train(1); });
  ranks.expect_success();
  std::map<std::string, std::multiset<std::string>> names;  // by unit, on both ranks
  const auto json = nlohmann::json::parse(std::ifstream(file));
  for (const auto& event : json.at("traceEvents")) {
    if (event.at("ph") == "X" && event.at("args").contains("called_by"))
      names[event.at("args").at("called_by")].insert(event.at("name"));
  }
  const std::string sharded = "FullyShardedDataParallel's ";
  EXPECT_EQ(names[sharded + "root"].count("all_gather"), 2u);
  for (int i = 0; i < kBlocks; ++i) {
    const auto& of_block = names[sharded + "unit 'block" + std::to_string(i) + "'"];
    EXPECT_EQ(of_block.count("all_gather"), 4u) << "for forward and for backward";
    EXPECT_EQ(of_block.count("reduce_scatter"), 2u);
  }
}

}  // namespace
}  // namespace weft::testing
