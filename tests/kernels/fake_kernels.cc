// SPDX-License-Identifier: Apache-2.0
#include <stdexcept>

#include <weft/kernels/kernel_list.h>
#include <weft/kernels/segments.h>
#include <weft/tests/kernels/fake_kernels.h>

namespace weft::kernels {

namespace {

template <class LaunchType>
void define_kernel(harness::FakeDriver& fake, const char* name) {
  fake.define_kernel(name, {sizeof(LaunchType)}, [](const harness::FakeDriver::Launch& grid) {
    if (grid.block.x != kThreads || grid.block.y * grid.block.z * grid.grid.y * grid.grid.z != 1 ||
        grid.shared_bytes != 0) {
      throw std::logic_error("launched with another grid than the kernels are written for");
    }
    const auto& launch = *static_cast<const LaunchType*>(grid.parameters[0]);
    for (unsigned block = 0; block < grid.grid.x; ++block) {
      for (unsigned thread = 0; thread < kThreads; ++thread)
        run_block(launch, block, grid.grid.x, thread);
    }
  });
}

}  // namespace

void define_kernels(harness::FakeDriver& fake) {
#define WEFT_FAKE_SINGLE(name, ...) define_kernel<SingleLaunch<__VA_ARGS__>>(fake, "weft_" #name);
#define WEFT_FAKE_BOTH(name, ...)                             \
  define_kernel<FewLaunch<__VA_ARGS__>>(fake, "weft_" #name); \
  define_kernel<ManyLaunch<__VA_ARGS__>>(fake, "weft_" #name "_many");
  WEFT_CAST_KERNELS(WEFT_FAKE_BOTH)
  WEFT_OPTIMIZER_KERNELS(WEFT_FAKE_BOTH)
  WEFT_REDUCE_KERNELS(WEFT_FAKE_SINGLE)
}

}  // namespace weft::kernels
