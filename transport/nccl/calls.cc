// SPDX-License-Identifier: Apache-2.0
#include <vector>

#include <weft/base/make_error.h>
#include <weft/transport/nccl/calls.h>

namespace weft::transport::nccl {

namespace {

std::optional<ncclDataType_t> type_of(Dtype dtype) {
  switch (dtype) {
    case Dtype::Bool:
    case Dtype::UInt8: return ncclUint8;
    case Dtype::Int8: return ncclInt8;
    case Dtype::Int32: return ncclInt32;
    case Dtype::UInt32: return ncclUint32;
    case Dtype::Int64: return ncclInt64;
    case Dtype::UInt64: return ncclUint64;
    case Dtype::Float16: return ncclFloat16;
    case Dtype::BFloat16: return ncclBfloat16;
    case Dtype::ComplexFloat32:
    case Dtype::Float32: return ncclFloat32;
    case Dtype::ComplexFloat64:
    case Dtype::Float64: return ncclFloat64;
    case Dtype::Float8E4M3: return ncclFloat8e4m3;
    case Dtype::Float8E5M2: return ncclFloat8e5m2;
    case Dtype::Int16:
    case Dtype::UInt16: return std::nullopt;
  }
  return std::nullopt;
}

bool is_complex(Dtype dtype) {
  return dtype == Dtype::ComplexFloat32 || dtype == Dtype::ComplexFloat64;
}

bool is_integer(Dtype dtype) {
  switch (dtype) {
    case Dtype::UInt8:
    case Dtype::Int8:
    case Dtype::Int16:
    case Dtype::UInt16:
    case Dtype::Int32:
    case Dtype::UInt32:
    case Dtype::Int64:
    case Dtype::UInt64: return true;
    default: return false;
  }
}

std::optional<ncclRedOp_t> operator_of(Dtype dtype, ReduceOp op) {
  const bool is_bool = dtype == Dtype::Bool;
  switch (op) {
    case ReduceOp::Sum: return is_bool ? ncclMax : ncclSum;
    case ReduceOp::Avg: return is_bool || is_integer(dtype) ? std::nullopt : std::optional(ncclAvg);
    case ReduceOp::Product:
      if (is_complex(dtype)) return std::nullopt;
      return is_bool ? ncclMin : ncclProd;
    case ReduceOp::Min: return is_complex(dtype) ? std::nullopt : std::optional(ncclMin);
    case ReduceOp::Max: return is_complex(dtype) ? std::nullopt : std::optional(ncclMax);
    case ReduceOp::BitAnd:
    case ReduceOp::BitOr:
    case ReduceOp::BitXor: return std::nullopt;
  }
  return std::nullopt;
}

std::size_t count_of(const Slice& slice, const Reduction& reduction) {
  return slice.bytes / reduction.element_bytes;
}

// True if the slices have one size and are contiguous, as NCCL's own operations require.
bool is_one_piece(Slices slices) {
  for (std::size_t i = 1; i < slices.size(); ++i) {
    const Slice& before = slices[i - 1];
    if (slices[i].bytes != before.bytes ||
        slices[i].data != static_cast<std::byte*>(before.data) + before.bytes)
      return false;
  }
  return true;
}

// Makes several calls that NCCL starts as one. `body` passes each result to a function that records
// the first failure.
template <class Body>
ncclResult_t grouped(const Library& library, const Body& body) {
  ncclResult_t first = library.group_start();
  if (first != ncclSuccess) return first;
  body([&first](ncclResult_t result) {
    if (first == ncclSuccess && result != ncclInProgress) first = result;
  });
  const ncclResult_t ended = library.group_end();  // also after a failure, to leave the group
  return first != ncclSuccess ? first : ended;
}

// One rank's part of an exchange with every rank. Empty parts are neither sent nor received.
struct Exchange {
  std::vector<Slice> to;    // by rank; empty: sends nothing
  std::vector<Slice> from;  // by rank; empty: receives nothing
};

Handle::Call exchange(Exchange parts) {
  return [parts = std::move(parts)](const Library& library, ncclComm_t comm, cudaStream_t stream) {
    return grouped(library, [&](const auto& note) {
      for (std::size_t peer = 0; peer < parts.to.size(); ++peer) {
        const Slice& slice = parts.to[peer];
        if (slice.bytes == 0) continue;
        note(
            library.send(slice.data, slice.bytes, ncclUint8, static_cast<int>(peer), comm, stream));
      }
      for (std::size_t peer = 0; peer < parts.from.size(); ++peer) {
        const Slice& slice = parts.from[peer];
        if (slice.bytes == 0) continue;
        note(
            library.recv(slice.data, slice.bytes, ncclUint8, static_cast<int>(peer), comm, stream));
      }
    });
  };
}

std::vector<Slice> copy_of(Slices slices) { return {slices.begin(), slices.end()}; }

// `slice` for one rank, empty slices for the others.
std::vector<Slice> only(int rank, const Slice& slice) {
  std::vector<Slice> parts(static_cast<std::size_t>(rank) + 1);
  parts.back() = slice;
  return parts;
}

Handle::Call broadcast(const Slice& data, int root) {
  return [data, root](const Library& library, ncclComm_t comm, cudaStream_t stream) {
    return library.broadcast(data.data, data.data, data.bytes, ncclUint8, root, comm, stream);
  };
}

Handle::Call reduce(const Slice& data, const Reduction& by, int root) {
  return [data, by, root](const Library& library, ncclComm_t comm, cudaStream_t stream) {
    // NCCL uses the receive buffer on root only.
    return library.reduce(data.data, data.data, count_of(data, by), by.type, by.op, root, comm,
                          stream);
  };
}

Handle::Call all_gather(Slices outputs, const Slice& input, int rank) {
  if (is_one_piece(outputs)) {
    return [to = outputs.front().data, input](const Library& library, ncclComm_t comm,
                                              cudaStream_t stream) {
      return library.all_gather(input.data, to, input.bytes, ncclUint8, comm, stream);
    };
  }
  return [outputs = copy_of(outputs), input, rank](const Library& library, ncclComm_t comm,
                                                   cudaStream_t stream) {
    return grouped(library, [&](const auto& note) {
      for (int root = 0; root < static_cast<int>(outputs.size()); ++root) {
        const Slice& to = outputs[static_cast<std::size_t>(root)];
        // NCCL uses the send buffer on root only.
        const void* const from = root == rank ? input.data : to.data;
        note(library.broadcast(from, to.data, to.bytes, ncclUint8, root, comm, stream));
      }
    });
  };
}

Handle::Call gather(Slices outputs, const Slice& input, int rank, int root) {
  return exchange({only(root, input), rank == root ? copy_of(outputs) : std::vector<Slice>()});
}

Handle::Call scatter(const Slice& output, Slices inputs, int rank, int root) {
  return exchange({rank == root ? copy_of(inputs) : std::vector<Slice>(), only(root, output)});
}

Handle::Call reduce_scatter(const Slice& output, Slices inputs, const Reduction& by, int rank) {
  if (is_one_piece(inputs)) {
    return [output, from = inputs.front().data, by](const Library& library, ncclComm_t comm,
                                                    cudaStream_t stream) {
      return library.reduce_scatter(from, output.data, count_of(output, by), by.type, by.op, comm,
                                    stream);
    };
  }
  return [output, inputs = copy_of(inputs), by, rank](const Library& library, ncclComm_t comm,
                                                      cudaStream_t stream) {
    return grouped(library, [&](const auto& note) {
      for (int root = 0; root < static_cast<int>(inputs.size()); ++root) {
        const Slice& from = inputs[static_cast<std::size_t>(root)];
        void* const to = root == rank ? output.data : nullptr;
        note(library.reduce(from.data, to, count_of(from, by), by.type, by.op, root, comm, stream));
      }
    });
  };
}

}  // namespace

std::optional<Reduction> reduction_of(Dtype dtype, ReduceOp op) {
  const auto type = type_of(dtype);
  const auto native = operator_of(dtype, op);
  if (!type || !native) return std::nullopt;
  return Reduction{*type, *native, is_complex(dtype) ? size_of(dtype) / 2 : size_of(dtype)};
}

Handle::Call all_reduce(const Slice& data, const Reduction& by) {
  return [data, by](const Library& library, ncclComm_t comm, cudaStream_t stream) {
    return library.all_reduce(data.data, data.data, count_of(data, by), by.type, by.op, comm,
                              stream);
  };
}

Handle::Call all_to_all(Slices outputs, Slices inputs) {
  return exchange({copy_of(inputs), copy_of(outputs)});
}

Handle::Call call_of(const Collective& collective, const std::optional<Reduction>& reduction,
                     int rank) {
  const Slices inputs = collective.inputs, outputs = collective.outputs;
  const int root = collective.root;
  switch (collective.kind) {
    case CollectiveKind::Broadcast: return broadcast(inputs.front(), root);
    case CollectiveKind::AllReduce: return all_reduce(inputs.front(), *reduction);
    case CollectiveKind::Reduce: return reduce(inputs.front(), *reduction, root);
    case CollectiveKind::AllGather: return all_gather(outputs, inputs.front(), rank);
    case CollectiveKind::Gather: return gather(outputs, inputs.front(), rank, root);
    case CollectiveKind::Scatter: return scatter(outputs.front(), inputs, rank, root);
    case CollectiveKind::ReduceScatter:
      return reduce_scatter(outputs.front(), inputs, *reduction, rank);
    case CollectiveKind::AllToAll: return all_to_all(outputs, inputs);
    case CollectiveKind::Barrier: break;
  }
  broken("NCCL has no call for a barrier");
}

Handle::Call send(const Slice& data, int to) { return exchange({only(to, data), {}}); }

Handle::Call recv(const Slice& data, int from) { return exchange({{}, only(from, data)}); }

}  // namespace weft::transport::nccl
