// SPDX-License-Identifier: Apache-2.0
// The bodies of the messages Hello and Failure (docs/wire.md).
#pragma once

#include <cstddef>
#include <span>
#include <string>
#include <vector>

#include <weft/engine/call/types.h>
#include <weft/engine/call/wire.h>
#include <weft/engine/codec/stream.h>

namespace weft::call {

enum class Failure {
  Refused,     // the value that it was called on does not exist, or its result cannot be sent
  Thrown,      // the function threw
  NotCreated,  // the value that it was called on was not created
  Unread,      // refused before its arguments were read: none of its references is known here
};

// The rank in the Hello of a process that has not joined and only sends a liveness probe.
constexpr int kProbesOnly = -2;

// The body of a Hello.
struct HelloRecord {
  std::uint32_t version = kWireVersion;
  std::string token;
  WorkerInfo from;
  WorkerInfo to;
  Generation from_generation = 0;
  Generation to_generation = 0;
  WEFT_FIELDS(version, token, from, to, from_generation, to_generation)
};

// The body of a Failure.
struct FailureRecord {
  int what = 0;  // Failure
  int blame = 0;
  std::string text;
  std::vector<int> ranks{};  // as Error::ranks()
  WEFT_FIELDS(what, blame, text, ranks)
};

template <class T>
codec::Encoded encoded(const T& value) {
  return codec::Writer().write([&](codec::Packer& packer) { packer.pack(value); });
}

template <class T>
T decoded(std::span<const std::byte> body) {
  T value;
  codec::Reader({}).read(body, [&](const msgpack::object& object) { object.convert(value); });
  return value;
}

}  // namespace weft::call
