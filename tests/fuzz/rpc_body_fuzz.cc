// SPDX-License-Identifier: Apache-2.0
// The bodies of messages between agents: hellos, failures, RRefs, and the arguments of creations,
// of operators and scripts by name, and of the calls that Weft itself makes. Anything that a peer
// writes there is either refused as the sender's fault, or is a value that can be used and sent. A
// value without tensors is unchanged when it is written and read again.
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <tuple>
#include <vector>

#include <weft/base/error.h>
#include <weft/base/make_error.h>
#include <weft/engine/autograd/messages.h>
#include <weft/engine/call/core.h>
#include <weft/engine/call/wire_records.h>
#include <weft/engine/codec/codec.h>
#include <weft/engine/rpc/agent.h>
#include <weft/engine/rpc/operators.h>
#include <weft/engine/rpc/script.h>
#include <weft/engine/rref/control.h>
#include <weft/engine/rref/rref.h>
#include <weft/tests/fuzz/rpc_body_fuzz.h>

namespace weft::rpc {
namespace {

using Input = std::span<const std::byte>;

template <auto F>
using ArgumentsOf = typename call::detail::FunctionBody<F>::Arguments;

template <class T>
constexpr bool is_arguments = false;
template <class... A>
constexpr bool is_arguments<std::tuple<A...>> = true;

// Returns true if `convert` was given a value and has accepted it.
template <class Convert>
bool read(Input input, const Convert& convert) {
  try {
    auto split = codec::split(input);
    codec::Reader(std::move(split.parts)).read(split.body, convert);
    return true;
  } catch (const Error& error) {
    if (error.blame() != Blame::Caller && error.blame() != Blame::Busy)
      broken("bytes are not blamed on their sender");
    return false;
  }
}

template <class T>
std::optional<T> taken(Input input) {
  std::optional<T> value;
  const bool is_one = read(input, [&](const msgpack::object& object) {
    if constexpr (is_arguments<T>) {
      value.emplace(call::detail::unpack_tuple<T>(object));
    } else {
      value.emplace(codec::unpacked<T>(object));
    }
  });
  return is_one ? std::move(value) : std::nullopt;
}

template <class T>
void check_with_tensors(Input input) {
  const auto value = taken<T>(input);
  if (value && encode(*value).empty()) broken("a value that has no bytes");
}

template <class T>
std::optional<T> check(Input input) {
  auto value = taken<T>(input);
  if (!value) return value;
  const auto written = encode(*value);
  const auto again = taken<T>(written);
  if (!again) broken("a value that was read cannot be read when it is written");
  if (encode(*again) != written) broken("a value changes when it is written and read");
  return value;
}

void check_failure(Input input) {
  const auto failure = check<call::FailureRecord>(input);
  if (failure && name(blame_from(failure->blame)).empty()) broken("an error without a blame");
}

void check_outcome(Input input) {
  const auto outcome = check<Outcome>(input);
  if (outcome && outcome->failed() && name(outcome->error().blame()).empty())
    broken("an error without a blame");
}

// The arguments after those of the reference: read as the function's own arguments, while the
// message exists.
void check_creation(Input input) {
  using Body = call::detail::FunctionBody<&made_of>;
  read(input, [](const msgpack::object& object) {
    const auto [id, fork, packed] =
        call::detail::unpack_tuple<rref::detail::CreationArguments>(object);
    const auto arguments = call::detail::unpack_tuple<Body::Arguments>(packed);
    if (rref::to_text(id).empty() || rref::to_text(fork).empty()) broken("an id without a text");
    if (encode(arguments).empty()) broken("arguments that have no bytes");
  });
}

void check(BodyKind kind, Input input) {
  switch (kind) {
    case BodyKind::Hello: check<call::HelloRecord>(input); return;
    case BodyKind::Failure: return check_failure(input);
    case BodyKind::Activity: check<Activity>(input); return;
    case BodyKind::Outcome: return check_outcome(input);
    case BodyKind::Reference: check<rref::ReferenceRecord>(input); return;
    case BodyKind::Fork: check<ArgumentsOf<&rref::internal::fork>>(input); return;
    case BodyKind::ChildAccepted:
      check<ArgumentsOf<&rref::internal::child_accepted>>(input);
      return;
    case BodyKind::UserDelete: check<ArgumentsOf<&rref::internal::user_delete>>(input); return;
    case BodyKind::WillNotCome: check<ArgumentsOf<&rref::internal::will_not_come>>(input); return;
    case BodyKind::GiveBack: check<ArgumentsOf<&rref::internal::give_back>>(input); return;
    case BodyKind::TakeBackReply:
      check<ArgumentsOf<&rref::internal::take_back_reply>>(input);
      return;
    case BodyKind::Fetch: check<rref::detail::FetchBody<at::Tensor>::Arguments>(input); return;
    case BodyKind::CopyTo: check<rref::detail::CopyBody<at::Tensor>::Arguments>(input); return;
    case BodyKind::Copy:
      return check_with_tensors<rref::detail::ArrivedCopyBody<at::Tensor>::Arguments>(input);
    case BodyKind::Create: return check_creation(input);
    case BodyKind::Operator: return check_with_tensors<ArgumentsOf<&run_operator>>(input);
    case BodyKind::Gradient:
      return check_with_tensors<ArgumentsOf<&autograd::internal::gradient>>(input);
    case BodyKind::Reach: check<ArgumentsOf<&autograd::internal::reach>>(input); return;
    case BodyKind::PassFailed: check<ArgumentsOf<&autograd::internal::pass_failed>>(input); return;
    case BodyKind::CleanUp: check<ArgumentsOf<&autograd::internal::clean_up>>(input); return;
    case BodyKind::Script: return check_with_tensors<ArgumentsOf<&run_script<at::Tensor>>>(input);
  }
}

}  // namespace
}  // namespace weft::rpc

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t bytes) {
  using namespace weft::rpc;
  if (bytes == 0) return 0;
  check(static_cast<BodyKind>(data[0] % kBodyKinds), std::as_bytes(std::span(data + 1, bytes - 1)));
  return 0;
}
