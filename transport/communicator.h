// The collectives of one group: the same ranks call the same operations in the same order. Every
// operation is
//
//   (slices, …, Pin, Fence ready) -> Op, noexcept
//
// `ready` says when the bytes may be read (inputs) and overwritten (outputs); the Op's done() fence
// says when the result is there; the Pin is held until then. A failed Op passes its fence too. No
// call blocks the host: device operations are ordered by streams, host operations run on the
// backend's threads. Calls may come from any thread, one at a time.
//
// Required operations are pure virtual; optional ones are behind point_to_point(). Arguments have
// been checked by the engine (sizes, dtypes, ranks, devices): a backend checks only what it alone
// knows and fails the Op with Unsupported.
#pragma once

#include <cstdint>
#include <span>
#include <string_view>
#include <vector>

#include <weft/base/dtype.h>
#include <weft/base/op.h>
#include <weft/base/slice.h>
#include <weft/kernels/reduce_op.h>
#include <weft/transport/training.h>

namespace weft::transport {

constexpr int kAnySource = -1;

struct Elements {
  Slice slice;
  Dtype dtype = Dtype::UInt8;
  Training training = {};  // that a broadcast or an all_reduce belongs to
  std::size_t count() const { return slice.bytes / size_of(dtype); }
};

// Ordered per (peer, tag): the n-th send of a rank meets the n-th matching recv of the other. Where
// the communicator compares_calls(), one of another dtype is a Caller error on both, and breaks it.
class PointToPoint {
 public:
  virtual ~PointToPoint() = default;
  virtual bool has_tags() const = 0;
  virtual bool has_any_source() const = 0;
  virtual Op send(const Elements& data, int to, int tag, Pin pin, Fence ready) noexcept = 0;
  // `from` may be kAnySource where has_any_source(); the Op then knows source_rank().
  virtual Op recv(const Elements& data, int from, int tag, Pin pin, Fence ready) noexcept = 0;
  // What others have sent, or announced, and no recv has taken; nothing where the backend does not
  // know.
  struct Unreceived {
    int from = 0;
    int tag = 0;
    std::uint64_t bytes = 0;
  };
  virtual std::vector<Unreceived> unreceived() { return {}; }
};

class Communicator {
 public:
  virtual ~Communicator() = default;

  virtual std::string_view backend() const = 0;
  virtual int rank() const = 0;
  virtual int size() const = 0;
  // What all_reduce, reduce and reduce_scatter can do. The sum of truth values is "any", their
  // product "all". Asked before anything is sent.
  virtual bool can_reduce(Dtype dtype, ReduceOp op) const = 0;
  // Whether each message says of which call it is, so that ranks whose calls differ all learn of
  // it. Then calls with empty tensors are exchanged as well: they may be others elsewhere.
  virtual bool compares_calls() const { return false; }
  // Null where the backend has none.
  virtual PointToPoint* point_to_point() { return nullptr; }

  // root's bytes to every rank, in place.
  virtual Op broadcast(const Elements& data, int root, Pin pin, Fence ready) noexcept = 0;
  // In place; the result is bitwise equal on all ranks.
  virtual Op all_reduce(const Elements& data, ReduceOp op, Pin pin, Fence ready) noexcept = 0;
  // In place on root; the others' bytes are only read.
  virtual Op reduce(const Elements& data, int root, ReduceOp op, Pin pin, Fence ready) noexcept = 0;
  // outputs[r] receives rank r's input; all of one size.
  virtual Op all_gather(std::span<const Slice> outputs, const Elements& input, Pin pin,
                        Fence ready) noexcept = 0;
  // As all_gather, on root; outputs is empty on the others.
  virtual Op gather(std::span<const Slice> outputs, const Elements& input, int root, Pin pin,
                    Fence ready) noexcept = 0;
  // inputs[r] of root to rank r's output; inputs is empty on the others.
  virtual Op scatter(const Elements& output, std::span<const Slice> inputs, int root, Pin pin,
                     Fence ready) noexcept = 0;
  // inputs[r] of all ranks, reduced, to rank r's output. Inputs are only read.
  virtual Op reduce_scatter(const Elements& output, std::span<const Slice> inputs, ReduceOp op,
                            Pin pin, Fence ready) noexcept = 0;
  // inputs[r] to rank r, outputs[r] from rank r. Sizes may differ from rank to rank; both sides of
  // a pair must agree.
  virtual Op all_to_all(std::span<const Slice> outputs, std::span<const Slice> inputs, Dtype dtype,
                        Pin pin, Fence ready) noexcept = 0;
  // Done when every rank has called it and every earlier operation of this communicator is done.
  virtual Op barrier(Fence ready) noexcept = 0;

  // Fails every pending and later operation with `why`. Idempotent, from any thread, does not
  // block. What the backend still touches stays pinned.
  virtual void abort(const Error& why) noexcept = 0;
};

}  // namespace weft::transport
