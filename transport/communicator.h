// SPDX-License-Identifier: Apache-2.0
// The collectives of one group. All its ranks call the same operations in the same order. Every
// operation has the form
//
//   (Collective, Pin, Fence ready) -> Op, noexcept
//
// `ready` says when the inputs may be read and the outputs overwritten. The Op's done() fence says
// when the result is there; the Pin is held until then. A failed Op passes its fence too. No call
// blocks the host: device operations are ordered by streams, host operations run on the backend's
// threads. Calls may come from any thread, one at a time.
//
// Required operations are pure virtual; optional ones are behind point_to_point(). The engine has
// checked the arguments (sizes, dtypes, ranks, devices). A backend checks only its own limits, and
// fails the Op with Unsupported.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <weft/base/dtype.h>
#include <weft/base/op.h>
#include <weft/base/slice.h>
#include <weft/kernels/reduce_op.h>
#include <weft/transport/collective.h>

namespace weft::transport {

constexpr int kAnySource = -1;

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
  // The transport that carries bytes to that rank ("shm", "tcp"); the backend's name if the backend
  // does not tell. Thread-safe.
  virtual std::string transport(int /*peer*/) const { return std::string(backend()); }
  virtual int rank() const = 0;
  virtual int size() const = 0;
  // True if all_reduce, reduce and reduce_scatter support the pair. The sum of booleans is "any",
  // their product "all". Called before anything is sent.
  virtual bool can_reduce(Dtype dtype, ReduceOp op) const = 0;
  // True if each message names the call to which it belongs, so that ranks whose calls differ all
  // learn of it. Calls with empty tensors are then exchanged too: another rank's call may differ.
  virtual bool compares_calls() const { return false; }
  // True once a failed operation has ended the communicator, so that all later ones fail as well.
  // Already true when that operation ends. False if the backend cannot tell. Thread-safe; does not
  // block.
  virtual bool is_broken() const noexcept { return false; }
  // Null if the backend has no point-to-point messages.
  virtual PointToPoint* point_to_point() { return nullptr; }

  // Issues a collective. A barrier is done when every rank has called it and every earlier
  // operation of this communicator is done.
  virtual Op run(const Collective& collective, Pin pin, Fence ready) noexcept = 0;

  // Short forms of run(). CollectiveKind says what each does.
  Op broadcast(const Elements& data, int root, Pin pin, Fence ready) noexcept {
    return in_place(CollectiveKind::Broadcast, data, ReduceOp::Sum, root, std::move(pin),
                    std::move(ready));
  }
  Op all_reduce(const Elements& data, ReduceOp op, Pin pin, Fence ready) noexcept {
    return in_place(CollectiveKind::AllReduce, data, op, 0, std::move(pin), std::move(ready));
  }
  Op reduce(const Elements& data, int root, ReduceOp op, Pin pin, Fence ready) noexcept {
    return in_place(CollectiveKind::Reduce, data, op, root, std::move(pin), std::move(ready));
  }
  Op all_gather(std::span<const Slice> outputs, const Elements& input, Pin pin,
                Fence ready) noexcept {
    return run({.kind = CollectiveKind::AllGather,
                .dtype = input.dtype,
                .inputs = {&input.slice, 1},
                .outputs = outputs},
               std::move(pin), std::move(ready));
  }
  Op gather(std::span<const Slice> outputs, const Elements& input, int root, Pin pin,
            Fence ready) noexcept {
    return run({.kind = CollectiveKind::Gather,
                .dtype = input.dtype,
                .root = root,
                .inputs = {&input.slice, 1},
                .outputs = outputs},
               std::move(pin), std::move(ready));
  }
  Op scatter(const Elements& output, std::span<const Slice> inputs, int root, Pin pin,
             Fence ready) noexcept {
    return run({.kind = CollectiveKind::Scatter,
                .dtype = output.dtype,
                .root = root,
                .inputs = inputs,
                .outputs = {&output.slice, 1}},
               std::move(pin), std::move(ready));
  }
  Op reduce_scatter(const Elements& output, std::span<const Slice> inputs, ReduceOp op, Pin pin,
                    Fence ready) noexcept {
    return run({.kind = CollectiveKind::ReduceScatter,
                .dtype = output.dtype,
                .op = op,
                .inputs = inputs,
                .outputs = {&output.slice, 1}},
               std::move(pin), std::move(ready));
  }
  Op all_to_all(std::span<const Slice> outputs, std::span<const Slice> inputs, Dtype dtype, Pin pin,
                Fence ready) noexcept {
    return run(
        {.kind = CollectiveKind::AllToAll, .dtype = dtype, .inputs = inputs, .outputs = outputs},
        std::move(pin), std::move(ready));
  }
  Op barrier(Fence ready) noexcept {
    return run({.kind = CollectiveKind::Barrier}, Pin(), std::move(ready));
  }

  // Fails every pending and later operation with `why`. Memory that the backend still uses stays
  // pinned. Idempotent, thread-safe, does not block.
  virtual void abort(const Error& why) noexcept = 0;

 private:
  Op in_place(CollectiveKind kind, const Elements& data, ReduceOp op, int root, Pin pin,
              Fence ready) noexcept {
    return run({.kind = kind,
                .dtype = data.dtype,
                .op = op,
                .root = root,
                .inputs = {&data.slice, 1},
                .outputs = {&data.slice, 1},
                .training = data.training},
               std::move(pin), std::move(ready));
  }
};

}  // namespace weft::transport
