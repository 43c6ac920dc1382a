// SPDX-License-Identifier: Apache-2.0
#include <cstddef>
#include <vector>

#include <gtest/gtest.h>

#include <weft/base/large_copy.h>

namespace weft {
namespace {

std::byte pattern(std::size_t at) { return static_cast<std::byte>(at * 31 + at / 256); }

// Copies within larger arrays, and expects that the bytes before and behind stay.
void expect_copied(std::size_t from_offset, std::size_t to_offset, std::size_t bytes) {
  constexpr std::size_t kMore = 256;
  std::vector<std::byte> from(bytes + kMore), to(bytes + kMore, std::byte{7});
  for (std::size_t i = 0; i < from.size(); ++i) from[i] = pattern(i);
  copy_past_caches(to.data() + to_offset, from.data() + from_offset, bytes);
  for (std::size_t i = 0; i < to.size(); ++i) {
    const bool is_copied = i >= to_offset && i < to_offset + bytes;
    ASSERT_EQ(to[i], is_copied ? pattern(i - to_offset + from_offset) : std::byte{7})
        << "byte " << i << " of " << bytes << " from +" << from_offset << " to +" << to_offset;
  }
}

TEST(LargeCopy, CopiesAnySizeBetweenAnyAddresses) {
  for (const std::size_t bytes : {0, 1, 15, 63, 64, 65, 127, 128, 200, 4096, 100001}) {
    for (const std::size_t from : {0, 1, 8, 33}) {
      for (const std::size_t to : {0, 1, 16, 63}) expect_copied(from, to, bytes);
    }
  }
}

TEST(LargeCopy, OfNothingNeedsNoAddresses) { copy_past_caches(nullptr, nullptr, 0); }

}  // namespace
}  // namespace weft
