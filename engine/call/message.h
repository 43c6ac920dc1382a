// SPDX-License-Identifier: Apache-2.0
// Sends and receives whole messages over a connection: head, table, body and storages leave in one
// send and are put together again on the other side.
#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include <c10/core/Stream.h>

#include <weft/base/make_error.h>
#include <weft/engine/call/wire.h>
#include <weft/engine/codec/stream.h>
#include <weft/engine/tensor/cuda_devices.h>
#include <weft/engine/tensor/receive_pool.h>
#include <weft/transport/connection.h>

namespace weft::call {

// A message and the devices that it is for.
struct Outgoing {
  // All storages are in host memory, and are for host memory.
  Outgoing(codec::Encoded encoded) : message(std::move(encoded)) {}
  Outgoing() = default;

  codec::Encoded message;
  // The receiver's device for each storage. Empty: all are for its host memory.
  std::vector<Device> to;
  Fence ready;  // passes when the storages may be read
};

// Sends the message, and adds to `head` the flags for the body and the number of storages. Usable
// from every thread. Storages on GPUs need a connection that carries device memory.
Op send_message(transport::Connection& connection, Head head, Outgoing outgoing);

// Whether the error of a send or a receive concerns only its message, and the connection goes on.
inline bool is_of_message(const Error& error) {
  return !ends_connection(error.blame()) && error.blame() != Blame::Cancelled;
}

struct Message {
  Head head;
  std::span<const std::byte> body;
  std::vector<codec::Part> parts;
  // If there are storages on GPUs: one stream for each GPU that calls use. Such storages were
  // allocated on the stream of their GPU, and their bytes have arrived.
  std::vector<c10::Stream> streams;
};

// The memory into which messages are received.
struct ReceiveMemory {
  ReceivePool& host;
  // The GPUs that a message may name, on connections that carry device memory.
  const std::vector<int>& gpus;
};

// Bytes of the body and the storages.
std::uint64_t bytes_of(const codec::Encoded& message);
std::uint64_t bytes_of(const Message& message);

// For Handlers::arrived: accepts the arrival into memory of the devices that it names, and calls
// `deliver` on the loop once the storages have arrived; or calls `refuse`, with the reason, if the
// bytes are not a message. A message for which there is no memory, or no such device, is delivered
// without parts and with `lacking` set. A GPU's memory is overwritten in the order of a stream of
// libtorch's pool. `devices` may be null if there are no GPUs.
void receive_message(transport::Connection& connection, const transport::Arrival& arrival,
                     const ReceiveMemory& memory, tensor::CudaDevices* devices,
                     std::function<void(Message message, const Error* lacking)> deliver,
                     const std::function<void(const Error& why)>& refuse);

// Challenges (transport/challenge.h) are read and written without the codec and have no payloads,
// because strangers send them.
Op send_challenge(transport::Connection& connection, std::span<const std::byte> body);
// The body of a challenge; valid as long as the arrival, which the caller still has to accept.
// Nothing if the arrival is not a challenge.
std::optional<std::span<const std::byte>> challenge_in(const transport::Arrival& arrival);

}  // namespace weft::call
