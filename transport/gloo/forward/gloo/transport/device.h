#pragma once

namespace gloo::transport {
class Device;
// unique_ptr of it is a member of c10d's SendWork and RecvWork, whose destructors are compiled
// wherever they are seen.
class UnboundBuffer {
 public:
  virtual ~UnboundBuffer() = 0;
};
}  // namespace gloo::transport
