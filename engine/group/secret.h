// SPDX-License-Identifier: Apache-2.0
// ProcessGroupOptions::secret and TLS where a group joins a backend.
#pragma once

#include <string>

#include <weft/transport/transport.h>

namespace weft::group {

// With a secret: signs the keys of `join.store`. With a secret or TLS: warns, once a process and
// backend, if the backend leaves its connections to a library that has neither. Without both: says,
// once a process, that the group listens where other machines reach it. `prefix` tells the store's
// keys from those of the group's other communicators.
void guard(transport::JoinOptions& join, transport::Transport& backend, const std::string& prefix);

}  // namespace weft::group
