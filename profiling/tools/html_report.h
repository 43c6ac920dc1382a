// A timeline as one page of HTML that needs no network: tables, which can be read without scripts,
// and drawings, which a script inside of the page makes from data that is there as well
// (page_data.h, page/page.js).
#pragma once

#include <optional>
#include <string>

#include <weft/profiling/tools/summary.h>

namespace weft::tools {

struct Window {  // microseconds
  double begin = 0;
  double end = 0;
};

// The steps in the middle of the run, at most 5; the whole run where none are marked.
Window middle_steps(const Run& run);
// From 0 to the end of the last rank.
Window whole(const Run& run);
// That, or as asked for, in milliseconds. Throws Caller where that is no time of the run.
Window window_of(const Run& run, std::optional<double> from_ms, std::optional<double> to_ms);

// The page has the spans of `data`, and shows those of `view` first; the steps' drawing has all
// steps. Where `data` holds too many spans, short ones next to each other are drawn as one, and the
// page says so. `title` is the file's name.
std::string to_html(const Run& run, const Summary& summary, const Window& data, const Window& view,
                    const std::string& title);

}  // namespace weft::tools
