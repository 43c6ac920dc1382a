// SPDX-License-Identifier: Apache-2.0
// How rpc_body_fuzz.cc reads its input: the first byte is one of these kinds; a value as
// weft::encode writes it follows.
#pragma once

#include <cstdint>
#include <string>

#include <ATen/core/Tensor.h>

namespace weft::rpc {

enum class BodyKind : std::uint8_t {
  Hello,
  Failure,
  Activity,
  Outcome,
  Reference,
  Fork,
  ChildAccepted,
  UserDelete,
  WillNotCome,
  GiveBack,
  TakeBackReply,
  Fetch,
  CopyTo,
  Copy,
  Create,
  Operator,
  Gradient,
  Reach,
  PassFailed,
  CleanUp,
  Script
};
constexpr std::uint8_t kBodyKinds = 21;

// The function whose result a creation makes.
inline at::Tensor made_of(at::Tensor tensor, std::int64_t, std::string) { return tensor; }

}  // namespace weft::rpc
