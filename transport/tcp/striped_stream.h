// SPDX-License-Identifier: Apache-2.0
// One stream over several sockets, for networks in which a single TCP connection does not get all
// the bandwidth: a cloud that caps each flow, links that are bonded by flow, a path so long that
// one window does not fill it.
//
// The stream is cut into chunks of kChunk bytes; chunk k travels on socket k modulo their number.
// So both ends know where each byte is: the format adds no bytes, nothing has to be reordered, and
// users see an ordinary stream. A message that fits into the rest of a chunk uses one socket.
//
// Reading and writing proceed from chunk to chunk and wait for the socket whose turn it is.
// Meanwhile the other sockets move the chunks that they were given, if they have room for one: so a
// chunk is about as large as the buffers at both ends of a new socket together. Each chunk costs
// two system calls and an event. (Compared over flows that the kernel paces: 64 KiB costs more than
// fast flows gain, 256 KiB takes longer to get going.)
//
// A clean end arrives on all sockets and is noticed on the socket whose turn it is. A lost socket
// ends the stream as soon as the reader has nothing more to read, whichever socket has its turn. If
// only one socket ends cleanly (something between the two ends did that), the stream ends at its
// turn.
#pragma once

#include <memory>
#include <vector>

#include <weft/transport/tcp/tcp_stream.h>

namespace weft::transport::tcp {

class StripedStream final : public ByteStream {
 public:
  static constexpr std::size_t kChunk = 128 << 10;

  // At least two sockets, in the same order on both ends.
  explicit StripedStream(std::vector<std::unique_ptr<TcpStream>> sockets);

  std::string peer() const override;
  void start(EventLoop& loop, std::function<void()> readable,
             std::function<void()> writable) override;
  void stop() noexcept override;
  std::size_t write(std::span<const Bytes> pieces) noexcept override;
  // Shows nothing beyond the end of a chunk.
  Bytes peek(std::size_t wanted) noexcept override;
  void consume(std::size_t bytes) noexcept override;
  std::size_t read(std::span<std::byte> to) noexcept override;
  std::size_t window() const override;
  std::optional<Error> end() const noexcept override;
  std::optional<Error> write_end() const noexcept override;
  void finish_writing() noexcept override;

 private:
  // The position of one direction.
  struct Turn {
    std::size_t socket = 0;
    std::size_t left = kChunk;
  };
  TcpStream& at(const Turn& turn) const { return *(*sockets_)[turn.socket]; }
  void advance(Turn& turn, std::size_t bytes) const;
  // Called when the reader found nothing. Returns whether to read again, because a socket was lost
  // meanwhile.
  bool looks_again();

  const std::shared_ptr<const std::vector<std::unique_ptr<TcpStream>>>
      sockets_;  // shared by start()
  Turn writing_;
  std::vector<Bytes> parts_;  // the writer's scratch, whose memory is reused
  Turn reading_;
  bool dry_ = false;           // the reader found less than it wanted at its position
  std::optional<Error> lost_;  // set once the reader knows that a socket is lost
};

// Makes one stream of a connection's sockets; a single socket is used directly.
std::unique_ptr<ByteStream> as_one(std::vector<std::unique_ptr<TcpStream>> sockets);

}  // namespace weft::transport::tcp
