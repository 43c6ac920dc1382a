// Collectives and messages over the connections of any transport. A backend that has a Connector
// joins by one line:
//
//   std::shared_ptr<Communicator> join(const JoinOptions& options) override { return
//   mesh::join(*this, options); }
//
// Host memory only: the engine stages device memory, see staged.h.
#pragma once

#include <weft/transport/mesh/choose.h>
#include <weft/transport/transport.h>

namespace weft::transport::mesh {

// Collective: returns when all ranks have joined. Every rank listens, says where in the store, and
// connects to the lower ones. Blocks until the deadline (options.timeout); not from inside a turn
// of the loop. Throws Timeout, which names who did not come, PeerLost, and what the connector
// throws.
std::shared_ptr<Communicator> join(Transport& transport, const JoinOptions& options,
                                   const Chooser& chooser = choose);

}  // namespace weft::transport::mesh
