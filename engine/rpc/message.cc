#include <weft/engine/rpc/message.h>

namespace weft::rpc {

namespace {

// Bounds of what a peer may make this process allocate for one message.
constexpr std::uint64_t kMostBody = std::uint64_t{1} << 30;
constexpr std::uint64_t kMostBytes = std::uint64_t{1} << 38;

// What must outlive the sending.
struct Sent {
  codec::Encoded message;
};

// A message whose payloads are on their way in.
struct Coming {
  Head head;
  std::vector<std::byte> body;
  std::vector<codec::Part> parts;
};

std::uint64_t bytes_of(std::size_t body, const std::vector<codec::Part>& parts) {
  std::uint64_t bytes = body;
  for (const codec::Part& part : parts) bytes += part.bytes;
  return bytes;
}

}  // namespace

std::uint64_t bytes_of(const codec::Encoded& message) { return bytes_of(message.body.size(), message.parts); }

std::uint64_t bytes_of(const Message& message) { return bytes_of(message.body.size(), message.parts); }

Op send_message(transport::Connection& connection, Head head, codec::Encoded message) {
  thread_local std::vector<std::byte> header;
  header.clear();
  std::vector<StorageEntry> table;
  std::vector<Slice> slices;
  const bool aside = message.body.size() > kMaxBodyInHeader;
  if (aside) {
    head.flags |= kBodyAside;
    slices.push_back({const_cast<std::byte*>(message.body.data()), message.body.size(), Device::host()});
  }
  for (const codec::Part& part : message.parts) {
    table.push_back({part.begin, 0, 0});
    slices.push_back({part.data(), part.bytes, Device::host()});
  }
  head.storages = static_cast<std::uint32_t>(message.parts.size());
  append_head(header, head, table);
  if (!aside) {
    const auto body = message.body.bytes();
    header.insert(header.end(), body.begin(), body.end());
  }
  Pin pin;
  if (!slices.empty()) pin = std::make_shared<Sent>(Sent{std::move(message)});
  return connection.send(header, slices, std::move(pin), Fence());
}

void receive_message(transport::Connection& connection, const transport::Arrival& arrival, ReceivePool& pool,
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
    return deliver(Message{head, rest, {}}, nullptr);
  }
  const bool aside = (head.flags & kBodyAside) != 0;
  std::uint64_t bytes = 0;
  for (const std::uint64_t size : arrival.sizes) {
    if (size > kMostBytes - bytes) return give_up(Error(Blame::PeerLost, "the peer sent a message of more than 256 GiB"));
    bytes += size;
  }
  if (aside && arrival.sizes[0] > kMostBody)
    return give_up(Error(Blame::PeerLost, "the peer sent a body of more than 1 GiB"));

  auto coming = std::make_shared<Coming>();
  coming->head = head;
  std::vector<Slice> destinations;
  try {
    if (aside) {
      coming->body.resize(arrival.sizes[0]);
      destinations.push_back({coming->body.data(), coming->body.size(), Device::host()});
    } else {
      coming->body.assign(rest.begin(), rest.end());
    }
    for (std::size_t i = 0; i < table.size(); ++i) {
      const std::uint64_t size = arrival.sizes[i + (aside ? 1 : 0)];
      c10::Storage storage(c10::Storage::use_byte_size_t(), size, pool.allocate(size), /*allocator=*/nullptr,
                           /*resizable=*/false);
      coming->parts.push_back({table[i].begin, size, std::move(storage), 0});
      destinations.push_back({coming->parts.back().data(), size, Device::host()});
    }
  } catch (const std::exception&) {
    connection.accept({}, nullptr, Fence());
    const Error lacking(Blame::Busy, "no memory for a message of " + std::to_string(bytes) + " bytes");
    return deliver(Message{head, {}, {}}, &lacking);
  }
  const Op op = connection.accept(destinations, coming, Fence());
  op.on_ended([op, coming, deliver = std::move(deliver)] {
    if (op.error()) return;  // the lane has ended, which its handler hears of
    deliver(Message{coming->head, coming->body, std::move(coming->parts)}, nullptr);
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

}  // namespace weft::rpc
