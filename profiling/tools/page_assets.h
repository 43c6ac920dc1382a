// SPDX-License-Identifier: Apache-2.0
// The style and script that each page contains, made from page/ when Weft is configured.
#pragma once

namespace weft::tools {

extern const char* const kPageStyle;   // page/page.css
extern const char* const kPageScript;  // page/page.js

}  // namespace weft::tools
