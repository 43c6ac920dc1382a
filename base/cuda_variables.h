// SPDX-License-Identifier: Apache-2.0
// Two environment variables that the CUDA driver reads once, when it starts.
//
// CUDA_DEVICE_MAX_CONNECTIONS: a stream that waits for a flag holds back every stream that shares
// its hardware queue, and there are only 8 queues by default.
//
// CUDA_MODULE_LOADING: the first launch of a kernel may load its module, and to load a module the
// driver waits until the GPU has finished all queued work. If a stream waits for one of Weft's
// flags, that wait never ends and blocks every other driver call.
#pragma once

#include <cstdlib>
#include <string>

namespace weft {

// Sets each variable that the environment does not set. Returns those that it set, as a user would
// write them ("CUDA_MODULE_LOADING=EAGER …"), or "".
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
