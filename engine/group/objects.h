// Collectives and messages of values: anything that weft::encode takes (weft/codec.h), each of its own size. Semantics of
// torch.distributed's object collectives, without pickle: who receives names the type, and foreign bytes throw.
//
//   const auto names = weft::all_gather_object(std::string("trainer"), group);    // of rank r at [r]
//   const auto settings = weft::broadcast_object(group.rank() == 0 ? read_settings() : Settings(), 0, group);
//
// For what the host knows, not for bulk: values are copied, several times, and one has at most 4 GiB, else all ranks of the
// call throw Caller. Tensors in them travel through host memory and arrive on the device that they were on, which exists
// there, or the call throws. Calls block the host, and are ordered among the group's other operations as two of these.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include <ATen/core/Tensor.h>

#include <weft/base/export.h>
#include <weft/engine/codec/codec.h>
#include <weft/engine/group/process_group.h>

namespace weft {

namespace detail {

using Bytes = std::vector<std::byte>;

// How much one rank may bring, in the words of an error: "KIND of N bytes; it may have MOST; INSTEAD".
struct Limit {
  const char* kind;
  std::int64_t most;
  const char* instead;
};

// Of rank r at [r], what it has brought: kByte, of any length. `mine` lies on a device of the group, on the same kind
// everywhere. All ranks throw Caller where one brings more than the limit.
WEFT_API std::vector<at::Tensor> all_gather_ragged(const at::Tensor& mine, ProcessGroup& group, const Limit& limit);
// The same on root; empty on the others.
WEFT_API std::vector<at::Tensor> gather_ragged(const at::Tensor& mine, int root, ProcessGroup& group, const Limit& limit);

WEFT_API Bytes broadcast_bytes(const Bytes& mine, int root, ProcessGroup& group);
WEFT_API std::vector<Bytes> all_gather_bytes(const Bytes& mine, ProcessGroup& group);
WEFT_API std::vector<Bytes> gather_bytes(const Bytes& mine, int root, ProcessGroup& group);
WEFT_API Bytes scatter_bytes(const std::vector<Bytes>& parts, int root, ProcessGroup& group);
WEFT_API void send_bytes(const Bytes& mine, int to, ProcessGroup& group, int tag);
WEFT_API Bytes recv_bytes(int& from, ProcessGroup& group, int tag);

template <class T>
std::vector<T> decoded(const std::vector<Bytes>& all) {
  std::vector<T> values;
  for (const Bytes& bytes : all) values.push_back(decode<T>(bytes));
  return values;
}

}  // namespace detail

// root's value, on every rank; the others' is not looked at.
template <class T>
T broadcast_object(const T& value, int root, ProcessGroup group) {
  const bool mine = group.rank() == root;
  return decode<T>(detail::broadcast_bytes(mine ? encode(value) : detail::Bytes(), root, group));
}

// Of rank r at [r].
template <class T>
std::vector<T> all_gather_object(const T& value, ProcessGroup group) {
  return detail::decoded<T>(detail::all_gather_bytes(encode(value), group));
}

// The same on root; empty on the others.
template <class T>
std::vector<T> gather_object(const T& value, int root, ProcessGroup group) {
  return detail::decoded<T>(detail::gather_bytes(encode(value), root, group));
}

// root's values[rank]; one for each rank there, and none on the others.
template <class T>
T scatter_object(const std::vector<T>& values, int root, ProcessGroup group) {
  std::vector<detail::Bytes> parts;
  for (const T& value : values) parts.push_back(encode(value));
  return decode<T>(detail::scatter_bytes(parts, root, group));
}

// Two messages of this tag: how long, and what.
template <class T>
void send_object(const T& value, int to, ProcessGroup group, int tag = 0) {
  detail::send_bytes(encode(value), to, group, tag);
}

// `source`: who sent it, where that is asked for.
template <class T>
T recv_object(int from, ProcessGroup group, int tag = 0, int* source = nullptr) {
  const detail::Bytes bytes = detail::recv_bytes(from, group, tag);
  if (source != nullptr) *source = from;
  return decode<T>(bytes);
}

}  // namespace weft
