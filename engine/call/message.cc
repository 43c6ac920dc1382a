// SPDX-License-Identifier: Apache-2.0
#include <algorithm>

#include <weft/engine/call/message.h>
#include <weft/engine/tensor/tensor.h>

namespace weft::call {

namespace {

// Limits on the memory that a peer may make this process allocate for one message.
constexpr std::uint64_t kMostBody = std::uint64_t{1} << 30;
constexpr std::uint64_t kMostBytes = std::uint64_t{1} << 38;

// The memory that must outlive the sending.
struct Sent {
  codec::Encoded message;
};

// A message whose payloads are on their way in.
struct Coming {
  Head head;
  std::vector<std::byte> body;
  std::vector<codec::Part> parts;
  std::vector<c10::Stream> streams;
};

Device device_of(const StorageEntry& entry) {
  return entry.device_type == 0 ? Device::host() : Device::cuda(entry.device_index);
}

StorageEntry entry_of(std::uint64_t begin, const Device& to) {
  if (to.is_host()) return {begin, 0, 0};
  return {begin, 1, static_cast<std::uint8_t>(to.index)};
}

bool is_for_gpu(const StorageEntry& entry) { return entry.device_type != 0; }

// Why there is no memory here for one of the storages; nothing if there is memory for all.
std::optional<Error> why_no_memory(const std::vector<StorageEntry>& table,
                                   const transport::Connection& connection,
                                   const ReceiveMemory& memory) {
  for (const StorageEntry& entry : table) {
    if (!is_for_gpu(entry)) continue;
    const std::string what = "a tensor for cuda:" + std::to_string(entry.device_index);
    if (!connection.capabilities().device_memory)
      return Error(Blame::Caller, what + " arrived on a connection for host memory only");
    if (std::find(memory.gpus.begin(), memory.gpus.end(), entry.device_index) != memory.gpus.end())
      continue;
    return Error(Blame::Caller, what +
                                    ", which calls do not use there; name it in the "
                                    "rpc::Options::devices of the worker that gets it");
  }
  return std::nullopt;
}

// Memory for one storage, on the device that its entry names.
c10::Storage allocate(std::uint64_t bytes, const StorageEntry& entry, const ReceiveMemory& memory,
                      const std::vector<c10::Stream>& streams, tensor::CudaDevices* devices) {
  if (!is_for_gpu(entry)) {
    return c10::Storage(c10::Storage::use_byte_size_t(), bytes, memory.host.allocate(bytes),
                        /*allocator=*/nullptr,
                        /*resizable=*/false);
  }
  const auto index = static_cast<c10::DeviceIndex>(entry.device_index);
  const auto stream = std::find_if(streams.begin(), streams.end(), [&](const c10::Stream& one) {
    return one.device_index() == index;
  });
  return devices->allocate(bytes, *stream);
}

std::uint64_t bytes_of(std::size_t body, const std::vector<codec::Part>& parts) {
  std::uint64_t bytes = body;
  for (const codec::Part& part : parts) bytes += part.bytes;
  return bytes;
}

}  // namespace

std::uint64_t bytes_of(const codec::Encoded& message) {
  return bytes_of(message.body.size(), message.parts);
}

std::uint64_t bytes_of(const Message& message) {
  return bytes_of(message.body.size(), message.parts);
}

Op send_message(transport::Connection& connection, Head head, Outgoing outgoing) {
  codec::Encoded& message = outgoing.message;
  const std::uint64_t body_bytes = message.body.size();
  if (body_bytes > kMostBody ||
      bytes_of(message) > kMostBytes) {  // the receiver would end the connection
    return Op::failed(
        Error(Blame::Caller,
              body_bytes > kMostBody
                  ? "a message of " + std::to_string(body_bytes) +
                        " bytes besides its tensors is more than 1 GiB; send them as a tensor"
                  : "a message with tensors of more than 256 GiB; send it in parts"));
  }
  thread_local std::vector<std::byte> header;
  header.clear();
  std::vector<StorageEntry> table;
  std::vector<Slice> slices;
  const bool aside = message.body.size() > kMaxBodyInHeader;
  if (aside) {
    head.flags |= kBodyAside;
    slices.push_back(
        {const_cast<std::byte*>(message.body.data()), message.body.size(), Device::host()});
  }
  for (std::size_t i = 0; i < message.parts.size(); ++i) {
    const codec::Part& part = message.parts[i];
    table.push_back(entry_of(part.begin, outgoing.to.empty() ? Device::host() : outgoing.to[i]));
    slices.push_back({part.data(), part.bytes, tensor::device_of(part.device())});
  }
  head.storages = static_cast<std::uint32_t>(message.parts.size());
  append_head(header, head, table);
  if (!aside) {
    const auto body = message.body.bytes();
    header.insert(header.end(), body.begin(), body.end());
  }
  Pin pin;
  if (!slices.empty()) pin = std::make_shared<Sent>(Sent{std::move(message)});
  return connection.send(header, slices, std::move(pin), std::move(outgoing.ready));
}

void receive_message(transport::Connection& connection, const transport::Arrival& arrival,
                     const ReceiveMemory& memory, tensor::CudaDevices* devices,
                     std::function<void(Message message, const Error* lacking)> deliver,
                     const std::function<void(const Error& why)>& refuse) {
  const auto parsed = parse_head(arrival.header, arrival.sizes.size());
  const auto give_up = [&](const Error& why) {
    connection.accept({}, nullptr, Fence());
    refuse(why);
  };
  if (!parsed) return give_up(parsed.error());
  const auto& [head, table, rest] = parsed.value();
  if (arrival.sizes.empty()) {
    connection.accept({}, nullptr, Fence());
    return deliver(Message{head, rest, {}, {}}, nullptr);
  }
  const bool aside = (head.flags & kBodyAside) != 0;
  std::uint64_t bytes = 0;
  for (const std::uint64_t size : arrival.sizes) {
    if (size > kMostBytes - bytes)
      return give_up(Error(Blame::Protocol, "the peer sent a message of more than 256 GiB"));
    bytes += size;
  }
  if (aside && arrival.sizes[0] > kMostBody)
    return give_up(Error(Blame::Protocol, "the peer sent a body of more than 1 GiB"));

  const auto lacks = [&](const Error& lacking) {
    connection.accept({}, nullptr, Fence());
    deliver(Message{head, {}, {}, {}}, &lacking);
  };
  if (const auto none = why_no_memory(table, connection, memory)) return lacks(*none);

  auto coming = std::make_shared<Coming>();
  coming->head = head;
  std::vector<Slice> destinations;
  Fence ready;
  try {
    if (aside) {
      coming->body.resize(arrival.sizes[0]);
      destinations.push_back({coming->body.data(), coming->body.size(), Device::host()});
    } else {
      coming->body.assign(rest.begin(), rest.end());
    }
    if (std::any_of(table.begin(), table.end(), is_for_gpu)) {
      coming->streams = tensor::CudaDevices::pool_streams(memory.gpus);
    }
    for (std::size_t i = 0; i < table.size(); ++i) {
      const std::uint64_t size = arrival.sizes[i + (aside ? 1 : 0)];
      coming->parts.push_back(
          {table[i].begin, size, allocate(size, table[i], memory, coming->streams, devices), 0});
      destinations.push_back({coming->parts.back().data(), size, device_of(table[i])});
    }
    // Earlier work on these streams may still use the memory.
    if (!coming->streams.empty()) ready = devices->recorded(coming->streams);
  } catch (const Error& error) {  // a GPU's error
    return lacks(error);
  } catch (const std::exception&) {
    return lacks(
        Error(Blame::Busy, "no memory for a message of " + std::to_string(bytes) + " bytes"));
  }
  const Op op = connection.accept(destinations, coming, std::move(ready));
  op.on_ended([op, coming, deliver = std::move(deliver)] {
    const auto error = op.error();
    if (!error) {
      return deliver(
          Message{coming->head, coming->body, std::move(coming->parts), std::move(coming->streams)},
          nullptr);
    }
    // Otherwise the connection has ended, and its handler is told.
    if (is_of_message(*error)) deliver(Message{coming->head, {}, {}, {}}, &*error);
  });
}

Op send_challenge(transport::Connection& connection, std::span<const std::byte> body) {
  Head head;
  head.kind = FrameKind::Challenge;
  std::vector<std::byte> header;
  append_head(header, head, {});
  header.insert(header.end(), body.begin(), body.end());
  return connection.send(header, {}, nullptr, Fence());
}

std::optional<std::span<const std::byte>> challenge_in(const transport::Arrival& arrival) {
  if (!arrival.sizes.empty()) return std::nullopt;
  const auto parsed = parse_head(arrival.header, 0);
  if (!parsed || parsed.value().head.kind != FrameKind::Challenge) return std::nullopt;
  return parsed.value().rest;
}

}  // namespace weft::call
