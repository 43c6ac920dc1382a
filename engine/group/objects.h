// SPDX-License-Identifier: Apache-2.0
// Collectives and messages of values: anything that weft::encode takes (weft/codec.h), each of its
// own size. Semantics of torch.distributed's object collectives, without pickle: the receiver names
// the type, which must be the sender's. Another type, and malformed bytes, throw Caller.
//
//   const auto names = weft::all_gather_object(std::string("trainer"), group);  // rank r's at [r]
//   const auto settings =
//       weft::broadcast_object(group.rank() == 0 ? read_settings() : Settings(), 0, group);
//
// For small values of the host: they are copied several times, and above 4 GiB all ranks of the
// call throw Caller. Tensors in them travel through host memory and arrive on the device that they
// were on; if it does not exist there, the call throws. Calls block the host. Each call counts as
// two of the group's operations.
#pragma once

#include <cstddef>
#include <cstdint>
#include <exception>
#include <span>
#include <typeinfo>
#include <vector>

#include <ATen/core/Tensor.h>

#include <weft/base/export.h>
#include <weft/engine/codec/codec.h>
#include <weft/engine/group/process_group.h>

namespace weft {

namespace detail {

using Bytes = std::vector<std::byte>;

// The most bytes that one rank may pass, in the words of an error: "KIND of N bytes; it may have
// MOST; INSTEAD".
struct Limit {
  const char* kind;
  std::int64_t most;
  const char* instead;
};

// Returns rank r's tensor at [r]: kByte, of any length. `mine` is on a device of the group, of the
// same kind on all ranks. All ranks throw Caller if one passes more than the limit.
WEFT_API std::vector<at::Tensor> all_gather_ragged(const at::Tensor& mine, ProcessGroup& group,
                                                   const Limit& limit);
// The same on root; empty on the others.
WEFT_API std::vector<at::Tensor> gather_ragged(const at::Tensor& mine, int root,
                                               ProcessGroup& group, const Limit& limit);

WEFT_API Bytes broadcast_bytes(const Bytes& mine, int root, ProcessGroup& group);
WEFT_API std::vector<Bytes> all_gather_bytes(const Bytes& mine, ProcessGroup& group);
WEFT_API std::vector<Bytes> gather_bytes(const Bytes& mine, int root, ProcessGroup& group);
WEFT_API Bytes scatter_bytes(const std::vector<Bytes>& parts, int root, ProcessGroup& group);
WEFT_API void send_bytes(const Bytes& mine, int to, ProcessGroup& group, int tag);
WEFT_API Bytes recv_bytes(int& from, ProcessGroup& group, int tag);

// A value's bytes after the name of its type, which the receivers compare with their own.
WEFT_API Bytes with_type(const std::type_info& type, const Bytes& value);
// Returns the value's bytes. Throws Caller if the name is not this type's; the error names the
// call, the rank that passed the value, and both types.
WEFT_API std::span<const std::byte> of_type(const std::type_info& type, const Bytes& bytes,
                                            const char* call, int rank);

template <class T>
Bytes encoded(const T& value) {
  return with_type(typeid(T), encode(value));
}

template <class T>
T decoded(const Bytes& bytes, const char* call, int rank) {
  return decode<T>(of_type(typeid(T), bytes, call, rank));
}

// The value of rank r at [r].
template <class T>
std::vector<T> decoded(const std::vector<Bytes>& all, const char* call) {
  for (std::size_t rank = 0; rank < all.size(); ++rank)
    of_type(typeid(T), all[rank], call, static_cast<int>(rank));
  std::vector<T> values;
  for (std::size_t rank = 0; rank < all.size(); ++rank)
    values.push_back(decoded<T>(all[rank], call, static_cast<int>(rank)));
  return values;
}

}  // namespace detail

// Each function first checks that the type can travel, so that the compiler's error is short if it
// cannot (future/refusal.h).

// Returns root's value on every rank; ignores the others' values.
template <class T>
T broadcast_object(const T& value, int root, ProcessGroup group) {
  if constexpr (codec::RefusalOf<T>::accept()) {
    const bool mine = group.rank() == root;
    const auto bytes =
        detail::broadcast_bytes(mine ? detail::encoded(value) : detail::Bytes(), root, group);
    return detail::decoded<T>(bytes, "broadcast_object", root);
  } else {
    std::terminate();
  }
}

// Returns the value of rank r at [r].
template <class T>
std::vector<T> all_gather_object(const T& value, ProcessGroup group) {
  if constexpr (codec::RefusalOf<T>::accept()) {
    return detail::decoded<T>(detail::all_gather_bytes(detail::encoded(value), group),
                              "all_gather_object");
  } else {
    std::terminate();
  }
}

// The same on root; empty on the others.
template <class T>
std::vector<T> gather_object(const T& value, int root, ProcessGroup group) {
  if constexpr (codec::RefusalOf<T>::accept()) {
    return detail::decoded<T>(detail::gather_bytes(detail::encoded(value), root, group),
                              "gather_object");
  } else {
    std::terminate();
  }
}

// Returns root's values[rank]. root passes one value for each rank, the others none.
template <class T>
T scatter_object(const std::vector<T>& values, int root, ProcessGroup group) {
  if constexpr (codec::RefusalOf<T>::accept()) {
    std::vector<detail::Bytes> parts;
    for (const T& value : values) parts.push_back(detail::encoded(value));
    return detail::decoded<T>(detail::scatter_bytes(parts, root, group), "scatter_object", root);
  } else {
    std::terminate();
  }
}

// Sends two messages with this tag: the size and the bytes. Threads that send to one rank with one
// tag take turns.
template <class T>
void send_object(const T& value, int to, ProcessGroup group, int tag = 0) {
  if constexpr (codec::RefusalOf<T>::accept()) {
    detail::send_bytes(detail::encoded(value), to, group, tag);
  } else {
    std::terminate();
  }
}

// `source`: receives the rank of the sender, unless null. Threads that receive from one rank, or
// from any, with one tag take turns. With one tag, do not receive from any rank on one thread and
// from a named rank on another.
template <class T>
T recv_object(int from, ProcessGroup group, int tag = 0, int* source = nullptr) {
  if constexpr (codec::RefusalOf<T>::accept()) {
    const detail::Bytes bytes = detail::recv_bytes(from, group, tag);
    if (source != nullptr) *source = from;
    return detail::decoded<T>(bytes, "recv_object", from);
  } else {
    std::terminate();
  }
}

}  // namespace weft
