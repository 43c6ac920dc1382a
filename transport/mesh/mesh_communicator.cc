// SPDX-License-Identifier: Apache-2.0
#include <weft/transport/mesh/mesh_communicator.h>

namespace weft::transport::mesh {

namespace {

// Sets only the fields that the kind uses, because ranks compare all of them.
Call call_of(const Collective& collective, const Layout& layout) {
  Call call{.kind = collective.kind, .dtype = collective.dtype};
  if (reduces(collective.kind)) call.op = collective.op;
  switch (collective.kind) {
    case Kind::Broadcast:
    case Kind::AllReduce:
    case Kind::Reduce:
    case Kind::AllGather:
    case Kind::Gather: call.bytes = collective.inputs.front().bytes; break;
    case Kind::Scatter: call.bytes = collective.outputs.front().bytes; break;
    case Kind::ReduceScatter:
      for (const Slice& input : collective.inputs) call.bytes += input.bytes;
      break;
    case Kind::AllToAll:
      if (collective.has_equal_parts && gathers_parts(layout, collective.inputs.front().bytes))
        call.bytes = collective.inputs.front().bytes;
      break;
    case Kind::Barrier: break;
  }
  switch (collective.kind) {
    case Kind::Broadcast:
    case Kind::Reduce:
    case Kind::Gather:
    case Kind::Scatter: call.root = collective.root; break;
    default: break;
  }
  if (collective.kind == Kind::Broadcast || collective.kind == Kind::AllReduce ||
      collective.kind == Kind::AllGather || collective.kind == Kind::ReduceScatter)
    call.training = carried(collective.training);
  return call;
}

}  // namespace

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

Op MeshCommunicator::run(const Collective& collective, Pin pin, Fence ready) noexcept {
  if (reduces(collective.kind) && !can_reduce(collective.dtype, collective.op))
    return refused(collective.kind, collective.dtype, collective.op);
  return core_->call([&](Operation& operation) {
    operation.call = call_of(collective, core_->layout);
    // The operation may be one that has ended, and then holds slices of another kind.
    operation.data = {};
    operation.inputs.clear();
    operation.outputs.clear();
    switch (collective.kind) {
      case Kind::Broadcast:
      case Kind::AllReduce:
      case Kind::Reduce: operation.data = collective.inputs.front(); break;
      case Kind::AllGather:
      case Kind::Gather:
        operation.data = collective.inputs.front();
        operation.outputs.assign(collective.outputs.begin(), collective.outputs.end());
        break;
      case Kind::Scatter:
      case Kind::ReduceScatter:
        operation.data = collective.outputs.front();
        operation.inputs.assign(collective.inputs.begin(), collective.inputs.end());
        break;
      case Kind::AllToAll:
        operation.inputs.assign(collective.inputs.begin(), collective.inputs.end());
        operation.outputs.assign(collective.outputs.begin(), collective.outputs.end());
        break;
      case Kind::Barrier: break;
    }
    operation.pin = std::move(pin);
    operation.ready = std::move(ready);
  });
}

Op MeshCommunicator::send(const Elements& data, int to, int tag, Pin pin, Fence ready) noexcept {
  return message(sends_, /*is_send=*/true, data, to, tag, std::move(pin), std::move(ready));
}

Op MeshCommunicator::recv(const Elements& data, int from, int tag, Pin pin, Fence ready) noexcept {
  return message(receives_, /*is_send=*/false, data, from, tag, std::move(pin), std::move(ready));
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
