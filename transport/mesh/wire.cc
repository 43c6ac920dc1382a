// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <bit>
#include <cstring>

#include <weft/base/make_error.h>
#include <weft/transport/mesh/wire.h>
#include <weft/transport/stream/frame.h>

namespace weft::transport::mesh {

namespace {

static_assert(std::endian::native == std::endian::little, "the wire's layout is this machine's");

struct HelloLayout {
  std::uint32_t magic;
  std::uint16_t version;
  std::uint8_t traffic;
  std::uint8_t answer;
  std::uint32_t rank;
  std::uint32_t ranks;
  std::uint32_t closed;
  Token token;
  Token group;
};
static_assert(sizeof(HelloLayout) == kHelloBytes);

struct HeaderLayout {
  std::uint8_t type, kind, dtype, op;
  std::int32_t root;
  std::uint64_t sequence;
  std::uint64_t bytes;
  std::uint32_t number;
  std::uint32_t blame;  // or a Collective's training
};
static_assert(sizeof(HeaderLayout) == kHeaderBytes);

// The model is in the upper 8 bits, the step in the others.
constexpr std::uint32_t kModels = 0xff, kSteps = 0xff'ffff;
std::uint32_t encode(const Training& training) { return training.model << 24 | training.step; }
Training decode_training(std::uint32_t field) { return {field >> 24, field & kSteps}; }

Error refused(const std::string& what) { return {Blame::Protocol, "an invalid message: " + what}; }

}  // namespace

std::array<std::byte, kHelloBytes> encode(const Hello& hello) {
  const HelloLayout layout{.magic = kMagic,
                           .version = kVersion,
                           .traffic = static_cast<std::uint8_t>(hello.traffic),
                           .answer = static_cast<std::uint8_t>(hello.answer),
                           .rank = hello.rank,
                           .ranks = hello.ranks,
                           .closed = hello.closed,
                           .token = hello.token,
                           .group = hello.group};
  return std::bit_cast<std::array<std::byte, kHelloBytes>>(layout);
}

Result<Hello> decode_hello(Bytes header) {
  if (header.size() != kHelloBytes)
    return refused("a hello of " + std::to_string(header.size()) + " bytes");
  HelloLayout layout;
  std::memcpy(&layout, header.data(), sizeof layout);
  if (layout.magic != kMagic) return refused("a hello without a valid magic number");
  if (layout.version != kVersion) {
    return refused("a hello of version " + std::to_string(layout.version) +
                   ", this process uses version " + std::to_string(kVersion));
  }
  if (layout.traffic >= kConnectionsPerPair)
    return refused("a hello for connection " + std::to_string(layout.traffic));
  if (layout.answer > static_cast<std::uint8_t>(kLastAnswer))
    return refused("a hello with answer " + std::to_string(layout.answer));
  if (layout.rank >= layout.ranks) return refused("a hello of rank " + std::to_string(layout.rank));
  return Hello{layout.token,
               layout.group,
               layout.rank,
               layout.ranks,
               static_cast<Traffic>(layout.traffic),
               static_cast<Answer>(layout.answer),
               layout.closed};
}

Training carried(const Training& training) {
  const auto within = [](std::uint32_t number, std::uint32_t most) {
    return number == 0 ? 0 : (number - 1) % most + 1;
  };
  return {within(training.model, kModels), within(training.step, kSteps)};
}

std::string describe(const Call& call) {
  std::string text(name(call.kind));
  if (call.kind == Kind::Barrier) return text;
  text += " of ";
  if (call.kind == Kind::AllToAll) {
    text += call.bytes == 0 ? std::string(name(call.dtype))
                            : "parts of " + elements_text(call.bytes, call.dtype);
  } else {
    text += elements_text(call.bytes, call.dtype);
  }
  if (call.kind == Kind::AllReduce || call.kind == Kind::Reduce ||
      call.kind == Kind::ReduceScatter) {
    text += " with " + std::string(name(call.op));
  }
  text += training_text(call.training);
  // Sharded models put the number of the unit into it (engine/shard/unit.h).
  if (call.training.model == 0 && call.training.step != 0)
    text += ", of unit " + std::to_string(call.training.step) + " of a FullyShardedDataParallel";
  if (call.kind == Kind::Broadcast || call.kind == Kind::Scatter)
    text += " from rank " + std::to_string(call.root);
  if (call.kind == Kind::Reduce || call.kind == Kind::Gather)
    text += " to rank " + std::to_string(call.root);
  return text;
}

EncodedHeader encode(const Header& header) {
  const HeaderLayout layout{.type = static_cast<std::uint8_t>(header.type),
                            .kind = static_cast<std::uint8_t>(header.call.kind),
                            .dtype = static_cast<std::uint8_t>(header.call.dtype),
                            .op = static_cast<std::uint8_t>(header.call.op),
                            .root = header.call.root,
                            .sequence = header.sequence,
                            .bytes = header.call.bytes,
                            .number = header.number,
                            .blame = header.type == Type::Collective
                                         ? encode(header.call.training)
                                         : static_cast<std::uint32_t>(header.blame)};
  return std::bit_cast<EncodedHeader>(layout);
}

std::vector<std::byte> encode_failure(const Error& why) {
  std::vector<int> ranks = why.ranks();
  ranks.resize(std::min(ranks.size(), kMaxAbout));
  Header header;
  header.type = Type::Failure;
  header.blame = why.blame();
  header.number = static_cast<std::uint32_t>(ranks.size());
  const EncodedHeader fixed = encode(header);
  const Bytes about = std::as_bytes(std::span(ranks));
  const Bytes text =
      std::as_bytes(std::span(why.text())).first(std::min(why.text().size(), kMaxText));
  std::vector<std::byte> bytes(fixed.begin(), fixed.end());
  bytes.insert(bytes.end(), about.begin(), about.end());
  bytes.insert(bytes.end(), text.begin(), text.end());
  return bytes;
}

Result<Message> decode(Bytes header, std::span<const std::uint64_t> sizes, int ranks) {
  if (header.size() < kHeaderBytes)
    return refused("a header of " + std::to_string(header.size()) + " bytes");
  HeaderLayout layout;
  std::memcpy(&layout, header.data(), sizeof layout);
  const Bytes rest = header.subspan(kHeaderBytes);
  if (layout.type < static_cast<std::uint8_t>(Type::Collective) ||
      layout.type > static_cast<std::uint8_t>(Type::Closing)) {
    return refused("type " + std::to_string(layout.type));
  }
  if (layout.kind > static_cast<std::uint8_t>(Kind::Barrier))
    return refused("kind " + std::to_string(layout.kind));
  if (layout.dtype > static_cast<std::uint8_t>(Dtype::UInt64))
    return refused("dtype " + std::to_string(layout.dtype));
  if (layout.op > static_cast<std::uint8_t>(ReduceOp::BitXor))
    return refused("operator " + std::to_string(layout.op));
  const bool is_collective = layout.type == static_cast<std::uint8_t>(Type::Collective);
  if (!is_collective && layout.blame > static_cast<std::uint32_t>(kLastBlame))
    return refused("blame " + std::to_string(layout.blame));
  if (sizes.size() > 1) return refused(std::to_string(sizes.size()) + " payloads");

  Message message;
  message.header.type = static_cast<Type>(layout.type);
  message.header.call = {static_cast<Kind>(layout.kind),
                         static_cast<Dtype>(layout.dtype),
                         static_cast<ReduceOp>(layout.op),
                         layout.root,
                         layout.bytes,
                         is_collective ? decode_training(layout.blame) : Training()};
  message.header.sequence = layout.sequence;
  message.header.number = layout.number;
  if (!is_collective) message.header.blame = static_cast<Blame>(layout.blame);
  message.payload = sizes.empty() ? 0 : sizes[0];

  const Type type = message.header.type;
  if (type == Type::Collective && (layout.root < 0 || layout.root >= ranks)) {
    return refused("root " + std::to_string(layout.root));
  }
  if (type == Type::Closing && layout.number > static_cast<std::uint32_t>(kLastClosingStep))
    return refused("step " + std::to_string(layout.number) + " of closing");
  if (type == Type::Failure) {
    const std::size_t about = layout.number * sizeof(int);
    if (layout.number > kMaxAbout || about > rest.size())
      return refused(std::to_string(layout.number) + " ranks");
    message.about.resize(layout.number);
    if (about > 0) std::memcpy(message.about.data(), rest.data(), about);
    for (const int rank : message.about) {
      if (rank < 0 || rank >= ranks) return refused("a failure about rank " + std::to_string(rank));
    }
    const Bytes text = rest.subspan(about);
    if (text.size() > kMaxText)
      return refused("a failure text of " + std::to_string(text.size()) + " bytes");
    message.text = frame::text_of(text);
  } else if (!rest.empty()) {
    return refused("a header of " + std::to_string(header.size()) + " bytes");
  }
  const bool says_its_size = type == Type::Eager || type == Type::Payload;
  const bool has_payload = says_its_size || type == Type::Collective;
  if (!has_payload && message.payload != 0) return refused("a payload in a message that has none");
  if (says_its_size && message.payload != layout.bytes)
    return refused("a payload of a different size than its header says");
  return message;
}

}  // namespace weft::transport::mesh
