// SPDX-License-Identifier: Apache-2.0
// Checksums of a checkpoint's bytes, which find accidental damage. One thread at a time. Internal.
#pragma once

#include <cstddef>
#include <memory>
#include <string>
#include <string_view>

namespace weft::checkpoint {

enum class Algorithm {
  // XXH3 with 128 bits, as `xxh128sum` prints it. It is faster than memory and disks.
  Xxh3,
  // Earlier checkpoints have it; they still load.
  Sha256,
};

// "xxh3-128" or "sha256", as manifests name it.
std::string_view name_of(Algorithm algorithm);
// Throws Caller for another name.
Algorithm algorithm_of(std::string_view name);

class Checksum {
 public:
  explicit Checksum(Algorithm algorithm);
  Checksum(Checksum&&) noexcept;
  Checksum& operator=(Checksum&&) noexcept;
  ~Checksum();
  void add(const void* data, std::size_t bytes);
  // The checksum in hexadecimal. add() must not be called afterwards.
  std::string text();

 private:
  struct State;
  std::unique_ptr<State> state_;
};

std::string checksum_of(Algorithm algorithm, const void* data, std::size_t bytes);

}  // namespace weft::checkpoint
