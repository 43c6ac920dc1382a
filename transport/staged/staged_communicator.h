// SPDX-License-Identifier: Apache-2.0
// Collectives of device memory over a communicator of host memory (Gloo). They copy through pinned
// memory, in stream order.
//
//   auto on_host = transport->join(options with Device::host());     // on every rank
//   auto on_gpu = staged::over(on_host, device, loop);
//
// The caller's thread enqueues a whole operation and does not wait. One stream waits for `ready`
// and copies the inputs to the host; the host operation starts when they are there. Another stream
// waits for the end of the host operation, by a flag, and copies the outputs back; an event behind
// these copies is done(). A received message is copied when it has arrived; its done() is a flag.
// After an operation has failed, its outputs are undefined.
//
// A stream that waits for a flag must not come before another stream's copy in the same hardware
// queue. A process that has more such streams on one GPU than CUDA_DEVICE_MAX_CONNECTIONS (default
// 8; each communicator has four) must raise that variable.
#pragma once

#include <memory>

#include <weft/base/event_loop.h>
#include <weft/cuda/device.h>
#include <weft/transport/communicator.h>

namespace weft::transport::staged {

// Returns a communicator for slices of `device`, with the ranks, operations and name of `host`;
// nobody else may use `host` from then on. `loop` starts the host operations and watches the
// copies. Load kernels (Library::preload) before the first operation, because streams wait for
// flags. Blocks for a moment. Throws Device, Unsupported (a GPU without stream memory operations),
// Busy.
std::shared_ptr<Communicator> over(std::shared_ptr<Communicator> host,
                                   std::shared_ptr<cuda::Device> device,
                                   std::shared_ptr<EventLoop> loop);

}  // namespace weft::transport::staged
