// SPDX-License-Identifier: Apache-2.0
// Every operation runs through two compiled loops, one for any processor and one for those with
// AVX2. Ranks on different machines must get the same bits.

#include <array>
#include <cstring>
#include <random>
#include <vector>

#include <gtest/gtest.h>

#include <weft/kernels/host_loop.h>
#include <weft/kernels/kernel_list.h>
#include <weft/kernels/optimizer_elements.h>

namespace weft::kernels {
namespace {

constexpr std::size_t kElements = 1000;
constexpr std::size_t kLargest = 16;  // bytes of an element

using Memory = std::vector<std::byte>;

template <class Operation>
Operation with_scalars() {
  Operation operation{};
  if constexpr (requires { operation.scale; })
    operation.scale = static_cast<decltype(operation.scale)>(0.3);
  if constexpr (requires { operation.nesterov; }) {
    operation.lr = 0.125;
    operation.weight_decay = operation.momentum = operation.undampened =
        static_cast<decltype(operation.lr)>(0.3);
    operation.nesterov = true;
  }
  if constexpr (requires { operation.beta1; }) {
    operation.decay = operation.beta1 = operation.beta2 = static_cast<decltype(operation.eps)>(0.9);
    operation.rest1 = operation.rest2 = operation.correction2 =
        static_cast<decltype(operation.eps)>(0.1);
    operation.step_size = operation.eps = static_cast<decltype(operation.eps)>(0.01);
  }
  return operation;
}

// Fills memory with positive, finite values below 2 of every floating-point type and with small
// integers, by limiting each element's upper byte.
template <class T>
void fill(Memory& memory) {
  static std::mt19937 random(5);
  for (std::byte& byte : memory) byte = static_cast<std::byte>(random());
  for (std::size_t i = sizeof(T) - 1; i < memory.size(); i += sizeof(T))
    memory[i] &= std::byte{0x3b};
  if constexpr (requires(T value) { value.real; }) fill<decltype(T::real)>(memory);
}

template <class Operation, class... Arrays, std::size_t... I>
void check(const char* name, ArrayList<Arrays...>, std::index_sequence<I...>) {
  const auto operation = with_scalars<Operation>();
  std::array<Memory, sizeof...(I)> here;
  for (Memory& memory : here) memory.resize(kElements * kLargest);
  (fill<typename Arrays::Element>(here[I]), ...);
  auto there = here;
  void* const arrays[] = {here[I].data()...};
  run_on_host(operation, kElements, arrays);
  run_anywhere(operation, kElements,
               reinterpret_cast<typename Arrays::Element*>(there[I].data())...);
  EXPECT_EQ(here, there) << name;
}

#define WEFT_CHECK(name, ...)                      \
  check<__VA_ARGS__>(#name, __VA_ARGS__::Arrays{}, \
                     std::make_index_sequence<__VA_ARGS__::Arrays::kCount>{});

TEST(HostLoop, GivesTheSameBitsOnEveryProcessor) {
#if defined(__x86_64__)
  if (!kHasAvx2AndF16c)
    GTEST_SKIP() << "this processor has no AVX2 or no F16C, so there is only one loop";
#else
  GTEST_SKIP() << "there is only one loop on this architecture";
#endif
  WEFT_CAST_KERNELS(WEFT_CHECK)
  WEFT_OPTIMIZER_KERNELS(WEFT_CHECK)
  WEFT_REDUCE_KERNELS(WEFT_CHECK)
}

}  // namespace
}  // namespace weft::kernels
