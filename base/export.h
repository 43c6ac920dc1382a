// SPDX-License-Identifier: Apache-2.0
// WEFT_API marks what libweft.so exports: what users call, what templates and inline functions of
// public headers call, and classes whose objects are thrown. All other symbols of Weft are hidden
// (cmake/libweft.map).
#pragma once

#define WEFT_API [[gnu::visibility("default")]]
