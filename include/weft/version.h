// SPDX-License-Identifier: Apache-2.0
// The version of Weft: version() of the library; WEFT_VERSION, WEFT_VERSION_MAJOR, _MINOR and
// _PATCH of these headers.
#pragma once

#include <weft/base/version.h>
