// What a rank that cannot join tells those that wait for it. Internal.
#pragma once

#include <weft/base/error.h>
#include <weft/engine/group/core.h>

namespace weft::group {

// The others see it in the store while it lives, however late they come.
void tell_failure(const CoreOptions& options, const Error& error);

}  // namespace weft::group
