// Tells ranks that wait for this one why it cannot join. Internal.
#pragma once

#include <weft/base/error.h>
#include <weft/engine/group/job.h>

namespace weft::group {

// Leaves the error in the store: the others find it there while the store lives, however late they
// come.
void tell_failure(const CoreOptions& options, const Error& error);

}  // namespace weft::group
