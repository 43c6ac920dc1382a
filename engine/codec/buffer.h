// SPDX-License-Identifier: Apache-2.0
// The bytes that msgpack writes. Grows as needed and does not clear fresh memory.
#pragma once

#include <cstddef>
#include <cstring>
#include <memory>
#include <span>
#include <utility>

namespace weft::codec {

class Buffer {
 public:
  Buffer() = default;
  Buffer(Buffer&& other) noexcept { *this = std::move(other); }
  Buffer& operator=(Buffer&& other) noexcept {
    bytes_ = std::move(other.bytes_);
    size_ = std::exchange(other.size_, 0);
    room_ = std::exchange(other.room_, 0);
    return *this;
  }

  // Called by msgpack::packer.
  void write(const char* data, std::size_t size) {
    if (size > room_ - size_) grow(size);
    std::memcpy(bytes_.get() + size_, data, size);
    size_ += size;
  }
  std::span<const std::byte> bytes() const { return {bytes_.get(), size_}; }
  std::size_t size() const { return size_; }
  const std::byte* data() const { return bytes_.get(); }
  std::byte* mutable_data() { return bytes_.get(); }

 private:
  void grow(std::size_t more) {
    std::size_t room = room_ == 0 ? 256 : room_;
    while (room - size_ < more) room *= 2;
    auto bigger = std::unique_ptr<std::byte[]>(new std::byte[room]);
    if (size_ > 0) std::memcpy(bigger.get(), bytes_.get(), size_);
    bytes_ = std::move(bigger);
    room_ = room;
  }

  std::unique_ptr<std::byte[]> bytes_;
  std::size_t size_ = 0;
  std::size_t room_ = 0;
};

}  // namespace weft::codec
