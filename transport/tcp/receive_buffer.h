// SPDX-License-Identifier: Apache-2.0
// Bytes that were read ahead from a socket, in one contiguous piece. The memory is allocated when
// first needed.
#pragma once

#include <algorithm>
#include <cstring>
#include <memory>
#include <span>

namespace weft::transport::tcp {

class ReceiveBuffer {
 public:
  explicit ReceiveBuffer(std::size_t bytes) : capacity_(bytes) {}

  std::size_t capacity() const { return capacity_; }
  bool has_memory() const { return memory_ != nullptr; }
  std::span<const std::byte> content() const { return {memory_.get() + begin_, end_ - begin_}; }
  bool empty() const { return begin_ == end_; }

  // Returns free space behind the content. Content and space together have at least `wanted` bytes
  // (at most the capacity).
  std::span<std::byte> room(std::size_t wanted) {
    if (!memory_) memory_.reset(new std::byte[capacity_]);
    if (empty()) begin_ = end_ = 0;
    if (begin_ + std::min(wanted, capacity_) > capacity_) {
      std::memmove(memory_.get(), memory_.get() + begin_, end_ - begin_);
      end_ -= begin_;
      begin_ = 0;
    }
    return {memory_.get() + end_, capacity_ - end_};
  }
  void filled(std::size_t bytes) { end_ += bytes; }

  void consume(std::size_t bytes) { begin_ += std::min(bytes, end_ - begin_); }
  std::size_t take(std::span<std::byte> to) {
    const std::size_t bytes = std::min(to.size(), end_ - begin_);
    if (bytes > 0) std::memcpy(to.data(), memory_.get() + begin_, bytes);
    begin_ += bytes;
    return bytes;
  }
  // Frees the memory if the buffer is empty.
  void release() {
    if (!empty()) return;
    memory_.reset();
    begin_ = end_ = 0;
  }

 private:
  std::size_t capacity_;
  std::unique_ptr<std::byte[]> memory_;
  std::size_t begin_ = 0;
  std::size_t end_ = 0;
};

}  // namespace weft::transport::tcp
