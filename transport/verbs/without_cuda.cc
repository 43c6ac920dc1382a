// SPDX-License-Identifier: Apache-2.0
// Replaces gpudirect.cc in a build without CUDA. These functions are never called there with GPU
// memory.
#include <weft/transport/verbs/registration.h>

namespace weft::transport::verbs {

std::string describe_gpu_ways(const Device&) { return "built without CUDA"; }

void Registration::flush() const {}
void Registration::copy(void*, const void*, std::size_t) const {
  throw Error(Blame::Unsupported, "memory of GPUs, in a build without CUDA");
}

GpuRegistrations::GpuRegistrations(std::shared_ptr<Device> device, GpuDirect allowed)
    : device_(std::move(device)), allowed_(allowed) {}
GpuRegistrations::~GpuRegistrations() = default;
std::shared_ptr<const Registration> GpuRegistrations::of(const Slice&, cuda::Device&) {
  throw Error(Blame::Unsupported, "memory of GPUs, in a build without CUDA");
}
std::shared_ptr<const Registration> GpuRegistrations::at(const void*, std::size_t) const {
  return nullptr;
}
void GpuRegistrations::forget_freed() {}

}  // namespace weft::transport::verbs
