// SPDX-License-Identifier: Apache-2.0
// weft::Range in the timeline, for an NVTX tool and in libtorch's profiler.
#include <string>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <nlohmann/json.hpp>

#include <ATen/record_function.h>

#include <weft/debug.h>
#include <weft/profiling/trace/dump.h>

#include "../../profiling/trace/timeline_of_children.h"
#if WEFT_TEST_NVTX
#include <weft/tests/harness/nvtx_tool.h>
#endif

namespace weft::trace {
namespace {

using ::testing::ElementsAre;

#if WEFT_TRACE_ENABLED
class RangeInTimeline : public Timeline {};

TEST_F(RangeInTimeline, NestsUnderItsNames) {
  run(0, 1, [] {
    const weft::Range step("step");
    std::string name = "for";
    name += "ward";  // a text that ends before the timeline is written
    const weft::Range forward(name);
    name = "another";
  });
  std::vector<std::string> names;
  for (const Json& event : events(read(), "B")) {
    if (event.at("cat") == "user") names.push_back(event.at("name"));
  }
  EXPECT_THAT(names, ::testing::UnorderedElementsAre("step", "forward"));
}
#endif

#if WEFT_TEST_NVTX
TEST(Range, IsShownToAnNvtxTool) {
  harness::attach_nvtx_tool();
  harness::take_nvtx_recording();
  for (int i = 0; i < 2; ++i) const weft::Range range("forward");
  const auto recording = harness::take_nvtx_recording();
  EXPECT_THAT(recording.texts(), ElementsAre("push weft.user forward", "pop weft.user",
                                             "push weft.user forward", "pop weft.user"));
  EXPECT_EQ(recording.registered.at("weft.user forward"), 1);
}
#endif

TEST(Range, IsInDumpsWhileItIsOpen) {
  const auto names = [] {
    std::vector<std::string> found;
    const auto json = nlohmann::json::parse(dump("asked"));
    for (const auto& range : json.at("ranges")) found.push_back(range.at("name"));
    return found;
  };
  {
    const weft::Range range("load data");
    EXPECT_THAT(names(), ElementsAre("load data"));
  }
  EXPECT_THAT(names(), ElementsAre());
}

TEST(Range, IsShownToLibtorchsProfiler) {
  static std::vector<std::string> names;
  const auto handle =
      at::addGlobalCallback(at::RecordFunctionCallback([](const at::RecordFunction& function) {
                              names.emplace_back(function.name());
                              return std::unique_ptr<at::ObserverContext>();
                            }).scopes({at::RecordScope::USER_SCOPE}));
  { const weft::Range range("forward"); }
  at::removeCallback(handle);
  { const weft::Range range("unseen"); }
  EXPECT_THAT(names, ElementsAre("forward"));
}

}  // namespace
}  // namespace weft::trace
