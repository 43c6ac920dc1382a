// A Connection over any ByteStream: the semantics of connection.h live here, once, and a transport
// that moves bytes has only those to move. The bytes are those of docs/wire.md.
//
// The stream is written by whoever calls send() while nothing waits in line, else by the loop; only
// the loop reads it. It is read until it has nothing, or until a message waits to be accepted: then
// the stream need not call `readable` again, the connection looks by itself when the message has
// been accepted.
//
// Where connection.h leaves a choice:
// - An accept() with the wrong destinations fails with Caller, and the message waits on for a right
// one.
// - Who drops the last reference closes the lane; no handler is called from then on. One that is
// running goes on.
// - After close() the stream is kept until the peer has ended its side too, so that what was sent
// is not lost with it; the
//   loop keeps it then, for the linger at most.
// - Memory that messages lie in is host memory.
#pragma once

#include <chrono>
#include <memory>
#include <string>

#include <weft/base/event_loop.h>
#include <weft/transport/byte_stream.h>
#include <weft/transport/connection.h>

namespace weft::transport {

constexpr auto kLinger = std::chrono::seconds(30);

// The connection shares the loop, and starts the stream on it. Throws what ByteStream::start()
// throws.
std::shared_ptr<Connection> connect_over(std::unique_ptr<ByteStream> stream,
                                         const Capabilities& capabilities,
                                         std::string transport_name,
                                         std::shared_ptr<EventLoop> loop,
                                         std::chrono::milliseconds linger = kLinger);

}  // namespace weft::transport
