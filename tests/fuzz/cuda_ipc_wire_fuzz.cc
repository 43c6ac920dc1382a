// SPDX-License-Identifier: Apache-2.0
// Any bytes that a process sends over the connection below a cuda_ipc connection are either refused
// as the peer's fault, or are within the limits and unchanged when they are written again. The
// first byte chooses the expected kind: a hello, the GPUs that are reached, or a message. For a
// message, the next two bytes give the number of its payloads and their size.
#include <algorithm>
#include <cstdint>
#include <span>
#include <vector>

#include <weft/base/error.h>
#include <weft/base/make_error.h>
#include <weft/transport/cuda_ipc/wire.h>

namespace {

using namespace weft;
using namespace weft::transport;
using namespace weft::transport::cuda_ipc;

template <class T>
bool is_refused(const Result<T>& result) {
  if (result) return false;
  if (result.error().blame() != Blame::Protocol) broken("a peer's bytes are not blamed on it");
  return true;
}

void check_same(Bytes again, Bytes input) {
  if (!std::ranges::equal(again, input)) broken("the input changes when it is read and written");
}

Bytes without_kind(Bytes message) {
  return message.subspan(1);
}  // the caller has looked at the kind

void check_shared(std::size_t payloads, std::uint64_t size, Bytes input) {
  Capabilities below;
  below.max_header = 4000;
  below.max_payloads = 20;
  below.max_message = 1 << 20;
  const Capabilities limits = capabilities_over(below);
  const std::vector<std::uint64_t> sizes(payloads, size);
  const auto decoded = decode_shared(input, sizes, limits);
  if (is_refused(decoded)) return;
  const Shared& message = decoded.value();
  if (message.slot >= kSlots || message.gpu >= kMaxGpus)
    broken("a slot or GPU that does not exist");
  if (message.payloads.size() > limits.max_payloads || message.header.size() > limits.max_header)
    broken("beyond the limits");
  std::uint64_t total = 0;
  std::size_t plain = 0;
  std::size_t pieces = 0;
  for (const Payload& payload : message.payloads) {
    total += payload.bytes;
    if (payload.pieces.empty()) ++plain;
    pieces += payload.pieces.size();
    std::uint64_t left = payload.pieces.empty() ? 0 : payload.bytes;
    for (const Piece& piece : payload.pieces) {
      if (piece.bytes == 0 || piece.bytes > left) broken("pieces that do not fit their payload");
      left -= piece.bytes;
      const bool is_inside =
          piece.bytes <= piece.passed && piece.offset <= piece.passed - piece.bytes;
      if (piece.passed > 0 && !is_inside) broken("a piece beyond the passed memory");
    }
    if (left > 0) broken("a part of a payload is in no piece");
  }
  if (pieces > limits.max_payloads) broken("more pieces than a message may have");
  if (total > limits.max_message) broken("more bytes than a message may have");
  if (plain != payloads)
    broken("the payloads that are not shared differ in number from those received");
  check_same(without_kind(encode(message)), without_kind(input));
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t bytes) {
  if (bytes < 3) return 0;
  const auto input = std::as_bytes(std::span(data + 3, bytes - 3));
  if (data[0] % 3 == 0) {
    const auto hello = decode_hello(input);
    if (is_refused(hello)) return 0;
    if (hello.value().gpus.size() > kMaxGpus) broken("more GPUs than the limit");
    for (const Gpu& gpu : hello.value().gpus) {
      if (gpu.events.size() != kSlots) broken("a GPU without its events");
    }
    check_same(encode(hello.value()), input);
  } else if (data[0] % 3 == 1) {
    const auto reach = decode_reach(input);
    if (!is_refused(reach)) check_same(encode_reach(reach.value()), input);
  } else {
    check_shared(data[1] % 8, data[2] * std::uint64_t{16}, input);
  }
  return 0;
}
