// SPDX-License-Identifier: Apache-2.0
// The version of Weft: the macros say which headers a program was compiled with, version() which
// library it runs with. CMakeLists.txt reads the three numbers, so this file is the only place that
// states them. Any thread.
#pragma once

#include <string>

#include <weft/base/export.h>

// The first number of the version of the headers.
#define WEFT_VERSION_MAJOR 0
// The second number of the version of the headers.
#define WEFT_VERSION_MINOR 1
// The third number of the version of the headers.
#define WEFT_VERSION_PATCH 0

// "MAJOR.MINOR.PATCH". Two steps, because # quotes its argument before that is expanded.
#define WEFT_VERSION_QUOTE_(major, minor, patch) #major "." #minor "." #patch
#define WEFT_VERSION_TEXT_(major, minor, patch) WEFT_VERSION_QUOTE_(major, minor, patch)
// The version of the headers as a string: "MAJOR.MINOR.PATCH".
#define WEFT_VERSION WEFT_VERSION_TEXT_(WEFT_VERSION_MAJOR, WEFT_VERSION_MINOR, WEFT_VERSION_PATCH)

namespace weft {

// The WEFT_VERSION that the library was compiled with. A string, so that == compares the text and
// not an address.
WEFT_API std::string version();

}  // namespace weft
