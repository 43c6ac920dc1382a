// The bytes of one TCP connection. The socket is watched edge-triggered, once, for everything: in
// steady state a message costs one system call on each side, and a reader that has no room for more
// is not called again and again. So `readable` comes for what is new; who stopped reading early
// goes on by itself.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include <weft/transport/byte_stream.h>
#include <weft/transport/tcp/address.h>
#include <weft/transport/tcp/greeting.h>
#include <weft/transport/tcp/settings.h>
#include <weft/transport/tcp/socket.h>

namespace weft::transport::tcp {

class TcpStream final : public ByteStream {
 public:
  // Over a connected stream socket. The loop, which start() is given again, does what must be done
  // without a caller: connecting, and looking after the peer.
  TcpStream(const std::shared_ptr<EventLoop>& loop, Descriptor socket, const std::string& peer,
            const Settings& settings, const Part& part = {});
  // Connects to one of the address's hosts until the deadline; see Dial. The sockets of one lane,
  // Settings::sockets of them: all connect or none.
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

  // For a stream that is made of several of these (StripedStream), and so does not read from each
  // when it is told to. The reader's: gives back memory that has not been needed for a while.
  void rest() noexcept;
  // Every read looks for more from now on, whether or not an event has told of it.
  void read_through() noexcept;
  // `writable` is called in a later turn, without anything that has come from the kernel. For the
  // writer.
  void write_on() noexcept;
  // Why nothing more moves either way, as soon as the kernel knows it, though there may be more to
  // read. Nothing where the peer has only ended its side. For every thread.
  std::optional<Error> cut() noexcept;

 private:
  class Core;
  explicit TcpStream(std::shared_ptr<Core> core) : core_(std::move(core)) {}
  std::shared_ptr<Core> core_;  // the loop's handlers own it as well
};

}  // namespace weft::transport::tcp
