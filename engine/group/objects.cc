#include <algorithm>

#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/full.h>

#include <weft/engine/group/core.h>
#include <weft/engine/group/objects.h>

namespace weft::detail {

namespace {

constexpr std::int64_t kMostBytes = std::int64_t{4} << 30;

at::TensorOptions bytes_of(const ProcessGroup& group) {
  return at::TensorOptions(at::kByte).device(group::Core::of(group).host_values_device());
}

at::Tensor size_of(const Bytes& mine, const ProcessGroup& group) {
  return at::full({1}, static_cast<std::int64_t>(mine.size()), bytes_of(group).dtype(at::kLong));
}

// What ranks said, before room is made for it.
std::vector<std::int64_t> checked(const at::Tensor& sizes, const char* what) {
  const at::Tensor here = sizes.to(at::kCPU);
  const auto* data = here.const_data_ptr<std::int64_t>();
  std::vector<std::int64_t> result(data, data + here.numel());
  for (const std::int64_t size : result) {
    if (size >= 0 && size <= kMostBytes) continue;
    throw Error(Blame::Caller, std::string(what) + ": a value of " + std::to_string(size) + " bytes; it may have " +
                                   std::to_string(kMostBytes) + "; send its tensors by the group's own calls");
  }
  return result;
}

std::vector<std::int64_t> sizes_of_all(const Bytes& mine, ProcessGroup& group, const char* what) {
  const at::Tensor size = size_of(mine, group);
  const at::Tensor sizes = at::empty({group.size()}, size.options());
  group.all_gather_into(sizes, size).wait();
  return checked(sizes, what);
}

// With room behind them up to `length`.
at::Tensor to_tensor(const Bytes& mine, std::int64_t length, const ProcessGroup& group) {
  const at::Tensor whole = at::empty({length}, at::kByte);
  std::copy(mine.begin(), mine.end(), static_cast<std::byte*>(whole.mutable_data_ptr()));
  return whole.to(bytes_of(group).device());
}

Bytes to_bytes(const at::Tensor& tensor, std::int64_t length) {
  const at::Tensor here = tensor.to(at::kCPU);
  const auto* data = static_cast<const std::byte*>(here.const_data_ptr());
  return {data, data + length};
}

std::vector<Bytes> to_bytes(const at::Tensor& rows, const std::vector<std::int64_t>& lengths) {
  std::vector<Bytes> result;
  for (std::size_t i = 0; i < lengths.size(); ++i) {
    result.push_back(to_bytes(rows[static_cast<std::int64_t>(i)], lengths[i]));
  }
  return result;
}

}  // namespace

Bytes broadcast_bytes(const Bytes& mine, int root, ProcessGroup& group) {
  const at::Tensor size = size_of(mine, group);
  group.broadcast(size, root).wait();
  const std::int64_t length = checked(size, "broadcast_object").front();
  const at::Tensor bytes = group.rank() == root ? to_tensor(mine, length, group) : at::empty({length}, bytes_of(group));
  group.broadcast(bytes, root).wait();
  return to_bytes(bytes, length);
}

std::vector<Bytes> all_gather_bytes(const Bytes& mine, ProcessGroup& group) {
  const auto lengths = sizes_of_all(mine, group, "all_gather_object");
  const std::int64_t most = *std::max_element(lengths.begin(), lengths.end());
  const at::Tensor all = at::empty({group.size(), most}, bytes_of(group));
  group.all_gather_into(all, to_tensor(mine, most, group)).wait();
  return to_bytes(all, lengths);
}

std::vector<Bytes> gather_bytes(const Bytes& mine, int root, ProcessGroup& group) {
  group::Core::of(group).check_rank(root, "gather_object: root");
  const auto lengths = sizes_of_all(mine, group, "gather_object");
  const std::int64_t most = *std::max_element(lengths.begin(), lengths.end());
  const bool here = group.rank() == root;
  const at::Tensor all = at::empty({here ? group.size() : 0, most}, bytes_of(group));
  group.gather(all.unbind(), to_tensor(mine, most, group), root).wait();
  return to_bytes(all, here ? lengths : std::vector<std::int64_t>());
}

Bytes scatter_bytes(const std::vector<Bytes>& parts, int root, ProcessGroup& group) {
  const bool here = group.rank() == root;
  if (parts.size() != (here ? static_cast<std::size_t>(group.size()) : 0)) {
    throw Error(Blame::Caller, "scatter_object: " + std::to_string(parts.size()) + " values are given on rank " +
                                   std::to_string(group.rank()) + "; the root (" + std::to_string(root) +
                                   ") gives one for each of the " + std::to_string(group.size()) +
                                   " ranks, and the others none");
  }
  const at::Tensor sizes = at::full({group.size()}, 0, bytes_of(group).dtype(at::kLong));
  for (std::size_t i = 0; i < parts.size(); ++i) {
    sizes[static_cast<std::int64_t>(i)] = static_cast<std::int64_t>(parts[i].size());
  }
  group.broadcast(sizes, root).wait();
  const auto lengths = checked(sizes, "scatter_object");
  const std::int64_t most = *std::max_element(lengths.begin(), lengths.end());
  std::vector<at::Tensor> padded;
  for (const Bytes& part : parts) padded.push_back(to_tensor(part, most, group));
  const at::Tensor own = at::empty({most}, bytes_of(group));
  group.scatter(own, padded, root).wait();
  return to_bytes(own, lengths[static_cast<std::size_t>(group.rank())]);
}

void send_bytes(const Bytes& mine, int to, ProcessGroup& group, int tag) {
  const auto length = static_cast<std::int64_t>(mine.size());
  const at::Tensor size = size_of(mine, group);
  checked(size, "send_object");
  Work announced = group.send(size, to, tag);
  Work sent = group.send(to_tensor(mine, length, group), to, tag);
  announced.wait();
  sent.wait();
}

Bytes recv_bytes(int& from, ProcessGroup& group, int tag) {
  const at::Tensor size = at::empty({1}, bytes_of(group).dtype(at::kLong));
  Work announced = group.recv(size, from, tag);
  announced.wait();
  if (from == kAnySource) from = announced.source_rank();
  const std::int64_t length = checked(size, "recv_object").front();
  const at::Tensor bytes = at::empty({length}, bytes_of(group));
  group.recv(bytes, from, tag).wait();
  return to_bytes(bytes, length);
}

}  // namespace weft::detail
