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

// Without calling into the driver: a process that initialised CUDA cannot fork ranks any more. Null
// without a GPU.
void* find_driver() {
  const bool device = access("/dev/nvidiactl", F_OK) == 0 || access("/dev/dxg", F_OK) == 0;
  return device ? dlopen("libcuda.so.1", RTLD_LAZY | RTLD_LOCAL) : nullptr;
}

// Whether somebody has called cuInit, which is when the driver reads its environment. The question
// starts nothing.
bool has_started(void* driver) {
  constexpr int kNotInitialized = 3;  // CUDA_ERROR_NOT_INITIALIZED
  void* context = nullptr;
  const auto get_current = reinterpret_cast<int (*)(void**)>(dlsym(driver, "cuCtxGetCurrent"));
  return get_current != nullptr && get_current(&context) != kNotInitialized;
}

// Before main, because libtorch decides at its first question whether it has CUDA, and does not ask
// again.
const bool kOpened = [] {
  if (find_driver() == nullptr) return false;
  if (dlopen("libtorch_cuda.so", RTLD_NOW | RTLD_LOCAL) != nullptr) return true;
  log::warn(std::string("there is a GPU, but libtorch's CUDA half cannot be used: ") + dlerror());
  return false;
}();

// The variables that Weft would have set, had the driver not started before it was asked for CUDA.
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
