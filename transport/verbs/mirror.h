// Memory that is mapped twice in a row, so that whatever lies in it as a ring is contiguous.
#pragma once

#include <cstddef>
#include <utility>

#include <weft/base/slice.h>

namespace weft::transport::verbs {

class Mirror {
 public:
  // `bytes` is a multiple of the page. Throws Busy.
  explicit Mirror(std::size_t bytes);
  ~Mirror();
  Mirror(const Mirror&) = delete;
  Mirror& operator=(const Mirror&) = delete;

  std::size_t bytes() const { return bytes_; }
  // Where the byte with this number lies, with bytes() of room behind it.
  std::byte* at(std::uint64_t position) const { return base_ + position % bytes_; }
  // Both mappings, as they are registered.
  Slice whole() const { return {base_, 2 * bytes_, weft::Device::host()}; }

 private:
  const std::size_t bytes_;
  std::byte* base_ = nullptr;
};

}  // namespace weft::transport::verbs
