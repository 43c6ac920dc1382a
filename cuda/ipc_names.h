// SPDX-License-Identifier: Apache-2.0
// The names by which processes identify GPUs, and open each other's memory and events. They do not
// use the driver's types, so that a process without CUDA can decode what a peer sends.
#pragma once

#include <array>
#include <cstddef>

namespace weft::cuda {

using Uuid = std::array<std::byte, 16>;
using IpcHandle = std::array<std::byte, 64>;

}  // namespace weft::cuda
