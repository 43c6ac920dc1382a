// Collectives of device memory over a communicator of host memory (Gloo), through pinned memory and
// in the order of streams.
//
//   auto on_host = transport->join(options with Device::host());     // on every rank
//   auto on_gpu = staged::over(on_host, device, loop);
//
// An operation is enqueued whole by the caller's thread, which does not wait: one stream waits for
// `ready` and copies the inputs to the host; the host operation starts when they are there; another
// stream waits for its end, by a flag, and copies the outputs back; an event behind that is done().
// A message that is received is copied when it has come, and its done() is a flag. What a failed
// operation was to write is undefined.
//
// A stream that waits for a flag must not stand before another one's copy in the same hardware
// queue: a process with more such streams on a GPU than CUDA_DEVICE_MAX_CONNECTIONS (8; each
// communicator has four) needs more of those.
#pragma once

#include <memory>

#include <weft/base/event_loop.h>
#include <weft/cuda/device.h>
#include <weft/transport/communicator.h>

namespace weft::transport::staged {

// A communicator for slices of `device` with the ranks, operations and name of `host`, whose only
// user it is from then on. `loop` starts the host operations and watches over the copies. Kernels
// must be loaded (Library::preload) before the first operation: streams wait for flags. Blocks for
// a moment; throws Device, Unsupported (a GPU without stream memory operations), Busy.
std::shared_ptr<Communicator> over(std::shared_ptr<Communicator> host,
                                   std::shared_ptr<cuda::Device> device,
                                   std::shared_ptr<EventLoop> loop);

}  // namespace weft::transport::staged
