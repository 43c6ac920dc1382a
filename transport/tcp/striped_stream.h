// One stream over several sockets, for where one connection does not get all that the network has:
// a cloud that caps each flow, links that are bonded by flow, a path so long that one window does
// not fill it.
//
// The stream is cut into chunks of kChunk bytes; chunk k travels on socket k modulo their number.
// So both ends know where each byte is without a word about it: no byte is added, nothing is put in
// order again, and what is above finds a stream like any other. A message that fits into what is
// left of a chunk takes one socket.
//
// Reading and writing go from chunk to chunk and wait for the socket whose turn it is. The others
// are busy meanwhile with the chunks that they have been given, if they have room for one: so a
// chunk is about what the buffers at both ends of a fresh socket hold together. Each costs two
// system calls and an event. (Of 64, 128 and 256 KiB, over flows that the kernel paces, the first
// costs more than fast flows bring, and the last takes longer to get going.)
//
// A clean end comes on all sockets, and is known on the one whose turn it is. One that is lost ends
// the stream as soon as the reader has nothing more to read, whosever turn it is. One that the peer
// has only ended (something between the two did that) does when its turn comes.
#pragma once

#include <memory>
#include <vector>

#include <weft/transport/tcp/tcp_stream.h>

namespace weft::transport::tcp {

class StripedStream final : public ByteStream {
 public:
  static constexpr std::size_t kChunk = 128 << 10;

  // Two at least, in the same order on both ends.
  explicit StripedStream(std::vector<std::unique_ptr<TcpStream>> sockets);

  std::string peer() const override;
  void start(EventLoop& loop, std::function<void()> readable,
             std::function<void()> writable) override;
  void stop() noexcept override;
  std::size_t write(std::span<const Bytes> pieces) noexcept override;
  // Not beyond the end of a chunk.
  Bytes peek(std::size_t wanted) noexcept override;
  void consume(std::size_t bytes) noexcept override;
  std::size_t read(std::span<std::byte> to) noexcept override;
  std::size_t window() const override;
  std::optional<Error> end() const noexcept override;
  std::optional<Error> write_end() const noexcept override;
  void finish_writing() noexcept override;

 private:
  // Where one direction stands.
  struct Turn {
    std::size_t socket = 0;
    std::size_t left = kChunk;
  };
  TcpStream& at(const Turn& turn) const { return *(*sockets_)[turn.socket]; }
  void advance(Turn& turn, std::size_t bytes) const;
  // The reader has found nothing: whether it is to look once more, as a socket was lost meanwhile.
  bool looks_again();

  const std::shared_ptr<const std::vector<std::unique_ptr<TcpStream>>>
      sockets_;  // start() shares them
  Turn writing_;
  std::vector<Bytes> parts_;  // scratch of the writer; keeps its memory
  Turn reading_;
  bool dry_ = false;           // the reader has found less than it wanted where it stands
  std::optional<Error> lost_;  // a socket is, and the reader knows
};

// One lane's sockets as one stream; the only one is a stream as it is.
std::unique_ptr<ByteStream> as_one(std::vector<std::unique_ptr<TcpStream>> sockets);

}  // namespace weft::transport::tcp
