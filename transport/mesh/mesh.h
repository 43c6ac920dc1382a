// SPDX-License-Identifier: Apache-2.0
// Collectives and messages over the connections of any transport. A backend that has a Connector
// implements join() with one line:
//
//   std::shared_ptr<Communicator> join(const JoinOptions& options) override {
//     return mesh::join(*this, options);
//   }
//
// Handles host memory only; the engine stages device memory (staged.h).
#pragma once

#include <weft/transport/mesh/choose.h>
#include <weft/transport/transport.h>

namespace weft::transport::mesh {

// Collective: returns when all ranks have joined. Every rank listens, publishes its address in the
// store and connects to all lower ranks. Blocks for at most options.timeout; must not be called
// from inside a turn of the event loop. Throws Timeout, which names the ranks that did not join,
// PeerLost, and the connector's errors.
std::shared_ptr<Communicator> join(Transport& transport, const JoinOptions& options,
                                   const Chooser& chooser = choose);

}  // namespace weft::transport::mesh
