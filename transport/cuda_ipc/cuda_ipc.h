// SPDX-License-Identifier: Apache-2.0
// Connections that carry device memory between processes of one host: a stream of the receiver
// reads the memory where it is. They run over connections (shm) that carry everything else. Both
// ends must be made this way.
//
//   auto stage = std::make_shared<staged::Stage>(devices);  // one for all connections of a process
//   auto connection = cuda_ipc::over(connector->connect(…), stage, loop);
//
// send() records an event after `ready` and sends a message at once that only names the memory.
// accept() makes a stream of the receiver wait for that event and for its own `ready`, and copy. So
// no host thread waits between the sender's kernel and the receiver's. The done() of the accept is
// a flag that the copying stream raises. The done() of the send passes when the copy has been made
// and both loops have seen that.
//
// Two kinds of memory can be shared: memory of cuMemAlloc, and memory of virtual addresses
// (cuMemMap; PyTorch's expandable segments) that was created shareable by descriptor. A payload of
// the latter may span several segments.
//
// Payloads that cannot be shared are sent by the connection below, if it carries device memory
// (over staged::over()); else their send fails with Unsupported and the reason. They are: payloads
// to a peer on another host, in another container or in this very process; between GPUs without
// peer-to-peer access; in memory of stream-ordered pools; in memory of a second GPU in one message;
// of more pieces (allocations, segments) than max_payloads in one message; in memory of virtual
// addresses if no folder for temporary files is writable.
//
// Where connection.h leaves a choice:
// - If no stream can see a `ready` fence (a HostFlag), the loop waits for it instead.
// - A destination on the host is filled through a pinned chunk.
// - An operation that fails keeps its memory pinned until the peer does not read it any more.
// - Opening an allocation, at its first message, may wait for the device.
// - Memory of virtual addresses that was sent stays allocated, even if the program has unmapped it,
//   until the connection ends or memory that is later mapped at that address is sent; on the
//   reading side, until that device's retirement is reclaimed.
#pragma once

#include <memory>

#include <weft/cuda/ipc.h>
#include <weft/transport/cuda_ipc/wire.h>
#include <weft/transport/staged/staging.h>
#include <weft/transport/transport.h>

namespace weft::transport::cuda_ipc {

// Whether over() may be applied to this connection. True for shm, where the kernel has shown that
// the peer belongs to this user: a stranger must not name processes whose memory is opened here.
bool fits(const Connection& below);

// Takes over `below`, on which receive() must not have been called. `loop` is its loop. `here`
// describes this process to the peer. Throws Busy, Device, Unsupported (more than kMaxGpus GPUs).
std::shared_ptr<Connection> over(std::shared_ptr<Connection> below,
                                 std::shared_ptr<staged::Stage> stage,
                                 const std::shared_ptr<EventLoop>& loop,
                                 const Identity& here = Identity::here());

}  // namespace weft::transport::cuda_ipc
