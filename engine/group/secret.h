// SPDX-License-Identifier: Apache-2.0
// ProcessGroupOptions::secret where a group joins a backend.
#pragma once

#include <string>

#include <weft/transport/transport.h>

namespace weft::group {

// With a secret: signs the keys of `join.store`, and warns, once a process and backend, if the
// backend leaves its connections to a library that does not ask for it. Without one: logs, once a
// process, that the group listens where other machines reach it. `prefix` tells the store's keys
// from those of the group's other communicators.
void guard(transport::JoinOptions& join, transport::Transport& backend, const std::string& prefix);

}  // namespace weft::group
