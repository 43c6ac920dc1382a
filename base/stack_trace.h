// The stack of a thread as text, for processes that have crashed: neither allocates from the heap
// nor takes a lock but the loader's, and works in signal handlers.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>

namespace weft::crash {

// Text for a descriptor, written when there is a buffer full of it and at the end.
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

// The addresses of instructions, the innermost first. From a signal handler they lead on into what
// the signal interrupted.
class Stack {
 public:
  // Unwinds the calling thread. Reads its memory, and crashes where that is damaged.
  Stack() noexcept;
  // Of an instruction that no function has, as after a call of a null pointer, and the address to
  // which it would have returned.
  Stack(std::uintptr_t address, std::uintptr_t caller) noexcept;
  // Leaves out the frames before the one at `address`. False if that is not among them.
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
  Functions,  // where the binaries or their debug files tell them
  Modules,    // files and offsets only
};

// A line for each frame.
void write_stack(Text& text, const Stack& stack, Names names) noexcept;

}  // namespace weft::crash
