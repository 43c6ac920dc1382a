// What is done to TCP sockets in more than one place.
#pragma once

#include <weft/base/descriptor.h>
#include <weft/transport/tcp/address.h>
#include <weft/transport/tcp/settings.h>

namespace weft::transport::tcp {

// A non-blocking TCP socket; empty, with errno, where there is none to be had.
Descriptor make_socket(int family) noexcept;

// Of a connected one: small writes leave at once, and the kernel looks whether the other end is
// still there. Buffers are the kernel's business, which grows them as the path needs, except
// between two processes of one host: there less is on its way. What is no TCP socket (a pair of
// Unix sockets) is left as it is.
void tune(const Descriptor& socket, const Settings& settings) noexcept;

SocketAddress local_end(const Descriptor& socket) noexcept;
SocketAddress remote_end(const Descriptor& socket) noexcept;

}  // namespace weft::transport::tcp
