// SPDX-License-Identifier: Apache-2.0
// For any headers and sizes that a peer sends in a mesh, in any order, a communicator neither
// crashes nor reads or writes memory that is not its own: it takes them, holds them back, or
// breaks, and then every pending operation ends with an error.
//
// The input consists of records of 36 bytes. The first byte chooses the event: a message on one of
// the connections (its header is the last 32 bytes, bytes 1 and 2 are its payload's size), after
// which this rank may look for a connection that it could close; or a call of this rank. The peer
// is rank 1 of two. This rank may keep one connection of the two.
#include <cstdint>
#include <cstring>
#include <functional>
#include <memory>
#include <vector>

#include <weft/base/log.h>
#include <weft/base/make_error.h>
#include <weft/tests/fuzz/mesh_fuzz.h>
#include <weft/transport/mesh/mesh_communicator.h>

namespace weft::transport::mesh {
namespace {

// A connection that delivers the input's messages, and discards sent ones.
class Scripted final : public Connection {
 public:
  std::string_view transport() const override { return "scripted"; }
  std::string peer() const override { return "the input"; }
  const Capabilities& capabilities() const override { return capabilities_; }
  void receive(Handlers) override {}
  Op send(std::span<const std::byte>, std::span<const Slice> payloads, Pin,
          Fence) noexcept override {
    if (closed_) return Op::failed(Error(Blame::Cancelled, "closed"));
    for (const Slice& payload : payloads) read_all(payload);
    return Op();
  }
  Op accept(std::span<const Slice> destinations, Pin, Fence) noexcept override {
    if (!has_message_ && !closed_) broken("accept() without a message");
    for (const Slice& destination : destinations) {
      if (destination.bytes != payload_) broken("a destination of another size than its payload");
      std::memset(destination.data, 0x11, destination.bytes);
    }
    if (destinations.size() > 1) broken("more destinations than payloads");
    has_message_ = false;
    return Op();
  }
  void close(const Error&) noexcept override { closed_ = true; }

  bool can_deliver() const { return !has_message_ && !closed_; }
  void deliver(Core& core, Traffic traffic, Bytes header, std::size_t payload, bool in_place) {
    has_message_ = true;
    payload_ = payload;
    // Separate allocations, so that a sanitizer detects reads beyond their ends.
    held_header_.assign(header.begin(), header.end());
    held_payload_.assign(in_place ? payload : 0, std::byte{1});
    const std::uint64_t size = payload;
    core.arrived(1, traffic,
                 {held_header_, {&size, payload > 0 ? std::size_t{1} : 0}, held_payload_});
  }

 private:
  static void read_all(const Slice& slice) {
    unsigned sum = 0;
    for (std::size_t i = 0; i < slice.bytes; ++i)
      sum += std::to_integer<unsigned>(static_cast<std::byte*>(slice.data)[i]);
    volatile unsigned seen = sum;
    static_cast<void>(seen);
  }
  Capabilities capabilities_;
  bool has_message_ = false;
  bool closed_ = false;
  std::size_t payload_ = 0;
  std::vector<std::byte> held_header_, held_payload_;
};

// Rank 0 of two.
class Rank {
 public:
  Rank() {
    JoinOptions options;
    options.size = 2;
    options.group_name = "fuzz";
    options.timeout = std::chrono::hours(1);
    options.max_connections = 1;
    options.loop = std::make_shared<EventLoop>("fuzz", EventLoop::Thread::Given);  // nothing runs
    core_ = std::make_shared<Core>(options, "scripted");
    communicator_ = std::make_unique<MeshCommunicator>(core_);
    for (const Traffic traffic : {Traffic::Collectives, Traffic::Messages}) {
      auto& connection = connections_[static_cast<std::size_t>(traffic)] =
          std::make_shared<Scripted>();
      core_->post(event::Adopted{1, traffic, connection});
    }
  }

  void message(Traffic traffic, Bytes header, std::size_t payload, bool in_place) {
    Scripted& connection = *connections_[static_cast<std::size_t>(traffic)];
    if (connection.can_deliver()) connection.deliver(*core_, traffic, header, payload, in_place);
  }

  void look() { core_->post(event::Look()); }

  void call(unsigned which, std::size_t bytes) {
    const auto memory = std::make_shared<std::vector<std::byte>>(bytes * 2 + 16);
    const Slice whole{memory->data(), bytes, Device::host()};
    const Elements floats{whole.part(0, bytes / 4 * 4), Dtype::Float32};
    const std::vector<Slice> halves{whole, {memory->data() + bytes, bytes, Device::host()}};
    switch (which % 9) {
      case 0: return keep(communicator_->all_reduce(floats, ReduceOp::Sum, memory, Fence()));
      case 1: return keep(communicator_->broadcast(floats, 1, memory, Fence()));
      case 2: return keep(communicator_->reduce(floats, 0, ReduceOp::Max, memory, Fence()));
      case 3:
        return keep(communicator_->all_gather(halves, {whole, Dtype::UInt8}, memory, Fence()));
      case 4: return keep(communicator_->all_to_all(halves, halves, Dtype::UInt8, memory, Fence()));
      case 5: return keep(communicator_->barrier(Fence()));
      case 6: return keep(communicator_->send(floats, 1, 0, memory, Fence()));
      case 7: return keep(communicator_->recv(floats, 1, 0, memory, Fence()));
      default: return keep(communicator_->recv(floats, kAnySource, 1, memory, Fence()));
    }
  }

  Outcome end() {
    communicator_.reset();
    Outcome outcome;
    for (const Op& op : ops_) {
      if (!op.ended()) broken("an operation outlives its communicator");
      const auto error = op.error();
      if (!error) {
        ++outcome.done;
      } else if (error->blame() == Blame::Cancelled) {
        ++outcome.pending;
      } else {
        ++outcome.failed;
      }
    }
    return outcome;
  }

 private:
  void keep(Op op) { ops_.push_back(std::move(op)); }

  std::shared_ptr<Core> core_;
  std::unique_ptr<MeshCommunicator> communicator_;
  std::shared_ptr<Scripted> connections_[kConnectionsPerPair];
  std::vector<Op> ops_;
};

}  // namespace

Outcome fuzz_mesh(Bytes input) {
  static const log::Capture quiet([](LogLevel, std::string_view) {});
  Rank rank;
  decode_hello(input).ok();
  for (int records = 0; input.size() >= kRecordBytes && records < 200; ++records) {
    const auto what = std::to_integer<unsigned>(input[0]);
    const std::size_t bytes =
        std::to_integer<std::size_t>(input[1]) | std::to_integer<std::size_t>(input[2]) << 8;
    if (what < 128) {
      const std::size_t cut = std::to_integer<unsigned>(input[3]) % 64 == 63 ? 5 : 0;
      rank.message(static_cast<Traffic>(what & 1), input.subspan(4, kHeaderBytes - cut), bytes,
                   (what & 2) != 0);
      if ((what & 4) != 0) rank.look();
    } else {
      rank.call(what, bytes);
    }
    input = input.subspan(kRecordBytes);
  }
  return rank.end();
}

}  // namespace weft::transport::mesh

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t bytes) {
  weft::transport::mesh::fuzz_mesh({reinterpret_cast<const std::byte*>(data), bytes});
  return 0;
}
