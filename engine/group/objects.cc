// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <string>

#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
#include <ATen/ops/zeros.h>

#include <weft/base/type_name.h>
#include <weft/engine/group/called_by.h>
#include <weft/engine/group/core.h>
#include <weft/engine/group/objects.h>

namespace weft::detail {

namespace {

Limit object(const char* kind) {
  return {kind, std::int64_t{4} << 30, "send its tensors by the group's own calls"};
}

at::TensorOptions bytes_of(const ProcessGroup& group) {
  return at::TensorOptions(at::kByte).device(group::Core::of(group).carriers.host_values_device());
}

at::Tensor number(std::int64_t value, const at::TensorOptions& where) {
  return at::full({1}, value, where.dtype(at::kLong));
}

at::Tensor size_of(const Bytes& mine, const ProcessGroup& group) {
  return number(static_cast<std::int64_t>(mine.size()), bytes_of(group));
}

// Checks the sizes that ranks announce, before memory is allocated for them.
std::vector<std::int64_t> checked(const at::Tensor& sizes, const Limit& limit) {
  const at::Tensor here = sizes.to(at::kCPU);
  const auto* data = static_cast<const std::int64_t*>(here.const_data_ptr());
  std::vector<std::int64_t> result(data, data + here.numel());
  for (const std::int64_t size : result) {
    if (size >= 0 && size <= limit.most) continue;
    throw Error(Blame::Caller, std::string(limit.kind) + " of " + std::to_string(size) +
                                   " bytes; the limit is " + std::to_string(limit.most) + "; " +
                                   limit.instead);
  }
  return result;
}

std::vector<std::int64_t> sizes_of_all(const at::Tensor& mine, ProcessGroup& group,
                                       const Limit& limit) {
  const at::Tensor size = number(mine.numel(), mine.options());
  const at::Tensor sizes = at::empty({group.size()}, size.options());
  group.all_gather_into(sizes, size).wait();
  return checked(sizes, limit);
}

at::Tensor to_tensor(const Bytes& mine, const ProcessGroup& group) {
  const at::Tensor bytes = at::empty({static_cast<std::int64_t>(mine.size())}, at::kByte);
  std::copy(mine.begin(), mine.end(), static_cast<std::byte*>(bytes.mutable_data_ptr()));
  return bytes.to(bytes_of(group).device());
}

// The bytes, followed by padding.
at::Tensor padded(const at::Tensor& bytes, std::int64_t length) {
  if (bytes.numel() == length) return bytes;
  at::Tensor whole = at::zeros({length}, bytes.options());
  whole.narrow(0, 0, bytes.numel()).copy_(bytes);
  return whole;
}

Bytes to_bytes(const at::Tensor& tensor) {
  const at::Tensor here = tensor.to(at::kCPU);
  const auto* data = static_cast<const std::byte*>(here.const_data_ptr());
  return {data, data + here.numel()};
}

// Removes the padding of each row.
std::vector<at::Tensor> trimmed(const at::Tensor& rows, const std::vector<std::int64_t>& lengths) {
  std::vector<at::Tensor> result = rows.unbind();
  for (std::size_t i = 0; i < result.size(); ++i) result[i] = result[i].narrow(0, 0, lengths[i]);
  return result;
}

std::vector<Bytes> to_bytes(const std::vector<at::Tensor>& tensors) {
  std::vector<Bytes> result;
  for (const at::Tensor& tensor : tensors) result.push_back(to_bytes(tensor));
  return result;
}

std::int64_t longest_of(const std::vector<std::int64_t>& lengths) {
  return *std::max_element(lengths.begin(), lengths.end());
}

// Length of a type's name; longer names are cut, on all ranks.
constexpr std::size_t kMostName = 4096;

std::string name_of(const std::type_info& type) {
  std::string name = type_name(type);
  const auto replace = [&name](const std::string& long_form, const std::string& short_form) {
    for (auto at = name.find(long_form); at != std::string::npos; at = name.find(long_form, at)) {
      name.replace(at, long_form.size(), short_form);
    }
  };
  replace(type_name(typeid(std::string)), "std::string");
  return name.substr(0, kMostName);
}

}  // namespace

Bytes with_type(const std::type_info& type, const Bytes& value) {
  const std::string name = name_of(type);
  Bytes bytes;
  bytes.reserve(2 + name.size() + value.size());
  bytes.push_back(static_cast<std::byte>(name.size() & 0xff));
  bytes.push_back(static_cast<std::byte>(name.size() >> 8));
  for (const char letter : name) bytes.push_back(static_cast<std::byte>(letter));
  bytes.insert(bytes.end(), value.begin(), value.end());
  return bytes;
}

std::span<const std::byte> of_type(const std::type_info& type, const Bytes& bytes, const char* call,
                                   int rank) {
  const std::string whose = std::string(call) + ": the value of rank " + std::to_string(rank);
  const std::size_t length = bytes.size() < 2 ? 0
                                              : static_cast<std::size_t>(bytes[0]) |
                                                    static_cast<std::size_t>(bytes[1]) << 8;
  if (length == 0 || length > kMostName || bytes.size() < 2 + length) {
    throw Error(Blame::Caller,
                whose + " does not begin with the name of a type: that rank made another call");
  }
  std::string theirs;
  for (std::size_t i = 0; i < length; ++i) theirs += static_cast<char>(bytes[2 + i]);
  const std::string own = name_of(type);
  if (theirs != own) {
    throw Error(Blame::Caller, whose + " is of type " + group::printable(theirs) +
                                   ", and this rank takes values of type " + group::printable(own) +
                                   "; give all ranks the same type");
  }
  return std::span(bytes).subspan(2 + length);
}

Bytes broadcast_bytes(const Bytes& mine, int root, ProcessGroup& group) {
  const group::CalledBy by("broadcast_object");
  const at::Tensor size = size_of(mine, group);
  group.broadcast(size, root).wait();
  const std::int64_t length = checked(size, object("broadcast_object: a value")).front();
  const at::Tensor bytes =
      group.rank() == root ? to_tensor(mine, group) : at::empty({length}, bytes_of(group));
  group.broadcast(bytes, root).wait();
  return to_bytes(bytes);
}

std::vector<at::Tensor> all_gather_ragged(const at::Tensor& mine, ProcessGroup& group,
                                          const Limit& limit) {
  const auto lengths = sizes_of_all(mine, group, limit);
  const std::int64_t longest = longest_of(lengths);
  const at::Tensor all = at::empty({group.size(), longest}, mine.options());
  if (longest > 0) group.all_gather_into(all, padded(mine, longest)).wait();
  return trimmed(all, lengths);
}

std::vector<Bytes> all_gather_bytes(const Bytes& mine, ProcessGroup& group) {
  const group::CalledBy by("all_gather_object");
  return to_bytes(
      all_gather_ragged(to_tensor(mine, group), group, object("all_gather_object: a value")));
}

std::vector<at::Tensor> gather_ragged(const at::Tensor& mine, int root, ProcessGroup& group,
                                      const Limit& limit) {
  const auto lengths = sizes_of_all(mine, group, limit);
  const std::int64_t longest = longest_of(lengths);
  const at::Tensor all =
      at::empty({group.rank() == root ? group.size() : 0, longest}, mine.options());
  group.gather(all.unbind(), padded(mine, longest), root).wait();
  return trimmed(all, lengths);
}

std::vector<Bytes> gather_bytes(const Bytes& mine, int root, ProcessGroup& group) {
  const group::CalledBy by("gather_object");
  group::Core::of(group).options.check_rank(root, "gather_object: root");
  return to_bytes(
      gather_ragged(to_tensor(mine, group), root, group, object("gather_object: a value")));
}

Bytes scatter_bytes(const std::vector<Bytes>& parts, int root, ProcessGroup& group) {
  const group::CalledBy by("scatter_object");
  const bool here = group.rank() == root;
  if (parts.size() != (here ? static_cast<std::size_t>(group.size()) : 0)) {
    throw Error(Blame::Caller, "scatter_object: " + std::to_string(parts.size()) +
                                   " values are given on rank " + std::to_string(group.rank()) +
                                   "; the root (" + std::to_string(root) +
                                   ") gives one for each of the " + std::to_string(group.size()) +
                                   " ranks, and the others none");
  }
  const at::Tensor sizes = at::full({group.size()}, 0, bytes_of(group).dtype(at::kLong));
  for (std::size_t i = 0; i < parts.size(); ++i) {
    sizes[static_cast<std::int64_t>(i)] = static_cast<std::int64_t>(parts[i].size());
  }
  group.broadcast(sizes, root).wait();
  const auto lengths = checked(sizes, object("scatter_object: a value"));
  const std::int64_t longest = longest_of(lengths);
  std::vector<at::Tensor> given;
  for (const Bytes& part : parts) given.push_back(padded(to_tensor(part, group), longest));
  const at::Tensor own = at::empty({longest}, bytes_of(group));
  group.scatter(own, given, root).wait();
  return to_bytes(own.narrow(0, 0, lengths[static_cast<std::size_t>(group.rank())]));
}

void send_bytes(const Bytes& mine, int to, ProcessGroup& group, int tag) {
  const at::Tensor size = size_of(mine, group);
  checked(size, object("send_object: a value"));
  const at::Tensor bytes = to_tensor(mine, group);
  auto turn = group::Core::of(group).object_turns.take(/*is_send=*/true, to, tag);
  Work announced = group.send(size, to, tag);
  Work sent = group.send(bytes, to, tag);
  turn.unlock();
  announced.wait();
  sent.wait();
}

Bytes recv_bytes(int& from, ProcessGroup& group, int tag) {
  const at::Tensor size = at::empty({1}, bytes_of(group).dtype(at::kLong));
  auto turn = group::Core::of(group).object_turns.take(/*is_send=*/false, from, tag);
  Work announced = group.recv(size, from, tag);
  announced.synchronize(kNoTimeout);  // on the host, which needs to know the sender
  if (from == kAnySource) from = announced.source_rank();
  const std::int64_t length = checked(size, object("recv_object: a value")).front();
  const at::Tensor bytes = at::empty({length}, bytes_of(group));
  Work received = group.recv(bytes, from, tag);
  turn.unlock();
  received.wait();
  return to_bytes(bytes);
}

}  // namespace weft::detail
