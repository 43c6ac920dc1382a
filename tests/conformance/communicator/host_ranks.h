// SPDX-License-Identifier: Apache-2.0
// A rank on the host: memory of its process, and gates that are flags.
#pragma once

#include <cstring>

#include <weft/tests/conformance/communicator/ranks.h>

namespace weft::conformance {

class HostMemory final : public Memory {
 public:
  explicit HostMemory(std::size_t bytes) : bytes_(bytes) {}
  Slice slice() const override {
    return {const_cast<std::byte*>(bytes_.data()), bytes_.size(), Device::host()};
  }
  void write(const void* from) override {
    if (!bytes_.empty()) std::memcpy(bytes_.data(), from, bytes_.size());
  }
  void read(void* to) override {
    if (!bytes_.empty()) std::memcpy(to, bytes_.data(), bytes_.size());
  }

 private:
  std::vector<std::byte> bytes_;
};

inline void equip_host(Rank& rank) {
  rank.allocate = [](std::size_t bytes) { return std::make_shared<HostMemory>(bytes); };
  rank.gate = [] {
    const auto flag = std::make_shared<HostFlag>();
    return Gate{Fence(flag), [flag] { flag->raise(); }};
  };
}

}  // namespace weft::conformance
