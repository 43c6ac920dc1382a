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

// Returns how to choose algorithms where rank 0 reaches all others by this transport; "" where it
// needs several. Called on every rank with the same text.
using ChooserOf = std::function<Chooser(const std::string& transport)>;

// A connector with several transports has such a function. The mesh calls it when the connection to
// an address could not be made over one of them. It returns true if connect() uses another one for
// that address from now on.
using Reroute =
    std::function<bool(const std::string& address, const std::string& transport, const Error& why)>;

// Collective: returns when all ranks have joined. Every rank listens and publishes its address in
// the store (meeting.h), unless the options name a parent over this backend: then the ranks know
// each other, connect through its door (door.h), and use no store. A connection is opened when it
// is first needed (openings.h). Blocks for at most options.timeout; must not be called from inside
// a turn of the event loop. Throws Timeout, which names the ranks that did not join, PeerLost,
// Unsupported for a rank that the connector cannot reach, Cancelled if the parent has ended on this
// rank, and the connector's errors.
//
// `backend` names the communicator, unless one transport of the connector leads to all ranks: then
// that transport's name does.
std::shared_ptr<Communicator> join(const std::shared_ptr<Connector>& connector,
                                   const std::string& backend, const JoinOptions& options,
                                   const ChooserOf& chooser_of, const Reroute& reroute = {});
// The same over the transport's connector.
std::shared_ptr<Communicator> join(Transport& transport, const JoinOptions& options,
                                   const Chooser& chooser = choose);

}  // namespace weft::transport::mesh
