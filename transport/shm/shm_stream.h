// SPDX-License-Identifier: Apache-2.0
// The bytes of a connection through two rings in shared memory. Each side polls the rings in the
// turns of its loop. A side whose loop goes to sleep, or finds nothing here for many turns, says
// so; the other side then wakes it by a byte through the socket on which the segment was passed.
// The end of that socket also reveals the death of the other process, because the kernel closes it.
//
// A piece that is longer than the ring is lent (loan.h) instead if the other process can read this
// one's memory and one copy is faster on this machine (copies.h). A shorter one is not: its sender
// need not wait for the receiver, and both copy at the same time.
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
  // Makes a segment and passes it to the listener at `address`. Ends with Timeout if the listener
  // has not accepted it by the deadline.
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
  bool withdraw(const Error& why) noexcept override;
  // A chunk of a collective, with its front. (What is lent is never shown whole.)
  std::size_t shown_whole() const override { return kRingBytes / 4 + 4096; }
  std::size_t unit() const override { return 64; }
  std::optional<Error> end() const noexcept override;
  std::optional<Error> write_end() const noexcept override;
  void finish_writing() noexcept override;

 private:
  struct Shared;  // all state; shared with handlers that may outlive this object
  std::shared_ptr<Shared> shared_;
  std::optional<Address> address_;
  Deadline deadline_ = Deadline::never();
};

}  // namespace weft::transport::shm
