// Lanes that carry device memory, over lanes that carry host memory (tcp, shm, inproc), through
// pinned memory and in the order of streams. Both ends are made so: messages are written as
// transport/staged_frame.h says.
//
//   Stage stage({device});                                     // one for all lanes of the process
//   auto lane = staged::over(connector->connect(…), stage, loop);
//
// A send waits for `ready` on a stream of the lane's, which copies to the host chunk by chunk; each
// goes to the lane below when its copy is made. Chunks that come are copied to a destination on a
// GPU by another stream, behind the `ready` of accept(). No call waits for anything. done() of what
// touches device memory is a flag that streams can wait for, raised when the last copy is made.
//
// Where connection.h leaves a choice:
// - A `ready` that no stream can see (a HostFlag) is awaited by the loop instead.
// - Device memory that the GPU refuses to copy fails its message alone, if the first chunk shows
// it; later the lane ends.
// - A lost GPU ends the lane of a message that has been begun. Nothing is sent of what was not
// copied.
// - Each lane has 8 MiB of pinned memory, and two streams on each GPU: see transport/staged.h for
// what that asks of
//   CUDA_DEVICE_MAX_CONNECTIONS.
#pragma once

#include <memory>

#include <weft/transport/staging.h>
#include <weft/transport/transport.h>

namespace weft::transport::staged {

// The lane is the result's alone from then on; receive() has not been called on it. `loop` is its
// loop. May block for a moment, where pinned memory must be taken; throws Busy, Device.
std::shared_ptr<Connection> over(std::shared_ptr<Connection> below, std::shared_ptr<Stage> stage,
                                 const std::shared_ptr<EventLoop>& loop);

// The same for all that `below` connects and accepts.
std::unique_ptr<Connector> over(Connector& below, std::shared_ptr<Stage> stage);

}  // namespace weft::transport::staged
