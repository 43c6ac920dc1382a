// SPDX-License-Identifier: Apache-2.0
// The Communicator of a mesh: turns each call into an event; Core does everything else.
#pragma once

#include <atomic>

#include <weft/transport/communicator.h>
#include <weft/transport/fenced_queue.h>
#include <weft/transport/mesh/core.h>

namespace weft::transport::mesh {

class MeshCommunicator final : public Communicator, public PointToPoint {
 public:
  explicit MeshCommunicator(std::shared_ptr<Core> core);
  // Fails pending operations and closes the connections.
  ~MeshCommunicator() override;

  std::string_view backend() const override { return core_->backend; }
  std::string transport(int peer) const override { return core_->transport_to(peer); }
  int rank() const override { return core_->rank; }
  int size() const override { return core_->ranks; }
  bool can_reduce(Dtype dtype, ReduceOp op) const override { return kernels::supports(op, dtype); }
  bool compares_calls() const override { return true; }
  bool is_broken() const noexcept override { return core_->has_failed(); }
  PointToPoint* point_to_point() override { return this; }
  // Null if it has no connections.
  std::shared_ptr<Openings> openings() const { return core_->openings(); }

  Op run(const Collective& collective, Pin pin, Fence ready) noexcept override;
  void abort(const Error& why) noexcept override;

  bool has_tags() const override { return true; }
  bool has_any_source() const override { return true; }
  Op send(const Elements& data, int to, int tag, Pin pin, Fence ready) noexcept override;
  Op recv(const Elements& data, int from, int tag, Pin pin, Fence ready) noexcept override;
  std::vector<Unreceived> unreceived() override;

 private:
  // Messages whose `ready` fence has not passed, in the order of their calls.
  struct Line {
    explicit Line(const std::shared_ptr<EventLoop>& loop)
        : queue(std::make_shared<FencedQueue>(loop)) {}
    std::shared_ptr<FencedQueue> queue;
    std::shared_ptr<std::atomic<int>> waiting = std::make_shared<std::atomic<int>>(0);
  };

  Op message(Line& line, bool is_send, const Elements& data, int peer, int tag, Pin pin,
             Fence ready) noexcept;
  Op refused(Kind kind, Dtype dtype, ReduceOp op) const;

  const std::shared_ptr<Core> core_;
  Line sends_;
  Line receives_;
};

}  // namespace weft::transport::mesh
