// SPDX-License-Identifier: Apache-2.0
// The compiled kernels (cuda_kernels.cu), linked into the library as bytes.
#pragma once

#include <cstddef>
#include <span>

namespace weft::kernels {

// A fatbin with code for WEFT_CUDA_ARCHITECTURES.
std::span<const std::byte> kernel_image();

}  // namespace weft::kernels
