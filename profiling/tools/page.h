// A timeline as one page of HTML with its drawings inside: it needs no network and no script to be read.
#pragma once

#include <string>

#include <weft/profiling/tools/summary.h>

namespace weft::tools {

struct Window {  // microseconds
  double begin = 0;
  double end = 0;
};

// The steps in the middle of the run, at most 5; the whole run where none are marked.
Window middle_steps(const Run& run);

// `title` is the file's name; the lanes show what lies in the window.
std::string to_html(const Run& run, const Summary& summary, const Window& window, const std::string& title);

}  // namespace weft::tools
