// Whole messages over a connection: head, table, body and storages in one send, and together again on the other side.
#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include <weft/engine/codec/stream.h>
#include <weft/engine/rpc/wire.h>
#include <weft/engine/tensor/receive_pool.h>
#include <weft/transport/connection.h>

namespace weft::rpc {

// Sends the message; `head` lacks its flags for the body and the number of storages. Usable from every thread.
Op send_message(transport::Connection& connection, Head head, codec::Encoded message);

struct Message {
  Head head;
  std::span<const std::byte> body;
  std::vector<codec::Part> parts;
};

// Of the body and the storages.
std::uint64_t bytes_of(const codec::Encoded& message);
std::uint64_t bytes_of(const Message& message);

// For Handlers::arrived: accepts what came, into memory of the pool, and calls `deliver` once the storages are there, on
// the loop; or `refuse`, with the reason, where the bytes are no message. What there is no memory for comes without parts
// and with `lacking` set.
void receive_message(transport::Connection& connection, const transport::Arrival& arrival, ReceivePool& pool,
                     std::function<void(Message message, const Error* lacking)> deliver,
                     const std::function<void(const Error& why)>& refuse);

// Challenges (secret.h) are read and written without the codec, and have no payloads: strangers send them.
Op send_challenge(transport::Connection& connection, std::span<const std::byte> body);
// Its body; valid as long as the arrival, which is left to be accepted. Nothing where that is no challenge.
std::optional<std::span<const std::byte>> challenge_in(const transport::Arrival& arrival);

}  // namespace weft::rpc
