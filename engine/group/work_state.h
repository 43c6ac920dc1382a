// SPDX-License-Identifier: Apache-2.0
// The state that the handles of one operation (work.h) share. Internal.
#pragma once

#include <atomic>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include <c10/core/Device.h>
#include <c10/core/Stream.h>

#include <weft/base/error.h>
#include <weft/base/op.h>
#include <weft/engine/group/wait.h>
#include <weft/engine/group/work.h>

namespace weft::group {

// Puts the operation's name in front of an error, once: a backend's text already begins with
// "all_reduce on group 'x' (shm, rank 0 of 2): ". `place`: keeps the place that such a text names.
Error named(const Error& error, const std::string& what, bool place = true);

struct WorkState {
  std::shared_ptr<Core> core;
  Wait wait;                 // this operation
  std::string_view backend;  // of the communicator
  c10::Device device = c10::Device(c10::kCPU);
  bool host_waits = true;
  bool is_captured = false;  // captured into a CUDA graph
  std::vector<Op> ops;
  std::atomic<bool> seen{false};

  ~WorkState();
  std::optional<Error> error() const;
  Error told(const Error& error) const;
  bool done() const;
  // Makes the stream, which is on the tensors' device, wait. Throws if the operation has failed
  // already.
  void wait_on(const c10::Stream& stream);
};

}  // namespace weft::group
