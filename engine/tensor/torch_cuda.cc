#include <cstdlib>

#include <dlfcn.h>
#include <unistd.h>

#include <c10/core/DeviceType.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <weft/base/log.h>
#include <weft/engine/tensor/torch_cuda.h>

namespace weft::tensor {

namespace {

// Without calling into the driver: a process that initialised CUDA cannot fork ranks any more.
bool has_driver_and_device() {
  const bool device = access("/dev/nvidiactl", F_OK) == 0 || access("/dev/dxg", F_OK) == 0;
  return device && dlopen("libcuda.so.1", RTLD_LAZY | RTLD_LOCAL) != nullptr;
}

// Before main, because libtorch decides at its first question whether it has CUDA, and does not ask again.
const bool kOpened = [] {
  if (!has_driver_and_device()) return false;
  // A stream that waits for a flag holds back every stream that shares its hardware queue. There are 8 unless this says
  // otherwise before the driver starts; a user's own value stays.
  setenv("CUDA_DEVICE_MAX_CONNECTIONS", "32", /*overwrite=*/0);
  // The first launch of a kernel may load its module, which waits for all that the GPU has queued; behind a stream that
  // waits for a flag of ours it would wait for ever, with every other call into the driver behind it.
  setenv("CUDA_MODULE_LOADING", "EAGER", /*overwrite=*/0);
  if (dlopen("libtorch_cuda.so", RTLD_NOW | RTLD_GLOBAL) != nullptr) return true;
  log::warn(std::string("there is a GPU, but libtorch's CUDA half cannot be used: ") + dlerror());
  return false;
}();

}  // namespace

int cuda_device_count() {
  if (!kOpened || !c10::impl::hasDeviceGuardImpl(c10::DeviceType::CUDA)) return 0;
  return c10::impl::getDeviceGuardImpl(c10::DeviceType::CUDA)->deviceCount();
}

}  // namespace weft::tensor
