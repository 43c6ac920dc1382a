// The store in which the nodes of a job meet: c10d's TCPStore, hosted by the first weft-run that
// the endpoint's address belongs to.
#pragma once

#include <weft/engine/launch/job.h>

namespace weft::launch {

// Hosts the store at the endpoint where that is an address of this machine and nobody does, else
// connects to it. Blocks for at most the join timeout; throws Timeout, Caller for a host that has
// no address.
OpenedStore open_tcp_store(const Options& options);

}  // namespace weft::launch
