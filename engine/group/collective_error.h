// SPDX-License-Identifier: Apache-2.0
// Throws an error of one rank on all ranks. Internal.
#pragma once

#include <exception>
#include <functional>
#include <optional>

#include <weft/base/error.h>
#include <weft/engine/group/process_group.h>

namespace weft::group {

// Returns the caught exception as an Error. If it is another exception, keeps only the first line
// of its text: libtorch's exceptions append a stack trace.
Error first_line_of(const std::exception_ptr& caught);

// Runs `call` and returns its exception as first_line_of() does.
std::optional<Error> error_of(const std::function<void()>& call);

// Collective. Returns on all ranks if no rank passes a failure; else throws, on all ranks, the
// failure of the first rank that does.
void agree(ProcessGroup& group, const std::optional<Error>& failure);

// Collective. All ranks pass the same error. None throws it before all have it, because a rank that
// throws may leave the group by that, and break it for the others.
[[noreturn]] void throw_together(ProcessGroup& group, const Error& error);

}  // namespace weft::group
