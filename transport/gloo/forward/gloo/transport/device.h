// SPDX-License-Identifier: Apache-2.0
#pragma once

namespace gloo::transport {
class Device;
// c10d's SendWork and RecvWork have a unique_ptr to it, and every file that includes them compiles
// their destructors.
class UnboundBuffer {
 public:
  virtual ~UnboundBuffer() = 0;
};
}  // namespace gloo::transport
