// SPDX-License-Identifier: Apache-2.0
// Names memory on any device without owning it, and keeps it alive.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

namespace weft {

enum class DeviceType : std::uint8_t { Host, Cuda };

struct Device {
  DeviceType type = DeviceType::Host;
  int index = 0;  // CUDA ordinal in this process; 0 for the host

  static Device host() { return {}; }
  static Device cuda(int index) { return {DeviceType::Cuda, index}; }
  bool is_host() const { return type == DeviceType::Host; }
  friend bool operator==(const Device&, const Device&) = default;
};

inline std::string describe(const Device& device) {
  return device.is_host() ? "cpu" : "cuda:" + std::to_string(device.index);
}

struct Slice {
  void* data = nullptr;
  std::size_t bytes = 0;
  Device device;

  // Returns the part [offset, offset + count); the caller checks the range.
  Slice part(std::size_t offset, std::size_t count) const {
    return {static_cast<std::byte*>(data) + offset, count, device};
  }
  friend bool operator==(const Slice&, const Slice&) = default;
};

// Keeps the memory behind a Slice alive. An operation holds its Pin until its done() fence has
// passed.
using Pin = std::shared_ptr<const void>;

}  // namespace weft
