// Which executor's thread this is, whatever call it works for.
#pragma once

#include <weft/engine/future/executor.h>

namespace weft::detail {

// Who blocks here tells it, for another thread to take over. Null on threads of nobody's; set by
// the executor.
Executor*& thread_executor();

}  // namespace weft::detail
