// SPDX-License-Identifier: Apache-2.0
// Owns a file descriptor, and recognises errno values for a shortage of descriptors or memory.
#pragma once

#include <cerrno>
#include <utility>

#include <unistd.h>

namespace weft {

class Descriptor {
 public:
  Descriptor() = default;
  explicit Descriptor(int number) : number_(number) {}
  Descriptor(Descriptor&& other) noexcept : number_(std::exchange(other.number_, -1)) {}
  Descriptor& operator=(Descriptor&& other) noexcept {
    std::swap(number_, other.number_);
    return *this;
  }
  ~Descriptor() {
    if (number_ >= 0) ::close(number_);
  }
  int get() const { return number_; }
  int release() { return std::exchange(number_, -1); }
  explicit operator bool() const { return number_ >= 0; }

 private:
  int number_ = -1;
};

// True if the errno means that the process or the system is temporarily out of descriptors or
// memory.
inline bool is_shortage(int number) {
  return number == EMFILE || number == ENFILE || number == ENOBUFS || number == ENOMEM;
}

}  // namespace weft
