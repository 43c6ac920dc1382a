// Two variables that CUDA's driver reads once, when it starts.
//
// CUDA_DEVICE_MAX_CONNECTIONS: a stream that waits for a flag holds back every stream that shares
// its hardware queue, and there are 8 queues unless this says otherwise. CUDA_MODULE_LOADING: the
// first launch of a kernel may load its module, for which the driver waits until the GPU has done
// all that is queued; behind a stream that waits for a flag of Weft's it would wait for ever, with
// every other call into the driver behind it.
#pragma once

#include <cstdlib>
#include <string>

namespace weft {

// Sets both, unless the program's environment has them. Returns those that it set, as a user would
// write them
// ("CUDA_MODULE_LOADING=EAGER …"), or "".
inline std::string set_cuda_variables() {
  std::string set;
  const auto keep_or_set = [&](const char* name, const char* value) {
    if (std::getenv(name) != nullptr || ::setenv(name, value, /*overwrite=*/0) != 0) return;
    set += (set.empty() ? "" : " ") + std::string(name) + "=" + value;
  };
  keep_or_set("CUDA_DEVICE_MAX_CONNECTIONS", "32");
  keep_or_set("CUDA_MODULE_LOADING", "EAGER");
  return set;
}

}  // namespace weft
