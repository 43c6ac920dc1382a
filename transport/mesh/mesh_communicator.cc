#include <weft/transport/mesh/mesh_communicator.h>

namespace weft::transport::mesh {

MeshCommunicator::MeshCommunicator(std::shared_ptr<Core> core)
    : core_(std::move(core)), sends_(core_->loop), receives_(core_->loop) {}

MeshCommunicator::~MeshCommunicator() {
  core_->post(
      event::Failed{Error(Blame::Cancelled, "the group was destroyed"), /*destroyed=*/true});
}

std::vector<PointToPoint::Unreceived> MeshCommunicator::unreceived() {
  const event::Asked asked{std::make_shared<std::vector<Unreceived>>(),
                           std::make_shared<HostFlag>()};
  core_->post(asked);
  if (!asked.answered->synchronize(Deadline::in(std::chrono::seconds(1))))
    return {};  // the thread that handles events is busy
  return *asked.unreceived;
}

void MeshCommunicator::abort(const Error& why) noexcept {
  core_->post(event::Failed{why, /*destroyed=*/false});
}

Op MeshCommunicator::broadcast(const Elements& data, int root, Pin pin, Fence ready) noexcept {
  return collective({.kind = Kind::Broadcast,
                     .dtype = data.dtype,
                     .root = root,
                     .bytes = data.slice.bytes,
                     .training = carried(data.training)},
                    data.slice, {}, {}, std::move(pin), std::move(ready));
}

Op MeshCommunicator::all_reduce(const Elements& data, ReduceOp op, Pin pin, Fence ready) noexcept {
  if (!can_reduce(data.dtype, op)) return refused(Kind::AllReduce, data.dtype, op);
  return collective({.kind = Kind::AllReduce,
                     .dtype = data.dtype,
                     .op = op,
                     .bytes = data.slice.bytes,
                     .training = carried(data.training)},
                    data.slice, {}, {}, std::move(pin), std::move(ready));
}

Op MeshCommunicator::reduce(const Elements& data, int root, ReduceOp op, Pin pin,
                            Fence ready) noexcept {
  if (!can_reduce(data.dtype, op)) return refused(Kind::Reduce, data.dtype, op);
  return collective({.kind = Kind::Reduce,
                     .dtype = data.dtype,
                     .op = op,
                     .root = root,
                     .bytes = data.slice.bytes},
                    data.slice, {}, {}, std::move(pin), std::move(ready));
}

Op MeshCommunicator::all_gather(std::span<const Slice> outputs, const Elements& input, Pin pin,
                                Fence ready) noexcept {
  return collective({.kind = Kind::AllGather, .dtype = input.dtype, .bytes = input.slice.bytes},
                    input.slice, {}, outputs, std::move(pin), std::move(ready));
}

Op MeshCommunicator::gather(std::span<const Slice> outputs, const Elements& input, int root,
                            Pin pin, Fence ready) noexcept {
  return collective(
      {.kind = Kind::Gather, .dtype = input.dtype, .root = root, .bytes = input.slice.bytes},
      input.slice, {}, outputs, std::move(pin), std::move(ready));
}

Op MeshCommunicator::scatter(const Elements& output, std::span<const Slice> inputs, int root,
                             Pin pin, Fence ready) noexcept {
  return collective(
      {.kind = Kind::Scatter, .dtype = output.dtype, .root = root, .bytes = output.slice.bytes},
      output.slice, inputs, {}, std::move(pin), std::move(ready));
}

Op MeshCommunicator::reduce_scatter(const Elements& output, std::span<const Slice> inputs,
                                    ReduceOp op, Pin pin, Fence ready) noexcept {
  if (!can_reduce(output.dtype, op)) return refused(Kind::ReduceScatter, output.dtype, op);
  std::uint64_t bytes = 0;
  for (const Slice& input : inputs) bytes += input.bytes;
  return collective({.kind = Kind::ReduceScatter, .dtype = output.dtype, .op = op, .bytes = bytes},
                    output.slice, inputs, {}, std::move(pin), std::move(ready));
}

Op MeshCommunicator::all_to_all(std::span<const Slice> outputs, std::span<const Slice> inputs,
                                Dtype dtype, Pin pin, Fence ready) noexcept {
  return collective({.kind = Kind::AllToAll, .dtype = dtype}, Slice(), inputs, outputs,
                    std::move(pin), std::move(ready));
}

Op MeshCommunicator::barrier(Fence ready) noexcept {
  return collective({.kind = Kind::Barrier}, Slice(), {}, {}, Pin(), std::move(ready));
}

Op MeshCommunicator::send(const Elements& data, int to, int tag, Pin pin, Fence ready) noexcept {
  return message(sends_, /*is_send=*/true, data, to, tag, std::move(pin), std::move(ready));
}

Op MeshCommunicator::recv(const Elements& data, int from, int tag, Pin pin, Fence ready) noexcept {
  return message(receives_, /*is_send=*/false, data, from, tag, std::move(pin), std::move(ready));
}

Op MeshCommunicator::collective(const Call& call, const Slice& data, std::span<const Slice> inputs,
                                std::span<const Slice> outputs, Pin pin, Fence ready) noexcept {
  return core_->call([&](Operation& operation) {
    operation.call = call;
    operation.data = data;
    operation.inputs.assign(inputs.begin(), inputs.end());
    operation.outputs.assign(outputs.begin(), outputs.end());
    operation.pin = std::move(pin);
    operation.ready = std::move(ready);
  });
}

Op MeshCommunicator::message(Line& line, bool is_send, const Elements& data, int peer, int tag,
                             Pin pin, Fence ready) noexcept {
  const auto transfer =
      std::make_shared<Transfer>(Transfer{.is_send = is_send,
                                          .peer = peer,
                                          .tag = tag,
                                          .data = data.slice,
                                          .dtype = data.dtype,
                                          .pin = std::move(pin),
                                          .completion = Completion(Pin(), core_->flag())});
  const Op op = transfer->completion.op();
  // Calls come one at a time, so no other message can start to wait between this test and the post.
  if (line.waiting->load() == 0 && ready.query()) {
    core_->post(event::Posted{transfer, /*is_ready=*/true});
    return op;
  }
  core_->post(event::Posted{transfer, /*is_ready=*/false});
  ++*line.waiting;
  line.queue->run(std::move(ready), [core = core_, waiting = line.waiting, transfer] {
    core->post(event::Posted{transfer, /*is_ready=*/true});
    --*waiting;
  });
  return op;
}

Op MeshCommunicator::refused(Kind kind, Dtype dtype, ReduceOp op) const {
  return Op::failed(Error(Blame::Unsupported, std::string(name(kind)) + " " + core_->place +
                                                  ": no " + std::string(name(op)) + " of " +
                                                  std::string(name(dtype))));
}

}  // namespace weft::transport::mesh
