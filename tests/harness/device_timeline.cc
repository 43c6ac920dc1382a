// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <fstream>
#include <map>
#include <thread>

#include <gtest/gtest.h>
#include <nlohmann/json.hpp>

#include <weft/profiling/trace/merge.h>
#include <weft/profiling/trace/timeline.h>
#include <weft/tests/harness/device_timeline.h>

namespace weft::harness {

using Json = nlohmann::json;

namespace {

std::pair<int, int> row_of(const Json& event) {
  return {event.at("pid").get<int>(), event.at("tid").get<int>()};
}

// The ranges of a thread's row that are open at that time, outermost first.
std::string ranges_at(const Json& events, const Json& tip) {
  std::vector<std::string> open;
  for (const Json& event : events) {
    const auto phase = event.at("ph").get<std::string>();
    if ((phase != "B" && phase != "E") || row_of(event) != row_of(tip) ||
        event.at("ts") > tip.at("ts"))
      continue;
    if (phase == "B") {
      open.push_back(event.at("name"));
    } else {
      open.pop_back();
    }
  }
  std::string text;
  for (const std::string& name : open) text += (text.empty() ? "" : " > ") + name;
  return text;
}

std::string span_at(const Json& events, const Json& tip) {
  for (const Json& event : events) {
    if (event.at("ph") == "X" && row_of(event) == row_of(tip) && event.at("ts") == tip.at("ts"))
      return event.at("name");
  }
  return "";
}

}  // namespace

DeviceTimeline::DeviceTimeline() { trace::timeline::join(file_, {"0123456789abcdef", 0, 1, {}}); }

DeviceTimeline::~DeviceTimeline() { trace::timeline::finish(); }

std::vector<DeviceTimeline::Shown> DeviceTimeline::ended(std::size_t count) {
  const std::string part = trace::timeline::own_part();
  while (read(part).size() < count) std::this_thread::yield();
  EXPECT_EQ(trace::timeline::end_part(), part);
  auto all = read(part);
  std::stable_sort(all.begin(), all.end(),
                   [](const Shown& a, const Shown& b) { return a.begin < b.begin; });
  return all;
}

std::vector<std::string> DeviceTimeline::names(std::size_t count) {
  std::vector<std::string> names;
  for (const Shown& shown : ended(count))
    names.push_back(shown.name + ": " + std::to_string(shown.bytes) + " bytes");
  return names;
}

std::vector<DeviceTimeline::Shown> DeviceTimeline::read(const std::string& part) const {
  std::vector<Shown> spans;
  std::ifstream file(part);
  for (std::string line; std::getline(file, line);) {
    if (!line.starts_with("[\"D\"")) continue;
    const Json json = Json::parse(line, nullptr, /*allow_exceptions=*/false);
    if (json.is_discarded()) break;  // the line is still being written
    spans.push_back({.device = json.at(1),
                     .rank = json.at(8),
                     .name = json.at(5),
                     .layer = json.at(6),
                     .bytes = json.at(7),
                     .begin = json.at(3),
                     .end = json.at(4),
                     .error = json.at(9)});
  }
  return spans;
}

std::vector<std::string> DeviceTimeline::arrows() const {
  EXPECT_EQ(trace::timeline::merge(file_).parts, 1);
  std::ifstream file(file_);
  const Json events = Json::parse(file).at("traceEvents");
  std::map<std::uint64_t, std::string> begins;
  std::vector<std::string> arrows;
  for (const Json& event : events) {
    if (event.value("name", "") != "launches") continue;
    if (event.at("ph") == "s") begins[event.at("id")] = ranges_at(events, event);
    if (event.at("ph") == "f")
      arrows.push_back(begins.at(event.at("id")) + " -> " + span_at(events, event));
  }
  std::sort(arrows.begin(), arrows.end());
  return arrows;
}

}  // namespace weft::harness
