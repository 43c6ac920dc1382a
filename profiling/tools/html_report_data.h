// What the page draws, as JSON for its script (page/page.js): the steps of all ranks, and the
// lanes' spans in a window.
#pragma once

#include <cstddef>
#include <set>
#include <string>

#include <weft/profiling/tools/html_report.h>

namespace weft::tools {

struct PageData {
  std::string json;             // safe inside of a <script> element
  std::set<std::string> kinds;  // of the spans that are drawn
  double joined_below =
      0;  // microseconds: shorter spans next to each other are drawn as one; 0 where each is drawn
  int steps_per_bar = 1;         // of the steps' drawing
  std::size_t clipped_bars = 0;  // longer than its axis
  std::set<int> ranks;           // with at least one span in the window
};

// `data`: the time whose spans the page has; `view`: the part of it that is shown first. At most
// `most_spans` are drawn.
PageData page_data(const Run& run, const Summary& summary, const Window& data, const Window& view,
                   std::size_t most_spans);

}  // namespace weft::tools
