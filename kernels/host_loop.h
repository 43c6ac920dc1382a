// SPDX-License-Identifier: Apache-2.0
// The one CPU implementation: a loop over elements, compiled once for every processor and once for
// those with AVX2 and F16C; the choice is made at run time. Both give the same bits, because
// neither contracts a * b + c.
#pragma once

#include <algorithm>
#include <cstddef>
#include <tuple>
#include <utility>

#if defined(__x86_64__)
#include <cpuid.h>
#include <immintrin.h>
#endif

#include <weft/kernels/elements.h>

// Promises the vectoriser that no element depends on an earlier one. That is also true if an output
// is one of the inputs.
#if defined(__clang__)
#define WEFT_INDEPENDENT_ELEMENTS _Pragma("clang loop vectorize(assume_safety)")
#else
#define WEFT_INDEPENDENT_ELEMENTS _Pragma("GCC ivdep")
#endif

namespace weft::kernels {

// Takes the operation by value, so that the compiler knows that writing an array does not change
// the scalars.
template <class Operation, class... T>
inline __attribute__((always_inline)) void element_loop(const Operation operation,
                                                        std::size_t elements, T*... arrays) {
  WEFT_INDEPENDENT_ELEMENTS
  for (std::size_t i = 0; i < elements; ++i) operation(arrays[i]...);
}

template <class Operation, class... T>
void run_anywhere(const Operation& operation, std::size_t elements, T*... arrays) {
  element_loop(operation, elements, arrays...);
}

#if defined(__x86_64__)
// Every processor with AVX2 has F16C, but a virtual machine may expose one without the other.
inline const bool kHasAvx2AndF16c = [] {
  unsigned a = 0, b = 0, c = 0, d = 0;
  return __builtin_cpu_supports("avx2") && __get_cpuid(1, &a, &b, &c, &d) && (c & bit_F16C);
}();

// Maps an operation over fp16 or bf16 to the equal one over fp32, whose arrays are converted before
// and after.
template <class T>
using Widened =
    std::conditional_t<std::is_same_v<T, Half> || std::is_same_v<T, BFloat16>, float, T>;
template <class Operation>
struct Staged;
template <template <class...> class Operation, class... T>
struct Staged<Operation<T...>> {
  using Type = Operation<Widened<T>...>;
};
template <ReduceOp op, class T>
struct Staged<Reduce<op, T>> {
  using Type = Reduce<op, Widened<T>>;
};

// In elements: a constant number of whole vectors, few enough to stay in the cache.
constexpr std::size_t kGroup = 64;

// A group of one array as the staged operation sees it: in place or, for fp16, converted by the
// processor's own instructions. The vectoriser does not use these, and takes five times as long for
// the integer arithmetic in float16.h.
template <class Array, class T = typename Array::Element>
struct Stage {
  T* group = nullptr;
  void load(T* array) { group = array; }
  void store(T*) const {}
};

template <class Array>
struct Stage<Array, Half> {
  alignas(32) float group[kGroup];
  Stage() {}  // leaves the group uninitialised; `= default` would let std::tuple zero it

  __attribute__((target("avx2,f16c"))) void load(const Half* array) {
    if constexpr (!Array::kRead) return;
    for (std::size_t i = 0; i < kGroup; i += 8) {
      _mm256_store_ps(
          group + i, _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(array + i))));
    }
  }
  __attribute__((target("avx2,f16c"))) void store(Half* array) const {
    if constexpr (!Array::kWritten) return;
    for (std::size_t i = 0; i < kGroup; i += 8) {
      const __m128i halves = _mm256_cvtps_ph(_mm256_load_ps(group + i), _MM_FROUND_TO_NEAREST_INT);
      _mm_storeu_si128(reinterpret_cast<__m128i*>(array + i), halves);
    }
  }
};

// The vectoriser handles these conversions, but gives up on a loop that mixes several of them with
// other work.
template <class Array>
struct Stage<Array, BFloat16> {
  alignas(32) float group[kGroup];
  Stage() {}

  __attribute__((target("avx2,f16c"))) void load(const BFloat16* array) {
    if constexpr (!Array::kRead) return;
    for (std::size_t i = 0; i < kGroup; ++i) group[i] = widen(array[i]);
  }
  __attribute__((target("avx2,f16c"))) void store(BFloat16* array) const {
    if constexpr (!Array::kWritten) return;
    for (std::size_t i = 0; i < kGroup; ++i) array[i] = narrow<BFloat16>(group[i]);
  }
};

template <class Operation, class... Arrays, std::size_t... I>
__attribute__((target("avx2,f16c"))) void run_with_avx2(const Operation& operation,
                                                        ArrayList<Arrays...>,
                                                        std::index_sequence<I...>,
                                                        std::size_t elements,
                                                        typename Arrays::Element*... arrays) {
  using StagedOperation = typename Staged<Operation>::Type;
  if constexpr (std::is_same_v<StagedOperation, Operation>) {
    element_loop(operation, elements, arrays...);
  } else {
    // Both have the same scalars.
    const auto staged = __builtin_bit_cast(StagedOperation, operation);
    const std::size_t grouped = elements / kGroup * kGroup;
    std::tuple<Stage<Arrays>...> stages;
    for (std::size_t done = 0; done < grouped; done += kGroup) {
      (std::get<I>(stages).load(arrays + done), ...);
      element_loop(staged, kGroup, &std::get<I>(stages).group[0]...);
      (std::get<I>(stages).store(arrays + done), ...);
    }
    element_loop(operation, elements - grouped, arrays + grouped...);
  }
}
#endif

template <class Operation, class... Arrays, std::size_t... I>
void run_on_host(const Operation& operation, ArrayList<Arrays...> list,
                 std::index_sequence<I...> indices, std::size_t elements, void* const* arrays) {
#if defined(__x86_64__)
  if (kHasAvx2AndF16c) {
    return run_with_avx2(operation, list, indices, elements,
                         static_cast<typename Arrays::Element*>(arrays[I])...);
  }
#endif
  run_anywhere(operation, elements, static_cast<typename Arrays::Element*>(arrays[I])...);
}

// Runs the operation over `elements` elements of each of its arrays, in the order of its ArrayList.
template <class Operation>
void run_on_host(const Operation& operation, std::size_t elements, void* const* arrays) {
  using Arrays = typename Operation::Arrays;
  run_on_host(operation, Arrays{}, std::make_index_sequence<Arrays::kCount>{}, elements, arrays);
}

}  // namespace weft::kernels
