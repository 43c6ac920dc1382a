// A timeline as one page of HTML with its drawings inside: it needs no network and no script to be read.
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
// That, or as asked for, in milliseconds. Throws Caller where that is no time of the run.
Window window_of(const Run& run, std::optional<double> from_ms, std::optional<double> to_ms);

// `title` is the file's name; the lanes show what lies in the window.
std::string to_html(const Run& run, const Summary& summary, const Window& window, const std::string& title);

}  // namespace weft::tools
