// SPDX-License-Identifier: Apache-2.0
// The GPU cases of transport_bench.
#pragma once

#include <memory>
#include <optional>
#include <string>

#include <weft/base/event_loop.h>
#include <weft/base/slice.h>
#include <weft/profiling/bench/transport_rounds.h>
#include <weft/transport/connection.h>

namespace weft::bench {

// Returns the reason if no GPU can be measured here; otherwise nothing.
std::optional<std::string> why_no_gpu();

// A process's end of connections that carry the first GPU's memory to another process on this
// machine (transport/cuda_ipc).
class GpuLanes {
 public:
  // Throws the errors of opening the GPU.
  static std::shared_ptr<GpuLanes> open();
  virtual ~GpuLanes() = default;
  virtual std::shared_ptr<transport::Connection> over(std::shared_ptr<transport::Connection> below,
                                                      const std::shared_ptr<EventLoop>& loop) = 0;
  // Returns one of an owner's pieces of GPU memory, of at least `bytes`.
  virtual Slice memory(const void* owner, std::size_t piece, std::size_t bytes) = 0;
};

// Returns a participant that copies within the GPU's memory, in one process.
Participant device_copy();

}  // namespace weft::bench
