// Together or not at all: what went wrong on one rank is thrown on all. Internal.
#pragma once

#include <exception>
#include <functional>
#include <optional>

#include <weft/base/error.h>
#include <weft/engine/group/process_group.h>

namespace weft::group {

// What was caught, with the first line of its text where it is no Error: libtorch's go on with a
// stack trace.
Error first_line_of(const std::exception_ptr& caught);

// What it throws, so cut.
std::optional<Error> error_of(const std::function<void()>& call);

// Collective. Returns on all ranks where none brings a failure; else throws, on all, that of the
// first rank which does.
void agree(ProcessGroup& group, const std::optional<Error>& failure);

// Collective. All ranks bring the same error; none throws it before all have it, for who throws may
// leave the group by that, and so break it for the others.
[[noreturn]] void throw_together(ProcessGroup& group, const Error& error);

}  // namespace weft::group
