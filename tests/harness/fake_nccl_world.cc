// SPDX-License-Identifier: Apache-2.0
#include <algorithm>

#include <weft/base/make_error.h>
#include <weft/tests/harness/fake_nccl_world.h>

namespace weft::harness {

namespace {

Dtype dtype_of(ncclDataType_t type) {
  switch (type) {
    case ncclInt8: return Dtype::Int8;
    case ncclUint8: return Dtype::UInt8;
    case ncclInt32: return Dtype::Int32;
    case ncclUint32: return Dtype::UInt32;
    case ncclInt64: return Dtype::Int64;
    case ncclUint64: return Dtype::UInt64;
    case ncclFloat16: return Dtype::Float16;
    case ncclFloat32: return Dtype::Float32;
    case ncclFloat64: return Dtype::Float64;
    case ncclBfloat16: return Dtype::BFloat16;
    case ncclFloat8e4m3: return Dtype::Float8E4M3;
    case ncclFloat8e5m2: return Dtype::Float8E5M2;
    case ncclNumTypes: break;
  }
  broken("no such ncclDataType_t");
}

std::size_t bytes_of(const FakeCall& call) { return call.count * size_of(dtype_of(call.type)); }

double combine(ncclRedOp_t op, double a, double b) {
  switch (op) {
    case ncclProd: return a * b;
    case ncclMax: return std::max(a, b);
    case ncclMin: return std::min(a, b);
    default: return a + b;
  }
}

// Reduces elements [begin, begin + count) of all inputs, in the order of the ranks.
void reduce_into(void* to, const FakeCall& call, std::size_t begin,
                 const std::vector<std::vector<std::byte>>& inputs) {
  const Dtype dtype = dtype_of(call.type);
  for (std::size_t i = 0; i < call.count; ++i) {
    double value = load(dtype, inputs.front().data(), begin + i);
    for (std::size_t rank = 1; rank < inputs.size(); ++rank) {
      value = combine(call.op, value, load(dtype, inputs[rank].data(), begin + i));
    }
    if (call.op == ncclAvg) value /= static_cast<double>(inputs.size());
    store(dtype, to, i, value);
  }
}

void copy_into(void* to, const std::vector<std::byte>& from) {
  if (!from.empty()) std::memcpy(to, from.data(), from.size());
}

}  // namespace

const char* name(Kind kind) {
  switch (kind) {
    case Kind::AllReduce: return "ncclAllReduce";
    case Kind::Reduce: return "ncclReduce";
    case Kind::Broadcast: return "ncclBroadcast";
    case Kind::AllGather: return "ncclAllGather";
    case Kind::ReduceScatter: return "ncclReduceScatter";
    case Kind::Send: return "ncclSend";
    case Kind::Recv: return "ncclRecv";
  }
  return "unknown";
}

std::string FakeWorld::arrive(int rank, const Placed& placed) {
  const FakeCall& call = placed.call;
  if (call.kind == Kind::Recv) return {};
  std::size_t bytes = bytes_of(call);
  if (call.kind == Kind::ReduceScatter) bytes *= static_cast<std::size_t>(ranks_);
  const bool has_input = call.kind != Kind::Broadcast || call.root == rank;
  const auto* const data = static_cast<const std::byte*>(call.from);
  std::vector<std::byte> input;
  if (has_input && bytes > 0) input.assign(data, data + bytes);

  std::lock_guard lock(mutex_);
  if (call.kind == Kind::Send) {
    messages_[{rank, call.root}][placed.number] = std::move(input);
    return {};
  }
  Meeting& meeting = meetings_[placed.number];
  std::string disagreement;
  if (meeting.arrived == 0) {
    meeting.first = call;
    meeting.inputs.resize(static_cast<std::size_t>(ranks_));
  } else if (meeting.first.kind != call.kind || meeting.first.count != call.count ||
             meeting.first.type != call.type || meeting.first.op != call.op ||
             meeting.first.root != call.root) {
    disagreement = "rank " + std::to_string(rank) + " comes with " + name(call.kind) + " of " +
                   std::to_string(call.count) + " elements where another came with " +
                   name(meeting.first.kind) + " of " + std::to_string(meeting.first.count) +
                   ", or type, operator or root differ";
  }
  meeting.inputs[static_cast<std::size_t>(rank)] = std::move(input);
  ++meeting.arrived;
  return disagreement;
}

bool FakeWorld::complete(int rank, const Placed& placed) {
  std::lock_guard lock(mutex_);
  switch (placed.call.kind) {
    case Kind::Send: return true;  // NCCL buffers sends
    case Kind::Recv: return messages_[{placed.call.root, rank}].contains(placed.number);
    default: return meetings_[placed.number].arrived == ranks_;
  }
}

void FakeWorld::finish(int rank, const Placed& placed) {
  const FakeCall& call = placed.call;
  std::lock_guard lock(mutex_);
  if (call.kind == Kind::Send) return;
  if (call.kind == Kind::Recv) {
    auto& queue = messages_[{call.root, rank}];
    copy_into(call.to, queue.at(placed.number));
    queue.erase(placed.number);
    return;
  }
  Meeting& meeting = meetings_.at(placed.number);
  switch (call.kind) {
    case Kind::AllReduce: reduce_into(call.to, call, 0, meeting.inputs); break;
    case Kind::Reduce:
      if (call.root == rank) reduce_into(call.to, call, 0, meeting.inputs);
      break;
    case Kind::Broadcast:
      copy_into(call.to, meeting.inputs[static_cast<std::size_t>(call.root)]);
      break;
    case Kind::AllGather:
      for (std::size_t from = 0; from < meeting.inputs.size(); ++from) {
        copy_into(static_cast<std::byte*>(call.to) + from * bytes_of(call), meeting.inputs[from]);
      }
      break;
    case Kind::ReduceScatter:
      reduce_into(call.to, call, static_cast<std::size_t>(rank) * call.count, meeting.inputs);
      break;
    case Kind::Send:
    case Kind::Recv: break;
  }
  if (++meeting.finished == ranks_) meetings_.erase(placed.number);
}

}  // namespace weft::harness
