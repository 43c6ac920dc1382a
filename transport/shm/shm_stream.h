// A lane's bytes through two rings in shared memory. Both sides look at the rings in the turns of
// their loops; a side whose loop goes to sleep says so, and is then woken by a byte through the
// socket on which the segment was passed. The end of that socket is also how the death of the other
// process is noticed: the kernel closes it.
#pragma once

#include <memory>

#include <weft/transport/byte_stream.h>
#include <weft/transport/shm/address.h>
#include <weft/transport/shm/segment.h>

namespace weft::transport::shm {

class ShmStream final : public ByteStream {
 public:
  // `socket` is non-blocking and connected to the process that has the other side of the segment.
  ShmStream(Segment segment, Descriptor socket, std::string peer);
  // Makes a segment and passes it to the listener there. Ends with Timeout where that has not
  // accepted it by the deadline.
  ShmStream(const Address& address, Deadline deadline);
  ~ShmStream() override;

  std::string peer() const override;
  void start(EventLoop& loop, std::function<void()> readable,
             std::function<void()> writable) override;
  void stop() noexcept override;
  std::size_t write(std::span<const Bytes> pieces) noexcept override;
  Bytes peek(std::size_t wanted) noexcept override;
  void consume(std::size_t bytes) noexcept override;
  std::size_t read(std::span<std::byte> to) noexcept override;
  std::size_t window() const override { return kRingBytes; }
  std::size_t shown_whole() const override {
    return kRingBytes / 4 + 4096;
  }  // a chunk of a collective, with its front
  std::size_t unit() const override { return 64; }
  std::optional<Error> end() const noexcept override;
  std::optional<Error> write_end() const noexcept override;
  void finish_writing() noexcept override;

 private:
  struct Shared;  // all of it: a handler that runs while this object goes keeps it
  std::shared_ptr<Shared> shared_;
  std::optional<Address> address_;
  Deadline deadline_ = Deadline::never();
};

}  // namespace weft::transport::shm
