// SPDX-License-Identifier: Apache-2.0
// The store in which the nodes of a job meet: c10d's TCPStore. The first weft-run on the machine
// with the endpoint's address hosts it.
#pragma once

#include <weft/engine/launch/job.h>

namespace weft::launch {

// Hosts the store at the endpoint if that is an address of this machine and no other process hosts
// it; otherwise connects to it. Blocks for at most the join timeout. Throws Timeout, and Caller for
// a host that has no address.
OpenedStore open_tcp_store(const Options& options);

}  // namespace weft::launch
