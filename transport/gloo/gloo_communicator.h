// SPDX-License-Identifier: Apache-2.0
// Collectives over c10d's ProcessGroupGloo, on host memory. Collectives run on its two worker
// threads, messages on its device thread. This class adapts them to Communicator and turns their
// failures into Errors.
#pragma once

#include <functional>

#include <c10/util/intrusive_ptr.h>

#include <weft/transport/fenced_queue.h>
#include <weft/transport/gloo/waiters.h>
#include <weft/transport/transport.h>

namespace c10d {
class ProcessGroupGloo;
class Work;
}  // namespace c10d

namespace weft::transport::gloo {

class Pending;

class GlooCommunicator final : public Communicator,
                               public PointToPoint,
                               public std::enable_shared_from_this<GlooCommunicator> {
 public:
  using Start = std::function<c10::intrusive_ptr<c10d::Work>(c10d::ProcessGroupGloo&)>;

  // Collective: connects to every other rank. Throws Timeout, PeerLost.
  explicit GlooCommunicator(const JoinOptions& options);
  // Cancels pending operations and waits for Gloo's threads to end.
  ~GlooCommunicator() override;

  std::string_view backend() const override { return "gloo"; }
  int rank() const override { return rank_; }
  int size() const override { return size_; }
  bool can_reduce(Dtype dtype, ReduceOp op) const override;
  PointToPoint* point_to_point() override { return this; }

  Op run(const Collective& collective, Pin pin, Fence ready) noexcept override;
  void abort(const Error& why) noexcept override;

  bool has_tags() const override { return true; }
  bool has_any_source() const override { return true; }
  Op send(const Elements& data, int to, int tag, Pin pin, Fence ready) noexcept override;
  Op recv(const Elements& data, int from, int tag, Pin pin, Fence ready) noexcept override;

 private:
  struct Group;  // c10d's object and its lock; its callbacks must not own it

  // Issues one collective after `ready`. `finish` runs on Gloo's thread once the collective has
  // succeeded, before the Op's fence passes.
  Op collective(std::string name, Pin pin, Fence ready, Start start,
                std::function<void()> finish = {}) noexcept;
  Op message(std::string name, const Waiters::Stream& stream, Pin pin, Fence ready,
             Start start) noexcept;

  const int rank_;
  const int size_;
  std::shared_ptr<EventLoop> loop_;
  std::shared_ptr<Pending> pending_;
  std::shared_ptr<Group> group_;
  std::shared_ptr<FencedQueue> collectives_;
  std::shared_ptr<FencedQueue> messages_;
  std::shared_ptr<Waiters> waiters_;
};

}  // namespace weft::transport::gloo
