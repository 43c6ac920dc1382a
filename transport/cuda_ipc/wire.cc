// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cstring>
#include <fstream>
#include <sstream>

#include <sys/stat.h>
#include <unistd.h>

#include <weft/transport/cuda_ipc/wire.h>
#include <weft/transport/little_endian.h>

namespace weft::transport::cuda_ipc {

namespace {

constexpr char kMagic[8] = {'W', 'E', 'F', 'T', 'i', 'p', 'c', '2'};
constexpr std::size_t kMaxName = 256;
// Most bytes of one piece in a message.
constexpr std::size_t kPieceBytes = 8 + 8 + 8 + 8 + 1 + 64;
// Most bytes of one payload. A message may have as many pieces as payloads.
constexpr std::size_t kPayloadBytes = 8 + 4 + kPieceBytes;
constexpr std::size_t kFrontBytes = 64;

// How a message describes a piece's allocation.
enum class Told : std::uint8_t { Before = 0, Handle = 1, Descriptor = 2 };

class Writer {
 public:
  explicit Writer(Kind kind) { put(static_cast<std::uint8_t>(kind)); }
  template <std::unsigned_integral Number>
  void put(Number number) {
    little_endian::append(bytes_, number);
  }
  void put_bytes(Bytes bytes) { bytes_.insert(bytes_.end(), bytes.begin(), bytes.end()); }
  void put(const std::string& text) {
    put(static_cast<std::uint32_t>(text.size()));
    put_bytes(std::as_bytes(std::span(text)));
  }
  std::vector<std::byte> take() { return std::move(bytes_); }

 private:
  std::vector<std::byte> bytes_;
};

// Reads zeros past the end; then is_cut() is true.
class Reader {
 public:
  explicit Reader(Bytes bytes) : left_(bytes) {}
  template <class Number>
  Number get() {
    const Bytes bytes = get(sizeof(Number));
    return bytes.empty() ? Number{0} : little_endian::get<Number>(bytes.data());
  }
  Bytes get(std::size_t count) {
    if (count > left_.size()) {
      is_cut_ = true;
      left_ = {};
      return {};
    }
    const Bytes bytes = left_.first(count);
    left_ = left_.subspan(count);
    return bytes;
  }
  template <std::size_t Count>
  std::array<std::byte, Count> array() {
    std::array<std::byte, Count> result{};
    const Bytes bytes = get(Count);
    std::copy(bytes.begin(), bytes.end(), result.begin());
    return result;
  }
  std::string text() {
    const auto count = get<std::uint32_t>();
    if (count > kMaxName) is_cut_ = true;
    const Bytes bytes = is_cut_ ? Bytes() : get(count);
    return {reinterpret_cast<const char*>(bytes.data()), bytes.size()};
  }
  bool is_cut() const { return is_cut_; }
  Bytes rest() const { return left_; }

 private:
  Bytes left_;
  bool is_cut_ = false;
};

// Decodes a piece of a payload of which `left` bytes remain; empty if the piece is invalid.
std::optional<Piece> piece_of(Reader& reader, std::uint64_t left) {
  Piece piece;
  piece.bytes = reader.get<std::uint64_t>();
  piece.allocation = reader.get<std::uint64_t>();
  piece.replaces = reader.get<std::uint64_t>();
  piece.offset = reader.get<std::uint64_t>();
  const auto told = reader.get<std::uint8_t>();
  if (piece.bytes == 0 || piece.bytes > left) return std::nullopt;
  switch (static_cast<Told>(told)) {
    case Told::Before: return piece;
    case Told::Handle: piece.handle = reader.array<64>(); return piece;
    case Told::Descriptor:
      piece.passed = reader.get<std::uint64_t>();
      if (piece.passed < piece.bytes || piece.offset > piece.passed - piece.bytes)
        return std::nullopt;
      return piece;
  }
  return std::nullopt;
}

Error wrong(const std::string& text) {
  return Error(Blame::Protocol, "the peer sent an invalid message: " + text);
}

}  // namespace

Identity Identity::here() {
  Identity identity;
  std::getline(std::ifstream("/proc/sys/kernel/random/boot_id"), identity.host);
  struct stat about {};
  if (::stat("/proc/self/ns/pid", &about) != 0) identity.host.clear();
  identity.processes = std::to_string(about.st_ino);
  identity.process = static_cast<std::uint64_t>(::getpid());
  // Reads the 22nd field. The second is a name in brackets, which may contain any characters.
  std::string line;
  std::getline(std::ifstream("/proc/self/stat"), line);
  std::istringstream fields(line.substr(std::min(line.rfind(')') + 1, line.size())));
  for (int field = 3; field < 22; ++field) fields >> line;
  fields >> identity.started;
  return identity;
}

std::optional<std::string> why_unreachable(const Identity& here, const Identity& there) {
  for (const Identity* one : {&here, &there}) {
    if (!one->host.empty()) continue;
    const std::string whom = one == &here ? "this process" : "the peer";
    return "/proc does not tell " + whom + " its host and process namespace (is it mounted?)";
  }
  if (here.host != there.host) return "it is on another host";
  if (here.processes != there.processes)
    return "it is in another container: the process namespaces differ";
  if (here.process == there.process && here.started == there.started)
    return "same process: CUDA IPC cannot open a process's own memory";
  return std::nullopt;
}

std::vector<std::byte> encode(const Hello& hello) {
  Writer writer(Kind::Hello);
  writer.put_bytes(std::as_bytes(std::span(kMagic)));
  writer.put(hello.identity.host);
  writer.put(hello.identity.processes);
  writer.put(hello.identity.process);
  writer.put(hello.identity.started);
  writer.put(hello.page.descriptor);
  writer.put(hello.page.key);
  writer.put(hello.socket);
  writer.put(static_cast<std::uint32_t>(hello.gpus.size()));
  for (const Gpu& gpu : hello.gpus) {
    writer.put_bytes(gpu.uuid);
    for (const cuda::IpcHandle& event : gpu.events) writer.put_bytes(event);
  }
  return writer.take();
}

Result<Hello> decode_hello(Bytes bytes) {
  Reader reader(bytes);
  Hello hello;
  const bool is_hello = reader.get<std::uint8_t>() == static_cast<std::uint8_t>(Kind::Hello);
  const Bytes magic = reader.get(sizeof kMagic);
  if (!is_hello || reader.is_cut() || std::memcmp(magic.data(), kMagic, sizeof kMagic) != 0) {
    return wrong("no hello; its connection does not use cuda_ipc");
  }
  hello.identity.host = reader.text();
  hello.identity.processes = reader.text();
  hello.identity.process = reader.get<std::uint64_t>();
  hello.identity.started = reader.get<std::uint64_t>();
  hello.page.descriptor = reader.get<std::uint32_t>();
  hello.page.key = reader.get<std::uint64_t>();
  hello.socket = reader.get<std::uint32_t>();
  const auto gpus = reader.get<std::uint32_t>();
  if (gpus > kMaxGpus) return wrong("a hello with " + std::to_string(gpus) + " GPUs");
  for (std::uint32_t i = 0; i < gpus; ++i) {
    Gpu& gpu = hello.gpus.emplace_back();
    gpu.uuid = reader.array<16>();
    for (std::size_t slot = 0; slot < kSlots; ++slot) gpu.events.push_back(reader.array<64>());
  }
  if (reader.is_cut() || !reader.rest().empty()) return wrong("a hello of the wrong length");
  return hello;
}

std::vector<std::byte> encode_reach(std::uint32_t gpus) {
  Writer writer(Kind::Reach);
  writer.put(gpus);
  return writer.take();
}

Result<std::uint32_t> decode_reach(Bytes bytes) {
  Reader reader(bytes);
  const bool is_reach = reader.get<std::uint8_t>() == static_cast<std::uint8_t>(Kind::Reach);
  const auto gpus = reader.get<std::uint32_t>();
  if (!is_reach || reader.is_cut() || !reader.rest().empty())
    return wrong("no reach message after its hello");
  return gpus;
}

Capabilities capabilities_over(const Capabilities& below) {
  Capabilities own = below;
  own.device_memory = true;
  own.one_sided = false;
  own.inline_bytes -= std::min<std::size_t>(own.inline_bytes, 1);
  own.max_payloads = std::min(below.max_payloads, below.max_header / (2 * kPayloadBytes));
  own.max_header = below.max_header - kFrontBytes - own.max_payloads * kPayloadBytes;
  return own;
}

std::vector<std::byte> encode_plain(Bytes header) {
  Writer writer(Kind::Plain);
  writer.put_bytes(header);
  return writer.take();
}

std::vector<std::byte> encode(const Shared& message) {
  Writer writer(Kind::Shared);
  writer.put(message.gpu);
  writer.put(message.slot);
  writer.put(message.value);
  writer.put(static_cast<std::uint32_t>(message.payloads.size()));
  for (const Payload& payload : message.payloads) {
    writer.put(payload.bytes);
    writer.put(static_cast<std::uint32_t>(payload.pieces.size()));
    for (const Piece& piece : payload.pieces) {
      writer.put(piece.bytes);
      writer.put(piece.allocation);
      writer.put(piece.replaces);
      writer.put(piece.offset);
      const Told told = piece.handle       ? Told::Handle
                        : piece.passed > 0 ? Told::Descriptor
                                           : Told::Before;
      writer.put(static_cast<std::uint8_t>(told));
      if (told == Told::Handle) writer.put_bytes(*piece.handle);
      if (told == Told::Descriptor) writer.put(piece.passed);
    }
  }
  writer.put_bytes(message.header);
  return writer.take();
}

Result<Shared> decode_shared(Bytes bytes, std::span<const std::uint64_t> sizes,
                             const Capabilities& limits) {
  Reader reader(bytes);
  reader.get<std::uint8_t>();
  Shared message;
  message.gpu = reader.get<std::uint32_t>();
  message.slot = reader.get<std::uint32_t>();
  message.value = reader.get<std::uint32_t>();
  const auto payloads = reader.get<std::uint32_t>();
  if (payloads > limits.max_payloads)
    return wrong("a message of " + std::to_string(payloads) + " payloads");
  std::uint64_t total = 0;
  std::size_t below = 0;
  std::size_t pieces = 0;
  for (std::uint32_t i = 0; i < payloads && !reader.is_cut(); ++i) {
    Payload& payload = message.payloads.emplace_back();
    payload.bytes = reader.get<std::uint64_t>();
    if (payload.bytes > limits.max_message - total) return wrong("payloads that are too large");
    total += payload.bytes;
    const auto count = reader.get<std::uint32_t>();
    if (count == 0) {
      if (below == sizes.size() || sizes[below] != payload.bytes)
        return wrong("payloads of other sizes than it announced");
      ++below;
      continue;
    }
    pieces += count;
    if (pieces > limits.max_payloads)
      return wrong("a message of " + std::to_string(pieces) + " pieces");
    std::uint64_t left = payload.bytes;
    for (std::uint32_t j = 0; j < count && !reader.is_cut(); ++j) {
      const auto piece = piece_of(reader, left);
      if (!piece) return wrong("an impossible piece");
      left -= piece->bytes;
      payload.pieces.push_back(*piece);
    }
    if (left > 0) return wrong("pieces that do not cover their payload");
  }
  if (reader.is_cut() || below != sizes.size()) return wrong("a truncated message");
  if (message.slot >= kSlots || message.gpu >= kMaxGpus) return wrong("an impossible slot");
  message.header = reader.rest();
  if (message.header.size() > limits.max_header) return wrong("a header that is too large");
  return message;
}

}  // namespace weft::transport::cuda_ipc
