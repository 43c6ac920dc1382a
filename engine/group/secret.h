// SPDX-License-Identifier: Apache-2.0
// ProcessGroupOptions::secret and TLS where a group joins its job and a backend, and what is said
// where there is neither.
#pragma once

#include <string>

#include <weft/engine/group/job.h>
#include <weft/transport/signed_bootstrap.h>
#include <weft/transport/transport.h>

namespace weft::group {

// The group's keys in its present store, over the connection that all groups share. With a secret,
// refuses values that no rank with the same secret has written for this group; without one, refuses
// values of a rank that has one.
transport::SignedBootstrap signed_store_of(const CoreOptions& group);

// With a secret: signs the keys of `join.store`. With a secret or TLS: warns, once a process and
// backend, if the backend leaves its connections to a library that has neither. Without both: says,
// once a process, that the group listens where other machines reach it. `prefix` tells the store's
// keys from those of the group's other communicators.
void guard(transport::JoinOptions& join, transport::Transport& backend, const std::string& prefix);

// Says, once a process for each danger, that `who` listens on an address that other machines reach,
// unless this process has TLS. Others can then do what `danger` says ("join it"), and `option`
// keeps them out. `warns`: of a job's ranks only one warns.
void say_open(const std::string& who, const std::string& address, const std::string& danger,
              const std::string& option, bool warns);

}  // namespace weft::group
