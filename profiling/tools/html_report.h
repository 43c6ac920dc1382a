// SPDX-License-Identifier: Apache-2.0
// Writes a timeline as one HTML page that needs no network: tables, which need no scripts, and
// drawings, which a script in the page makes from data in the page (html_report_data.h,
// page/page.js).
#pragma once

#include <optional>
#include <string>

#include <weft/profiling/tools/summary.h>

namespace weft::tools {

struct Window {  // microseconds
  double begin = 0;
  double end = 0;
};

// The steps in the middle of the run, at most 5; the whole run if no steps are marked.
Window middle_steps(const Run& run);
// The time from 0 to the end of the last rank.
Window whole(const Run& run);
// middle_steps(), or the window that --from and --to give in milliseconds. Throws Caller if that is
// not a time of the run.
Window window_of(const Run& run, std::optional<double> from_ms, std::optional<double> to_ms);

// The page contains the spans of `data` and shows those of `view` first; the drawing of steps has
// all steps. If `data` has too many spans, short ones next to each other are drawn as one, and the
// page says so. `title` is the file's name.
std::string to_html(const Run& run, const Summary& summary, const Window& data, const Window& view,
                    const std::string& title);

}  // namespace weft::tools
