// A descriptor with its owner, and what is done to sockets in more than one place.
#pragma once

#include <utility>

#include <weft/transport/tcp/address.h>
#include <weft/transport/tcp/settings.h>

namespace weft::transport::tcp {

class Socket {
 public:
  explicit Socket(int descriptor = -1) : descriptor_(descriptor) {}
  ~Socket() { reset(); }
  Socket(Socket&& other) noexcept : descriptor_(std::exchange(other.descriptor_, -1)) {}
  Socket& operator=(Socket&& other) noexcept;

  int get() const { return descriptor_; }
  explicit operator bool() const { return descriptor_ >= 0; }
  void reset() noexcept;

 private:
  int descriptor_;
};

// A non-blocking TCP socket; empty, with errno, where there is none to be had.
Socket make_socket(int family) noexcept;

// Of a connected one: small writes leave at once, and the kernel looks whether the other end is still there. Buffers are
// the kernel's business, which grows them as the path needs, except between two processes of one host: there less is on its
// way. What is no TCP socket (a pair of Unix sockets) is left as it is.
void tune(const Socket& socket, const Settings& settings) noexcept;

SocketAddress local_end(const Socket& socket) noexcept;
SocketAddress remote_end(const Socket& socket) noexcept;

}  // namespace weft::transport::tcp
