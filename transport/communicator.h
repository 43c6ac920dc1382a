// The collectives of one group. All its ranks call the same operations in the same order. Every
// operation has the form
//
//   (slices, …, Pin, Fence ready) -> Op, noexcept
//
// `ready` says when the inputs may be read and the outputs overwritten. The Op's done() fence says
// when the result is there; the Pin is held until then. A failed Op passes its fence too. No call
// blocks the host: device operations are ordered by streams, host operations run on the backend's
// threads. Calls may come from any thread, one at a time.
//
// Required operations are pure virtual; optional ones are behind point_to_point(). The engine has
// checked the arguments (sizes, dtypes, ranks, devices). A backend checks only what it alone knows,
// and fails the Op with Unsupported.
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
  Training training = {};  // the model and step of a broadcast or all_reduce
  std::size_t count() const { return slice.bytes / size_of(dtype); }
};

// Messages are ordered per (peer, tag): the n-th send of one rank matches the n-th matching recv of
// the other. If the communicator compares_calls(), a dtype that differs is a Caller error on both
// ranks and breaks the communicator.
class PointToPoint {
 public:
  virtual ~PointToPoint() = default;
  virtual bool has_tags() const = 0;
  virtual bool has_any_source() const = 0;
  virtual Op send(const Elements& data, int to, int tag, Pin pin, Fence ready) noexcept = 0;
  // `from` may be kAnySource if has_any_source(); the Op then has a source_rank().
  virtual Op recv(const Elements& data, int from, int tag, Pin pin, Fence ready) noexcept = 0;
  // Messages that other ranks have sent or announced and that no recv has taken. Empty if the
  // backend does not know.
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
  // True if all_reduce, reduce and reduce_scatter support the pair. The sum of booleans is "any",
  // their product "all". Called before anything is sent.
  virtual bool can_reduce(Dtype dtype, ReduceOp op) const = 0;
  // True if each message names the call to which it belongs, so that ranks whose calls differ all
  // learn of it. Calls with empty tensors are then exchanged too: another rank's call may differ.
  virtual bool compares_calls() const { return false; }
  // Null if the backend has no point-to-point messages.
  virtual PointToPoint* point_to_point() { return nullptr; }

  // Copies root's bytes to every rank, in place.
  virtual Op broadcast(const Elements& data, int root, Pin pin, Fence ready) noexcept = 0;
  // Reduces in place. The result is bitwise equal on all ranks.
  virtual Op all_reduce(const Elements& data, ReduceOp op, Pin pin, Fence ready) noexcept = 0;
  // Reduces in place on root. The other ranks' bytes are only read.
  virtual Op reduce(const Elements& data, int root, ReduceOp op, Pin pin, Fence ready) noexcept = 0;
  // outputs[r] receives rank r's input. All have the same size.
  virtual Op all_gather(std::span<const Slice> outputs, const Elements& input, Pin pin,
                        Fence ready) noexcept = 0;
  // As all_gather, on root only; `outputs` is empty on the other ranks.
  virtual Op gather(std::span<const Slice> outputs, const Elements& input, int root, Pin pin,
                    Fence ready) noexcept = 0;
  // Sends root's inputs[r] to rank r's output; `inputs` is empty on the other ranks.
  virtual Op scatter(const Elements& output, std::span<const Slice> inputs, int root, Pin pin,
                     Fence ready) noexcept = 0;
  // Reduces inputs[r] of all ranks into rank r's output. Inputs are only read.
  virtual Op reduce_scatter(const Elements& output, std::span<const Slice> inputs, ReduceOp op,
                            Pin pin, Fence ready) noexcept = 0;
  // Sends inputs[r] to rank r and receives outputs[r] from rank r. Sizes may differ from rank to
  // rank; both sides of a pair must agree.
  virtual Op all_to_all(std::span<const Slice> outputs, std::span<const Slice> inputs, Dtype dtype,
                        Pin pin, Fence ready) noexcept = 0;
  // Done when every rank has called it and all earlier operations of this communicator are done.
  virtual Op barrier(Fence ready) noexcept = 0;

  // Fails every pending and later operation with `why`. Memory that the backend still uses stays
  // pinned. Idempotent, thread-safe, does not block.
  virtual void abort(const Error& why) noexcept = 0;
};

}  // namespace weft::transport
