// SPDX-License-Identifier: Apache-2.0
#include <string>

#include <dlfcn.h>
#include <unistd.h>

#include <c10/core/DeviceType.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <weft/base/cuda_variables.h>
#include <weft/base/log.h>
#include <weft/engine/tensor/torch_cuda.h>

namespace weft::tensor {

namespace {

// Opens libcuda; null without a GPU. Does not call into the driver, because a process that has
// initialised CUDA can no longer fork ranks.
void* find_driver() {
  const bool device = access("/dev/nvidiactl", F_OK) == 0 || access("/dev/dxg", F_OK) == 0;
  return device ? dlopen("libcuda.so.1", RTLD_LAZY | RTLD_LOCAL) : nullptr;
}

// True if somebody has called cuInit: that is when the driver reads its environment. The query
// itself starts nothing.
bool has_started(void* driver) {
  constexpr int kNotInitialized = 3;  // CUDA_ERROR_NOT_INITIALIZED
  void* context = nullptr;
  const auto get_current = reinterpret_cast<int (*)(void**)>(dlsym(driver, "cuCtxGetCurrent"));
  return get_current != nullptr && get_current(&context) != kNotInitialized;
}

// Runs before main(): the first time that libtorch is asked whether it has CUDA, it decides for
// good.
const bool kOpened = [] {
  if (find_driver() == nullptr) return false;
  if (dlopen("libtorch_cuda.so", RTLD_NOW | RTLD_LOCAL) != nullptr) return true;
  log::warn(std::string("there is a GPU, but libtorch's CUDA half cannot be used: ") + dlerror());
  return false;
}();

// The variables that Weft set only after the driver had started, when they have no effect.
const std::string& variables_set_too_late() {
  static const std::string late = [] {
    void* const driver = find_driver();
    if (driver == nullptr) return std::string();
    const bool is_late = has_started(driver);
    const std::string set = set_cuda_variables();
    return is_late ? set : std::string();
  }();
  return late;
}

}  // namespace

void prepare_for_cuda() { static_cast<void>(variables_set_too_late()); }

void warn_of_early_cuda() {
  static const bool warned = [] {
    const std::string& late = variables_set_too_late();
    if (!late.empty()) log::warn(early_cuda_text(late));
    return true;
  }();
  static_cast<void>(warned);
}

std::string early_cuda_text(const std::string& late) {
  return "this program used CUDA before it made its first group or agent, so CUDA's driver started "
         "without " +
         late +
         ", and a stream that waits for another rank may hold back other streams, or the first "
         "launch of a kernel, for "
         "ever; start the program with these variables or by weft-run, which sets them, or make "
         "the group or agent first "
         "(docs/environment.md)";
}

int cuda_device_count() {
  if (!kOpened || !c10::impl::hasDeviceGuardImpl(c10::DeviceType::CUDA)) return 0;
  return c10::impl::getDeviceGuardImpl(c10::DeviceType::CUDA)->deviceCount();
}

}  // namespace weft::tensor
