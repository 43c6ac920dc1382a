// SPDX-License-Identifier: Apache-2.0
// The bytes of one TCP connection. The socket is watched edge-triggered, once, for everything: in
// steady state a message costs one system call on each side, and a reader that has no room for more
// is not called repeatedly. So `readable` reports only new bytes; a reader that stopped early must
// go on by itself.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include <weft/transport/byte_stream.h>
#include <weft/transport/tcp/address.h>
#include <weft/transport/tcp/greeting.h>
#include <weft/transport/tcp/settings.h>
#include <weft/transport/tcp/socket.h>
#include <weft/transport/tls/socket.h>

namespace weft::transport::tcp {

class TcpStream final : public ByteStream {
 public:
  // Takes a connected stream socket, after the handshake if it speaks TLS. `loop`, which start()
  // receives again, runs the work that has no caller: connecting, and checking the peer.
  TcpStream(const std::shared_ptr<EventLoop>& loop, tls::Socket socket, const std::string& peer,
            const Settings& settings, const Stripe& stripe = {});
  // Connects to one of the address's hosts until the deadline; see Dial. Returns the sockets of one
  // connection, Settings::sockets of them: all connect or none.
  static std::vector<std::unique_ptr<TcpStream>> dial(const std::shared_ptr<EventLoop>& loop,
                                                      const Address& address, Deadline deadline,
                                                      const Settings& settings,
                                                      bool refusal_ends = false);
  ~TcpStream() override;

  std::string peer() const override;
  void start(EventLoop& loop, std::function<void()> readable,
             std::function<void()> writable) override;
  void stop() noexcept override;
  std::size_t write(std::span<const Bytes> pieces) noexcept override;
  Bytes peek(std::size_t wanted) noexcept override;
  void consume(std::size_t bytes) noexcept override;
  std::size_t read(std::span<std::byte> to) noexcept override;
  std::size_t window() const override;
  std::optional<Error> end() const noexcept override;
  std::optional<Error> write_end() const noexcept override;
  void finish_writing() noexcept override;

  // For a StripedStream, which does not read from every socket when `readable` is called. Called by
  // the reader: frees memory that has not been needed for a while.
  void rest() noexcept;
  // Makes every read ask the kernel from now on, whether or not an event announced bytes.
  void read_through() noexcept;
  // Calls `writable` in a later turn, without an event from the kernel. Called by the writer.
  void write_on() noexcept;
  // Returns why nothing moves in either direction any more, as soon as the kernel knows it; there
  // may still be bytes to read. Empty if the peer has only ended its side. Thread-safe.
  std::optional<Error> cut() noexcept;

 private:
  class Core;
  explicit TcpStream(std::shared_ptr<Core> core) : core_(std::move(core)) {}
  std::shared_ptr<Core> core_;  // shared with the loop's handlers
};

}  // namespace weft::transport::tcp
