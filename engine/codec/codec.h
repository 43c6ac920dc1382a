// SPDX-License-Identifier: Apache-2.0
// weft::encode and weft::decode: the form in which arguments and results travel, for use outside of
// calls. They take a value of any type that a remote function may take, tensors among them; RRefs
// travel only in calls. Shapes, strides, dtypes, devices and requires_grad are kept; only the used
// part of a storage is written; storage shared inside one value stays shared.
#pragma once

#include <cstddef>
#include <optional>
#include <span>
#include <vector>

#include <weft/engine/codec/values.h>

namespace weft {

// Throws Caller for a value that cannot travel (a quantised tensor, an RRef).
template <class T>
std::vector<std::byte> encode(const T& value) {
  if constexpr (codec::RefusalOf<T>::accept()) {
    return codec::join(codec::Writer().write([&](codec::Packer& packer) { packer.pack(value); }));
  } else {
    std::terminate();
  }
}

// Throws Caller for bytes that are truncated, not written by encode(), or of another type.
template <class T>
T decode(std::span<const std::byte> bytes) {
  if constexpr (codec::RefusalOf<T>::accept()) {
    auto split = codec::split(bytes);
    std::optional<T> value;
    codec::Reader(std::move(split.parts)).read(split.body, [&](const msgpack::object& object) {
      value.emplace(codec::unpacked<T>(object));
    });
    return std::move(*value);
  } else {
    std::terminate();
  }
}

}  // namespace weft
