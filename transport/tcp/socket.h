// SPDX-License-Identifier: Apache-2.0
// Functions for TCP sockets that several files use.
#pragma once

#include <weft/base/descriptor.h>
#include <weft/transport/tcp/address.h>
#include <weft/transport/tcp/settings.h>

namespace weft::transport::tcp {

// Returns a non-blocking TCP socket that sends small writes at once, as sockets that it accepts do;
// empty, with errno, if none can be made.
Descriptor make_socket(int family) noexcept;

// Sets up a connected socket: it sends small writes at once, and the kernel probes whether the
// other end is alive. The kernel sizes the buffers as the path needs, except between two processes
// of one host, where fewer bytes are kept in transit. Does nothing to a socket that is not TCP (a
// pair of Unix sockets).
void tune(const Descriptor& socket, const Settings& settings) noexcept;

SocketAddress local_end(const Descriptor& socket) noexcept;
SocketAddress remote_end(const Descriptor& socket) noexcept;

}  // namespace weft::transport::tcp
