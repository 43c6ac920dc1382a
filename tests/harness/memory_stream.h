// SPDX-License-Identifier: Apache-2.0
// A ByteStream that costs almost nothing, so that a bench measures only the connection: it accepts
// all writes, and delivers the bytes that the caller hands to it.
#pragma once

#include <algorithm>
#include <cstring>
#include <vector>

#include <weft/transport/byte_stream.h>

namespace weft::harness {

class MemoryStream final : public transport::ByteStream {
 public:
  std::string peer() const override { return "memory"; }
  void start(EventLoop&, std::function<void()> readable, std::function<void()>) override {
    readable_ = std::move(readable);
  }
  void stop() noexcept override {}

  std::size_t write(std::span<const Bytes> pieces) noexcept override {
    std::size_t bytes = 0;
    for (const Bytes& piece : pieces) {
      if (written_ + piece.size() > sink_.size()) written_ = 0;
      const std::size_t part = std::min(piece.size(), sink_.size());
      if (part > 0) std::memcpy(&sink_[written_], piece.data(), part);
      written_ += part;
      bytes += piece.size();
    }
    return bytes;
  }
  Bytes peek(std::size_t) noexcept override { return come_; }
  void consume(std::size_t bytes) noexcept override { come_ = come_.subspan(bytes); }
  std::size_t read(std::span<std::byte> to) noexcept override {
    const std::size_t count = std::min(to.size(), come_.size());
    if (count > 0) std::memcpy(to.data(), come_.data(), count);
    come_ = come_.subspan(count);
    return count;
  }
  std::size_t window() const override { return std::size_t{1} << 30; }
  std::optional<Error> end() const noexcept override { return std::nullopt; }
  void finish_writing() noexcept override {}

  // Delivers these bytes. Call it on the loop; the caller keeps the bytes alive.
  void deliver(Bytes bytes) {
    come_ = bytes;
    readable_();
  }

 private:
  std::vector<std::byte> sink_ = std::vector<std::byte>(64 << 10);
  std::size_t written_ = 0;
  Bytes come_;
  std::function<void()> readable_;
};

}  // namespace weft::harness
