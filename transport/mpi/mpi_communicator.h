// SPDX-License-Identifier: Apache-2.0
// Collectives and messages by MPI's non-blocking calls, on host memory. The caller's thread or the
// loop issues operations in order once their bytes are ready; the loop polls for their end
// (requests.h).
//
// Sums and products of 16-bit floats are computed in fp32 and rounded once. An operation that fails
// or is late ends the group, because MPI cannot withdraw it. So does an operation for which this
// process cannot allocate memory.
#pragma once

#include <functional>

#include <weft/transport/fenced_queue.h>
#include <weft/transport/mpi/requests.h>
#include <weft/transport/transport.h>

namespace weft::transport::mpi {

class MpiCommunicator final : public Communicator, public PointToPoint {
 public:
  // Collective: exchanges the ranks' numbers within mpirun's job and creates an MPI communicator of
  // them. Throws Timeout, on all ranks that join, if one does not; Unsupported if a rank belongs to
  // another mpirun or two ranks are one process.
  MpiCommunicator(const JoinOptions& options, std::shared_ptr<World> world);
  // Fails pending operations. Frees MPI's communicator if no operation is left in it.
  ~MpiCommunicator() override;

  std::string_view backend() const override { return "mpi"; }
  int rank() const override { return rank_; }
  int size() const override { return size_; }
  bool can_reduce(Dtype dtype, ReduceOp op) const override { return kernels::supports(op, dtype); }
  PointToPoint* point_to_point() override { return this; }

  Op run(const Collective& collective, Pin pin, Fence ready) noexcept override;
  void abort(const Error& why) noexcept override { requests_->abort(why); }

  bool has_tags() const override { return true; }
  bool has_any_source() const override { return true; }
  Op send(const Elements& data, int to, int tag, Pin pin, Fence ready) noexcept override;
  Op recv(const Elements& data, int from, int tag, Pin pin, Fence ready) noexcept override;

 private:
  Op issue_broadcast(const Elements& data, int root, Pin pin, Fence ready);
  Op issue_all_reduce(const Elements& data, ReduceOp op, Pin pin, Fence ready);
  Op issue_reduce(const Elements& data, int root, ReduceOp op, Pin pin, Fence ready);
  Op issue_all_gather(std::span<const Slice> outputs, const Elements& input, Pin pin, Fence ready);
  Op issue_gather(std::span<const Slice> outputs, const Elements& input, int root, Pin pin,
                  Fence ready);
  Op issue_scatter(const Elements& output, std::span<const Slice> inputs, int root, Pin pin,
                   Fence ready);
  Op issue_reduce_scatter(const Elements& output, std::span<const Slice> inputs, ReduceOp op,
                          Pin pin, Fence ready);
  Op issue_all_to_all(std::span<const Slice> outputs, std::span<const Slice> inputs, Dtype dtype,
                      Pin pin, Fence ready);
  Op issue_barrier(Fence ready);

  // Makes the MPI call, inside World::turn(), where it may use World's types.
  using Start = std::function<int(const Library& mpi, MPI_Comm native, MPI_Request* request)>;

  // Issues an operation. `before` runs right before `start`, when the bytes are ready.
  Op issue(FencedQueue& queue, Requests::Call call, Fence ready, std::function<void()> before,
           Start start) noexcept;
  // Aborts the group with the current exception. Must be called inside a catch block.
  Op failed_here(std::string_view name) noexcept;
  std::optional<Error> why_refused(const char* what, Dtype dtype, ReduceOp op,
                                   std::size_t elements) const;
  std::optional<Error> why_refused(const std::string& what, const Elements& data, int tag) const;

  const std::shared_ptr<World> world_;
  const int rank_;
  const int size_;
  const std::string place_;
  const std::weak_ptr<EventLoop> loop_;
  MPI_Comm native_ = nullptr;
  std::shared_ptr<Requests> requests_;
  std::shared_ptr<FencedQueue> collectives_;
  std::shared_ptr<FencedQueue> sends_;
  std::shared_ptr<FencedQueue> receives_;
};

}  // namespace weft::transport::mpi
