// SPDX-License-Identifier: Apache-2.0
// The name of a type as C++ spells it, for messages: "weft::Error".
#pragma once

#include <string>
#include <typeinfo>

#include <weft/base/export.h>

namespace weft {

WEFT_API std::string type_name(const std::type_info& type);

}  // namespace weft
