// SPDX-License-Identifier: Apache-2.0
// Connections that carry device memory over connections that carry host memory (tcp, shm, inproc).
// They copy through pinned memory, in stream order. Both ends must be made this way:
// transport/staged/staged_frame.h says how messages are written.
//
//   Stage stage({device});  // one for all connections of the process
//   auto connection = staged::over(connector->connect(…), stage, loop);
//
// A stream of the connection waits for a send's `ready` and copies to the host chunk by chunk; each
// chunk is sent on the connection below when its copy is made. Another stream copies arriving
// chunks to destinations on a GPU, after the `ready` of accept(). No call waits. For operations
// that touch device memory, done() is a flag for which streams can wait; it is raised when the last
// copy is made.
//
// Where connection.h leaves a choice:
// - If no stream can wait for a `ready` (a HostFlag), the loop waits for it.
// - If the GPU refuses to copy some device memory at a message's first chunk, only that message
//   fails; at a later chunk the connection ends.
// - A lost GPU ends the connection if a message has been begun. Bytes that were not copied are not
//   sent.
// - Each connection has 8 MiB of pinned memory and two streams on each GPU: see
// transport/staged/staged_communicator.h
//   about CUDA_DEVICE_MAX_CONNECTIONS.
#pragma once

#include <memory>

#include <weft/transport/staged/staging.h>
#include <weft/transport/transport.h>

namespace weft::transport::staged {

// Nobody else may use `below` from then on, and nobody has called its receive(). `loop` is its
// loop. May block for a moment to allocate pinned memory. Throws Busy, Device.
std::shared_ptr<Connection> over(std::shared_ptr<Connection> below, std::shared_ptr<Stage> stage,
                                 const std::shared_ptr<EventLoop>& loop);

// Wraps all connections that `below` connects and accepts.
std::unique_ptr<Connector> over(Connector& below, std::shared_ptr<Stage> stage);

}  // namespace weft::transport::staged
