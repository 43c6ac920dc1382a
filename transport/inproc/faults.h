// SPDX-License-Identifier: Apache-2.0
// Streams between two engines of a process, and the faults that a test injects between them.
//
//   auto streams = inproc::make_streams();
//   streams.a_to_b.cut_at(100);              // b reads 100 bytes of a's and then finds the end
//   auto a = connect_over(std::move(streams.a), capabilities(), "inproc", loop);
//
// Positions count the bytes of one direction from its beginning, including the preamble. Each fault
// may be set before or while bytes flow. Thread-safe.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>

#include <weft/transport/byte_stream.h>
#include <weft/transport/connection.h>

namespace weft::transport::inproc {

class Pipe;

class Faults {
 public:
  explicit Faults(std::shared_ptr<Pipe> pipe) : pipe_(std::move(pipe)) {}

  // Hides the bytes from this position on from the reader, until release().
  void hold_at(std::uint64_t position) const;
  void release() const;
  // The reader finds the end instead of this byte, as if the writer had died.
  void cut_at(std::uint64_t position) const;
  void cut_at(std::uint64_t position, const Error& why) const;
  // Inverts all bits of this byte.
  void corrupt(std::uint64_t position) const;
  // Lets no call read, write or show more than this many bytes.
  void move_at_most(std::size_t bytes) const;
  // Sends bytes that are written from now on over a link of this speed (0: no limit), which
  // delivers them this much later.
  void slow_down(std::chrono::nanoseconds delay, double bytes_per_second) const;
  // Returns how many bytes the writer has written so far.
  std::uint64_t written() const;

 private:
  std::shared_ptr<Pipe> pipe_;
};

struct Streams {
  std::unique_ptr<ByteStream> a;
  std::unique_ptr<ByteStream> b;
  Faults a_to_b;
  Faults b_to_a;
};

constexpr std::size_t kRingBytes = 256 << 10;

// Each stream's peer() is the name of the other.
Streams make_streams(std::size_t ring_bytes = kRingBytes, const std::string& name_of_a = "a",
                     const std::string& name_of_b = "b");
Capabilities capabilities();

// Calls `show` for every connection that engines of this process make over inproc from now on, on
// the thread that makes it, before anything is sent. `there` is the direction from its maker. An
// empty function ends this; there is one function at a time.
void on_link(std::function<void(const Faults& there, const Faults& back)> show);

}  // namespace weft::transport::inproc
