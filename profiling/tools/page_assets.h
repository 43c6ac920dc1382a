// What stands in each page as it is in page/: made into text when Weft is configured.
#pragma once

namespace weft::tools {

extern const char* const kPageStyle;   // page/page.css
extern const char* const kPageScript;  // page/page.js

}  // namespace weft::tools
