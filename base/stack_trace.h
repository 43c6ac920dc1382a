// SPDX-License-Identifier: Apache-2.0
// Writes a thread's stack as text, for processes that have crashed. It works in signal handlers: it
// allocates nothing from the heap and takes no lock except the loader's.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>

namespace weft::crash {

// Text for a descriptor, written when the buffer is full and at the end.
class Text {
 public:
  explicit Text(int descriptor) noexcept : descriptor_(descriptor) {}
  ~Text() { flush(); }
  Text(const Text&) = delete;
  Text& operator=(const Text&) = delete;
  Text& operator<<(std::string_view text) noexcept;
  Text& operator<<(std::int64_t number) noexcept;
  Text& hex(std::uintptr_t number) noexcept;  // "0x1f"
  void flush() noexcept;

 private:
  const int descriptor_;
  std::size_t used_ = 0;
  std::array<char, 1024> buffer_{};
};

constexpr std::size_t kMostFrames = 128;

// The addresses of a stack's instructions, innermost first. In a signal handler they include the
// stack that the signal interrupted.
class Stack {
 public:
  // Unwinds the calling thread. It reads the stack's memory and crashes if that is damaged.
  Stack() noexcept;
  // The stack of an instruction outside every function, as after a call of a null pointer, and the
  // address to which that call would have returned.
  Stack(std::uintptr_t address, std::uintptr_t caller) noexcept;
  // Drops the frames before the one at `address`. Returns false if there is no such frame.
  bool begin_at(std::uintptr_t address) noexcept;
  std::span<const std::uintptr_t> frames() const noexcept {
    return {frames_.data() + first_, count_ - first_};
  }
  bool is_cut() const noexcept { return count_ == frames_.size(); }

 private:
  std::array<std::uintptr_t, kMostFrames> frames_{};
  std::size_t first_ = 0;
  std::size_t count_ = 0;
};

enum class Names {
  Functions,  // if the binaries or their debug files contain them
  Modules,    // files and offsets only
};

// Writes one line for each frame.
void write_stack(Text& text, const Stack& stack, Names names) noexcept;

}  // namespace weft::crash
