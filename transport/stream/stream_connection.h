// SPDX-License-Identifier: Apache-2.0
// A Connection over any ByteStream. It implements connection.h once; a transport that moves bytes
// implements only ByteStream. docs/wire.md specifies the bytes.
//
// A thread that calls send() writes to the stream while nothing waits in line; otherwise the loop
// writes. Only the loop reads. It reads until the stream has nothing more or until a message waits
// to be accepted. In the latter case the stream need not call `readable` again: the connection
// reads on by itself when the message has been accepted.
//
// Where connection.h leaves a choice:
// - An accept() with wrong destinations fails with Caller, and the message waits for a correct one.
// - Dropping the last reference closes the connection. No handler is called from then on; one that
//   is running goes on.
// - After close() the loop keeps the stream until the peer has ended its side too, at most for
//   `linger`, so that bytes that were sent are not lost with it.
// - Payloads in place lie in host memory.
#pragma once

#include <chrono>
#include <memory>
#include <string>

#include <weft/base/event_loop.h>
#include <weft/transport/byte_stream.h>
#include <weft/transport/connection.h>

namespace weft::transport {

constexpr auto kLinger = std::chrono::seconds(30);

// The connection keeps the loop alive, and starts the stream on it. Throws as ByteStream::start()
// does.
std::shared_ptr<Connection> connect_over(std::unique_ptr<ByteStream> stream,
                                         const Capabilities& capabilities,
                                         std::string transport_name,
                                         std::shared_ptr<EventLoop> loop,
                                         std::chrono::milliseconds linger = kLinger);

}  // namespace weft::transport
