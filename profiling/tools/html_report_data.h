// SPDX-License-Identifier: Apache-2.0
// The data that the page draws, as JSON for its script (page/page.js): the steps of all ranks, and
// the spans of the lanes in a window.
#pragma once

#include <cstddef>
#include <set>
#include <string>

#include <weft/profiling/tools/html_report.h>

namespace weft::tools {

struct PageData {
  std::string json;             // safe inside a <script> element
  std::set<std::string> kinds;  // kinds of the spans that are drawn
  // Microseconds: shorter spans next to each other are drawn as one; 0: each span is drawn.
  double joined_below = 0;
  int steps_per_bar = 1;         // steps for each bar of the drawing of steps
  std::size_t clipped_bars = 0;  // bars that are longer than the axis
  std::set<int> ranks;           // with at least one span in the window
};

// `data` is the time whose spans the page contains; `view` is the part of it that is shown first.
// At most `most_spans` are drawn.
PageData page_data(const Run& run, const Summary& summary, const Window& data, const Window& view,
                   std::size_t most_spans);

}  // namespace weft::tools
