// SPDX-License-Identifier: Apache-2.0
// A ring buffer whose memory is mapped twice in a row, so that every part of the ring is
// contiguous.
#pragma once

#include <cstddef>
#include <utility>

#include <weft/base/slice.h>

namespace weft::transport::verbs {

class Mirror {
 public:
  // `bytes` is a multiple of the page size. Throws Busy.
  explicit Mirror(std::size_t bytes);
  ~Mirror();
  Mirror(const Mirror&) = delete;
  Mirror& operator=(const Mirror&) = delete;

  std::size_t bytes() const { return bytes_; }
  // The address of the byte with this number. At least bytes() contiguous bytes follow from there.
  std::byte* at(std::uint64_t position) const { return base_ + position % bytes_; }
  // Both mappings, for registration.
  Slice whole() const { return {base_, 2 * bytes_, weft::Device::host()}; }

 private:
  const std::size_t bytes_;
  std::byte* base_ = nullptr;
};

}  // namespace weft::transport::verbs
