// SPDX-License-Identifier: Apache-2.0
// rpc::init with given GPUs, for tests that bring a driver of their own.
#pragma once

#include <memory>
#include <string>

#include <weft/engine/rpc/agent.h>
#include <weft/engine/tensor/cuda_devices.h>

namespace weft::rpc {

// Otherwise as the public init().
Agent init(const std::string& name, Options options, std::shared_ptr<tensor::CudaDevices> devices);

}  // namespace weft::rpc
