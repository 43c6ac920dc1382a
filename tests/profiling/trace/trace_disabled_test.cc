// SPDX-License-Identifier: Apache-2.0
// Tests the header as a build with WEFT_TRACE=OFF sees it, whichever this build is.
#undef WEFT_TRACE_ENABLED

#include <type_traits>

#include <gtest/gtest.h>

#include <weft/profiling/trace/trace.h>

namespace weft {
namespace {

constinit trace::Name name{trace::Layer::Transport, "all_reduce"};

static_assert(std::is_empty_v<trace::Range>, "a range must vanish when tracing is off");
static_assert(std::is_empty_v<trace::Name>, "a name must vanish when tracing is off");

// A disabled range can be evaluated at compile time, so none of it can be called at run time.
constexpr int traced(trace::Name& of) {
  trace::Range range(of, {.bytes = 64, .rank = 0, .ranks = 2});
  trace::mark(of);
  return 7;
}

TEST(TraceDisabled, RangesAreEvaluatedAtCompileTime) {
  constexpr int result = traced(name);
  EXPECT_EQ(result, 7);
}

}  // namespace
}  // namespace weft
