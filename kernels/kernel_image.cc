// SPDX-License-Identifier: Apache-2.0
#include <weft/kernels/kernel_image.h>

// WEFT_KERNEL_IMAGE is the fatbin's path, set by CMake. The image is aligned because
// cuLibraryLoadData reads it as 8-byte words.
asm(R"(
  .pushsection .rodata
  .balign 16
  .hidden weft_kernel_image_begin, weft_kernel_image_end
  .globl weft_kernel_image_begin, weft_kernel_image_end
weft_kernel_image_begin:
  .incbin ")" WEFT_KERNEL_IMAGE R"("
weft_kernel_image_end:
  .popsection
)");

extern "C" const std::byte
    weft_kernel_image_begin[];  // NOLINT(readability-identifier-naming): a symbol
extern "C" const std::byte weft_kernel_image_end[];  // NOLINT(readability-identifier-naming)

namespace weft::kernels {

std::span<const std::byte> kernel_image() {
  return {weft_kernel_image_begin, weft_kernel_image_end};
}

}  // namespace weft::kernels
