// SPDX-License-Identifier: Apache-2.0
// The byte stream of a connection over a queue pair. The two ends meet over a TCP connection, where
// they exchange hellos, and keep it: its end shows that the other process has died, which a queue
// pair that has nothing to send does not notice.
#pragma once

#include <memory>
#include <string>

#include <weft/transport/byte_stream.h>
#include <weft/transport/connection.h>
#include <weft/transport/verbs/registration.h>

namespace weft::transport::verbs {

class VerbsStream final : public ByteStream, private PlacedWrites {
 public:
  // `meeting` is a new connection to the peer; it may still be connecting. The peer must send its
  // hello by the deadline. `until_met` is held until it is ready, or until the stream is destroyed.
  // Throws Busy.
  VerbsStream(const Path& path, const std::shared_ptr<RegistrationCache>& registrations,
              std::shared_ptr<Connection> meeting, Deadline deadline, Pin until_met = {});
  ~VerbsStream() override;

  std::string peer() const override;
  void start(EventLoop& loop, std::function<void()> readable,
             std::function<void()> writable) override;
  void stop() noexcept override;
  std::size_t write(std::span<const Bytes> pieces) noexcept override;
  Bytes peek(std::size_t wanted) noexcept override;
  void consume(std::size_t bytes) noexcept override;
  std::size_t read(std::span<std::byte> to) noexcept override;
  std::size_t window() const override;
  bool withdraw(const Error& why) noexcept override;
  Reach reach() const override;
  bool carries(const Slice& memory) const noexcept override;
  PlacedWrites* placed_writes() override { return this; }
  std::optional<Error> end() const noexcept override;
  std::optional<Error> write_end() const noexcept override;
  void finish_writing() noexcept override;

 private:
  Result<std::shared_ptr<MemoryRegion>> expose(const Slice& memory) override;
  Result<bool> put(const RegionKey& to, std::uint64_t offset, Bytes piece) noexcept override;

  // All state. A handler that runs while this object is destroyed keeps it alive.
  struct Shared;
  std::shared_ptr<Shared> shared_;
};

}  // namespace weft::transport::verbs
