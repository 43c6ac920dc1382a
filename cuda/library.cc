// SPDX-License-Identifier: Apache-2.0
#include <string>
#include <utility>

#include <weft/base/log.h>
#include <weft/cuda/library.h>
#include <weft/profiling/trace/trace.h>

namespace weft::cuda {

namespace {

constinit trace::Name preloading{trace::Layer::Cuda, "preload kernels"};

}  // namespace

Library::Library(Device& device, std::span<const std::byte> image) : device_(device) {
  if (image.size() < 4) throw Error(Blame::Caller, "loading a CUDA library: the image is empty");
  const Driver& driver = device.driver();
  check(driver,
        driver.library_load_data(&native_, image.data(), nullptr, nullptr, 0, nullptr, nullptr, 0),
        "cuLibraryLoadData (image of " + std::to_string(image.size()) + " bytes)");
}

Library::~Library() {
  if (native_ == nullptr) return;
  const CUresult result = device_.driver().library_unload(native_);
  if (result == CUDA_SUCCESS || is_sticky(result) || device_.is_lost()) return;
  log::error(error_of(device_.driver(), result, "cuLibraryUnload").text());
}

Library::Library(Library&& other) noexcept
    : device_(other.device_),
      native_(std::exchange(other.native_, nullptr)),
      kernels_(std::move(other.kernels_)) {}

Kernel Library::kernel(const std::string& name) {
  const auto known = kernels_.find(name);
  if (known != kernels_.end()) return Kernel(known->second);
  Kernel::Entry entry{name, nullptr, {}};
  const Driver& driver = device_.driver();
  DeviceGuard guard(device_);
  check(driver, driver.library_get_kernel(&entry.native, native_, name.c_str()),
        "cuLibraryGetKernel of '" + name + "'");
  // The driver has no function for the number of parameters, but it refuses the first index past
  // the last one.
  for (;;) {
    std::size_t offset = 0;
    std::size_t bytes = 0;
    const CUresult result =
        driver.kernel_get_param_info(entry.native, entry.parameters.size(), &offset, &bytes);
    if (result == CUDA_ERROR_INVALID_VALUE) break;
    check(driver, result, "cuKernelGetParamInfo of '" + name + "'");
    entry.parameters.push_back(bytes);
  }
  return Kernel(kernels_.emplace(name, std::move(entry)).first->second);
}

void Library::preload(Device& device) const {
  trace::Range range(preloading, {.device = device.index()});
  DeviceGuard guard(device);
  const Driver& driver = device.driver();
  unsigned count = 0;
  device.check(driver.library_get_kernel_count(&count, native_), "cuLibraryGetKernelCount");
  std::vector<CUkernel> kernels(count);
  device.check(driver.library_enumerate_kernels(kernels.data(), count, native_),
               "cuLibraryEnumerateKernels");
  for (const CUkernel kernel : kernels) {
    CUfunction function = nullptr;
    device.check(driver.kernel_get_function(&function, kernel), "cuKernelGetFunction");
    device.check(driver.func_load(function), "cuFuncLoad");
  }
}

void launch_untyped(const StreamRef& stream, const Kernel& kernel, Dim3 grid, Dim3 block,
                    unsigned shared_bytes, std::span<void* const> parameters,
                    std::span<const std::size_t> sizes) {
  const auto& expected = kernel.parameters();
  if (sizes.size() != expected.size()) {
    throw Error(Blame::Caller, "kernel '" + std::string(kernel.name()) + "' takes " +
                                   std::to_string(expected.size()) + " arguments, " +
                                   std::to_string(sizes.size()) + " were given");
  }
  for (std::size_t i = 0; i < sizes.size(); ++i) {
    if (sizes[i] == expected[i]) continue;
    throw Error(Blame::Caller, "kernel '" + std::string(kernel.name()) + "': argument " +
                                   std::to_string(i) + " has " + std::to_string(sizes[i]) +
                                   " bytes, its parameter has " + std::to_string(expected[i]));
  }
  DeviceGuard guard(stream.device());
  // cuLaunchKernel also takes a CUkernel in place of a CUfunction and launches it in the stream's
  // context.
  const CUresult result = stream.driver().launch_kernel(
      reinterpret_cast<CUfunction>(kernel.native()), grid.x, grid.y, grid.z, block.x, block.y,
      block.z, shared_bytes, stream.native(), const_cast<void**>(parameters.data()), nullptr);
  if (result != CUDA_SUCCESS)
    stream.device().check(result, "launching '" + std::string(kernel.name()) + "'");
}

}  // namespace weft::cuda
