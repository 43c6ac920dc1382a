// SPDX-License-Identifier: Apache-2.0
#include <type_traits>

#include <dlfcn.h>

#include <weft/cuda/driver.h>

namespace weft::cuda {

namespace {

Blame blame_of(CUresult result) {
  switch (result) {
    case CUDA_ERROR_OUT_OF_MEMORY: return Blame::Busy;
    case CUDA_ERROR_INVALID_VALUE:
    case CUDA_ERROR_INVALID_DEVICE:
    case CUDA_ERROR_INVALID_HANDLE:
    case CUDA_ERROR_INVALID_CONTEXT:
    case CUDA_ERROR_INVALID_IMAGE:
    case CUDA_ERROR_NOT_FOUND: return Blame::Caller;
    case CUDA_ERROR_NOT_SUPPORTED:
    case CUDA_ERROR_NO_BINARY_FOR_GPU:
    case CUDA_ERROR_NO_DEVICE:
    case CUDA_ERROR_STUB_LIBRARY:
    case CUDA_ERROR_SYSTEM_DRIVER_MISMATCH: return Blame::Unsupported;
    default: return is_of_capture(result) ? Blame::Caller : Blame::Device;
  }
}

// Returns "12.4" for 12040.
std::string version_text(int version) {
  return std::to_string(version / 1000) + "." + std::to_string(version % 1000 / 10);
}

// Fills the table. Returns the name of the first function that the library lacks; null if it has
// all.
const char* fill(Driver& driver, void* library) {
  const char* missing = nullptr;
  const auto resolve = [&](auto& slot, const char* symbol) {
    slot = reinterpret_cast<std::remove_reference_t<decltype(slot)>>(dlsym(library, symbol));
    if (slot == nullptr && missing == nullptr) missing = symbol;
  };
#define WEFT_CUDA_TEXT(symbol) #symbol
#define WEFT_CUDA_RESOLVE(member, symbol) resolve(driver.member, WEFT_CUDA_TEXT(symbol));
  WEFT_CUDA_DRIVER_FUNCTIONS(WEFT_CUDA_RESOLVE)
#undef WEFT_CUDA_RESOLVE
#undef WEFT_CUDA_TEXT
  return missing;
}

}  // namespace

Result<std::shared_ptr<const Driver>> Driver::open(const char* library) {
  const std::string name = library;
  // Never closed, because the driver has its own threads, and libtorch or NCCL may use the same
  // library.
  void* const opened = dlopen(library, RTLD_NOW | RTLD_LOCAL);
  if (opened == nullptr) {
    std::string why = dlerror();
    if (why.starts_with(name + ": ")) why.erase(0, name.size() + 2);
    return Error(Blame::Unsupported, "no " + name + ": " + why + "; CUDA needs NVIDIA's driver");
  }
  auto driver = std::make_shared<Driver>();
  const char* const missing = fill(*driver, opened);
  if (missing != nullptr) {
    int version = 0;
    const bool known =
        driver->driver_get_version && driver->driver_get_version(&version) == CUDA_SUCCESS;
    return Error(Blame::Unsupported, name + (known ? " of CUDA " + version_text(version) : "") +
                                         " has no " + missing +
                                         "; Weft needs the driver of CUDA 12.4 (550) or newer");
  }
  const CUresult started = driver->init(0);
  if (started != CUDA_SUCCESS) {
    const Error error = error_of(*driver, started, "cuInit of " + name);
    return Error(Blame::Unsupported, error.text(), error.native_code());
  }
  return std::shared_ptr<const Driver>(std::move(driver));
}

Error error_of(const Driver& driver, CUresult result, std::string_view what, Place place) {
  const char* name = nullptr;
  const char* text = nullptr;
  std::string whole(what);
  whole += ": ";
  // Both return null for a code that only a newer driver knows.
  if (driver.get_error_name(result, &name) == CUDA_SUCCESS && name != nullptr) {
    whole += name;
  } else {
    whole += "CUDA error " + std::to_string(result);
  }
  if (driver.get_error_string(result, &text) == CUDA_SUCCESS && text != nullptr)
    whole += " (" + std::string(text) + ")";
  return {blame_of(result), whole, static_cast<int>(result), place};
}

bool is_of_capture(CUresult result) {
  return (result >= CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED && result <= CUDA_ERROR_CAPTURED_EVENT) ||
         result == CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD;
}

bool is_sticky(CUresult result) {
  switch (result) {
    case CUDA_ERROR_DEINITIALIZED:
    case CUDA_ERROR_CONTEXT_IS_DESTROYED:
    case CUDA_ERROR_ECC_UNCORRECTABLE:
    case CUDA_ERROR_NVLINK_UNCORRECTABLE:
    case CUDA_ERROR_CONTAINED:
    case CUDA_ERROR_ILLEGAL_ADDRESS:
    case CUDA_ERROR_LAUNCH_TIMEOUT:
    case CUDA_ERROR_LAUNCH_FAILED:
    case CUDA_ERROR_ASSERT:
    case CUDA_ERROR_HARDWARE_STACK_ERROR:
    case CUDA_ERROR_ILLEGAL_INSTRUCTION:
    case CUDA_ERROR_MISALIGNED_ADDRESS:
    case CUDA_ERROR_INVALID_ADDRESS_SPACE:
    case CUDA_ERROR_INVALID_PC:
    case CUDA_ERROR_TENSOR_MEMORY_LEAK:
    case CUDA_ERROR_MPS_CLIENT_TERMINATED:
    case CUDA_ERROR_EXTERNAL_DEVICE: return true;
    default: return false;
  }
}

}  // namespace weft::cuda
