// What processes call GPUs, and memory and events that they open, among each other. Without the
// driver's types, so that what a peer sends can be decoded where there is no CUDA.
#pragma once

#include <array>
#include <cstddef>

namespace weft::cuda {

using Uuid = std::array<std::byte, 16>;
using IpcHandle = std::array<std::byte, 64>;

}  // namespace weft::cuda
