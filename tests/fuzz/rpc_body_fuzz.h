// What rpc_body_fuzz.cc takes its input for: the first byte says which of these, and what follows
// is written as weft::encode writes it.
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

// What a creation is of.
inline at::Tensor made_of(at::Tensor tensor, std::int64_t, std::string) { return tensor; }

}  // namespace weft::rpc
