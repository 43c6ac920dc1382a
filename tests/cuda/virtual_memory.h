// SPDX-License-Identifier: Apache-2.0
// A range of virtual GPU addresses to which memory is mapped segment by segment, as in libtorch's
// expandable segments.
#pragma once

#include <cstddef>
#include <vector>

#include <gtest/gtest.h>

#include <weft/cuda/device.h>

namespace weft::cuda {

class VirtualMemory {
 public:
  static constexpr std::size_t kSegmentBytes = 2 << 20;  // the smallest mapping of a GPU

  // Same maps the same memory at every segment.
  enum class Kind { Shareable, Private, Same };
  VirtualMemory(Device& device, std::size_t segments, Kind kind = Kind::Shareable)
      : device_(device), mapped_(segments, false) {
    const DeviceGuard guard(device);
    expect(device.driver().mem_address_reserve(&base_, segments * kSegmentBytes, 0, 0, 0));
    if (kind == Kind::Same) same_ = create(true);
    for (std::size_t i = 0; i < segments; ++i) map(i, kind != Kind::Private);
  }
  ~VirtualMemory() {
    for (std::size_t i = 0; i < mapped_.size(); ++i) {
      if (mapped_[i]) unmap(i);
    }
    const DeviceGuard guard(device_);
    if (same_ != 0) expect(device_.driver().mem_release(same_));
    expect(device_.driver().mem_address_free(base_, mapped_.size() * kSegmentBytes));
  }
  VirtualMemory(const VirtualMemory&) = delete;
  VirtualMemory& operator=(const VirtualMemory&) = delete;

  Slice slice() const {
    return {reinterpret_cast<void*>(base_), mapped_.size() * kSegmentBytes, device_.id()};
  }
  Slice segment(std::size_t index) const {
    return slice().part(index * kSegmentBytes, kSegmentBytes);
  }
  CUdeviceptr address(std::size_t segment) const { return base_ + segment * kSegmentBytes; }

  // Maps new memory, which is freed when it is unmapped; for Kind::Same, the common memory.
  void map(std::size_t segment, bool is_shareable = true) {
    const DeviceGuard guard(device_);
    const Driver& driver = device_.driver();
    const CUmemGenericAllocationHandle handle = same_ != 0 ? same_ : create(is_shareable);
    expect(driver.mem_map(address(segment), kSegmentBytes, 0, handle, 0));
    if (same_ == 0) expect(driver.mem_release(handle));
    CUmemAccessDesc access{};
    access.location = {CU_MEM_LOCATION_TYPE_DEVICE, device_.index()};
    access.flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
    expect(driver.mem_set_access(address(segment), kSegmentBytes, &access, 1));
    mapped_[segment] = true;
  }
  // Waits for the device.
  void unmap(std::size_t segment) {
    const DeviceGuard guard(device_);
    expect(device_.driver().mem_unmap(address(segment), kSegmentBytes));
    mapped_[segment] = false;
  }

 private:
  static void expect(CUresult result) { EXPECT_EQ(result, CUDA_SUCCESS); }
  CUmemGenericAllocationHandle create(bool is_shareable) {
    CUmemAllocationProp properties{};
    properties.type = CU_MEM_ALLOCATION_TYPE_PINNED;
    properties.location = {CU_MEM_LOCATION_TYPE_DEVICE, device_.index()};
    if (is_shareable) properties.requestedHandleTypes = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
    CUmemGenericAllocationHandle handle = 0;
    expect(device_.driver().mem_create(&handle, kSegmentBytes, &properties, 0));
    return handle;
  }

  Device& device_;
  std::vector<bool> mapped_;
  CUdeviceptr base_ = 0;
  CUmemGenericAllocationHandle same_ = 0;
};

}  // namespace weft::cuda
