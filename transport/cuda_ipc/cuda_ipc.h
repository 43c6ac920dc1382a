// Lanes that carry device memory between processes of one host by letting the receiver's stream
// read it where it is, over lanes that carry everything else (shm). Both ends are made so.
//
//   auto stage = std::make_shared<staged::Stage>(devices);  // one for all lanes of the process
//   auto lane = cuda_ipc::over(connector->connect(…), stage, loop);
//
// A send records an event behind `ready` and goes at once: only the names of the memory travel.
// accept() has a stream of the receiver's wait for that event and for its own `ready`, and copy; so
// no host waits between the sender's kernel and the receiver's, and done() of the accept is a flag
// that the copying stream raises. done() of the send passes when the copy is made and both loops
// have seen it.
//
// What can be shared: memory of cuMemAlloc, and memory of virtual addresses (cuMemMap; PyTorch's
// expandable segments) that was made to be shared by descriptor, of which a payload may span
// several segments.
//
// What cannot be shared goes by the lane below, if that carries device memory (over
// staged::over()), else its send fails with Unsupported and the reason: the peer is on another
// host, in another container, or this very process; no peer-to-peer access between the GPUs; memory
// of stream-ordered pools; memory of a second GPU in one message; more pieces (allocations,
// segments) than max_payloads in one message; memory of virtual addresses where no folder for
// temporary files can be written.
//
// Where connection.h leaves a choice:
// - A `ready` that no stream can see (a HostFlag) is awaited by the loop instead.
// - A destination on the host is filled through a pinned chunk.
// - An operation that fails keeps its memory pinned until the peer does not read it any more.
// - Opening an allocation, at its first message, may wait for the device.
// - Memory of virtual addresses that was sent stays taken, also when the program has unmapped it,
// until the lane ends or
//   what is mapped there next is sent; and where it was read, until that device's retirement is
//   reclaimed.
#pragma once

#include <memory>

#include <weft/cuda/ipc.h>
#include <weft/transport/cuda_ipc/wire.h>
#include <weft/transport/staging.h>
#include <weft/transport/transport.h>

namespace weft::transport::cuda_ipc {

// Whether a lane may have one above it: those of shm, whose peers the kernel has shown to be this
// user's. A stranger must not name processes whose memory is opened here.
bool fits(const Connection& below);

// The lane is the result's alone from then on; receive() has not been called on it. `loop` is its
// loop. `here` is what the peer is told of this process. Throws Busy, Device, Unsupported (more
// than kMaxGpus).
std::shared_ptr<Connection> over(std::shared_ptr<Connection> below,
                                 std::shared_ptr<staged::Stage> stage,
                                 const std::shared_ptr<EventLoop>& loop,
                                 const Identity& here = Identity::here());

}  // namespace weft::transport::cuda_ipc
