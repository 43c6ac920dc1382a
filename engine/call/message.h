// Whole messages over a connection: head, table, body and storages in one send, and together again
// on the other side.
#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include <c10/core/Stream.h>

#include <weft/engine/call/wire.h>
#include <weft/engine/codec/stream.h>
#include <weft/engine/tensor/cuda_devices.h>
#include <weft/engine/tensor/receive_pool.h>
#include <weft/transport/connection.h>

namespace weft::rpc {

// A message, and where it goes.
struct Outgoing {
  // All storages lie in host memory, and go to host memory.
  Outgoing(codec::Encoded encoded) : message(std::move(encoded)) {}
  Outgoing() = default;

  codec::Encoded message;
  std::vector<Device>
      to;  // of each storage, as the receiver numbers devices; empty: all are for its host memory
  Fence ready;  // when the storages may be read
};

// Sends the message; `head` lacks its flags for the body and the number of storages. Usable from
// every thread. Storages on GPUs need a connection that carries device memory.
Op send_message(transport::Connection& connection, Head head, Outgoing outgoing);

// Whether the error of a send, or of a receive, is of the one message, and its lane goes on.
inline bool is_of_message(const Error& error) {
  return !ends_connection(error.blame()) && error.blame() != Blame::Cancelled;
}

struct Message {
  Head head;
  std::span<const std::byte> body;
  std::vector<codec::Part> parts;
  // Where there are storages on GPUs: a stream of each GPU that calls use. Those of the storages
  // own their memory; the bytes are there.
  std::vector<c10::Stream> streams;
};

// What messages are received into.
struct ReceiveMemory {
  ReceivePool& host;
  const std::vector<int>& gpus;  // that may be named; on lanes that carry device memory
};

// Of the body and the storages.
std::uint64_t bytes_of(const codec::Encoded& message);
std::uint64_t bytes_of(const Message& message);

// For Handlers::arrived: accepts what came, into memory of the devices that it names, and calls
// `deliver` once the storages are there, on the loop; or `refuse`, with the reason, where the bytes
// are no message. What there is no memory for, or no such device, comes without parts and with
// `lacking` set. Memory of a GPU is overwritten in the order of a stream of libtorch's pool.
// `devices` may be null where there are no gpus.
void receive_message(transport::Connection& connection, const transport::Arrival& arrival,
                     const ReceiveMemory& memory, tensor::CudaDevices* devices,
                     std::function<void(Message message, const Error* lacking)> deliver,
                     const std::function<void(const Error& why)>& refuse);

// Challenges (secret.h) are read and written without the codec, and have no payloads: strangers
// send them.
Op send_challenge(transport::Connection& connection, std::span<const std::byte> body);
// Its body; valid as long as the arrival, which is left to be accepted. Nothing where that is no
// challenge.
std::optional<std::span<const std::byte>> challenge_in(const transport::Arrival& arrival);

}  // namespace weft::rpc
