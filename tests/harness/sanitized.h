// SPDX-License-Identifier: Apache-2.0
// Says whether a sanitizer is on: then times and address space differ from the plain program's.
#pragma once

namespace weft::harness {

// g++ defines a macro, clang has a feature.
#if defined(__SANITIZE_ADDRESS__)
constexpr bool kAddressSanitized = true;
#elif defined(__has_feature)
constexpr bool kAddressSanitized = __has_feature(address_sanitizer);
#else
constexpr bool kAddressSanitized = false;
#endif

#if defined(__SANITIZE_THREAD__)
constexpr bool kThreadSanitized = true;
#elif defined(__has_feature)
constexpr bool kThreadSanitized = __has_feature(thread_sanitizer);
#else
constexpr bool kThreadSanitized = false;
#endif

constexpr bool kSanitized = kAddressSanitized || kThreadSanitized;

}  // namespace weft::harness
