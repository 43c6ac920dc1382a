// SPDX-License-Identifier: Apache-2.0
#include <utility>

#include <weft/transport/little_endian.h>
#include <weft/transport/verbs/wire.h>

namespace weft::transport::verbs {

namespace {

constexpr std::uint32_t kMagic = 0x56544657;  // "WFTV"
constexpr std::uint32_t kVersion = 1;
constexpr std::uint32_t kLargestRing = 1 << 30;
constexpr std::uint32_t kSmallestRing = 4 << 10;
constexpr std::uint32_t kFewestReceives = 16;
constexpr std::uint32_t kMostReceives = 1 << 20;

class Writer {
 public:
  explicit Writer(std::byte* at) : at_(at) {}
  template <class T>
  void put(T value) {
    little_endian::put(at_, value);
    at_ += sizeof value;
  }

 private:
  std::byte* at_;
};

class Reader {
 public:
  explicit Reader(Bytes bytes) : at_(bytes.data()) {}
  template <class T>
  T get() {
    const std::byte* const from = std::exchange(at_, at_ + sizeof(T));
    return little_endian::get<T>(from);
  }

 private:
  const std::byte* at_;
};

bool is_power_within(std::uint32_t value, std::uint32_t least, std::uint32_t most) {
  return value >= least && value <= most && (value & (value - 1)) == 0;
}

const char* why_impossible(const Hello& hello) {
  if (hello.fabric != Fabric::InfiniBand && hello.fabric != Fabric::Roce)
    return "an unknown fabric";
  if (hello.queue_pair >= 1u << 24 || hello.packet >= 1u << 24) return "an impossible queue pair";
  if (!is_power_within(hello.mtu_bytes, 256, 4096)) return "an impossible MTU";
  if (!is_power_within(hello.ring_bytes, kSmallestRing, kLargestRing))
    return "an impossible ring size";
  if (hello.receives < kFewestReceives || hello.receives > kMostReceives)
    return "an impossible number of receives";
  if (hello.max_write_bytes < kSmallestRing) return "an impossible write size";
  if (hello.ring_address > ~std::uint64_t{0} - 2 * std::uint64_t{hello.ring_bytes})
    return "an impossible ring address";
  return nullptr;
}

}  // namespace

std::array<std::byte, Hello::kBytes> encode(const Hello& hello) {
  std::array<std::byte, Hello::kBytes> bytes{};
  Writer writer(bytes.data());
  writer.put(kMagic);
  writer.put(kVersion);
  for (const std::uint8_t byte : hello.gid) writer.put(byte);
  writer.put(hello.lid);
  writer.put(static_cast<std::uint8_t>(hello.fabric));
  writer.put(std::uint8_t{0});
  writer.put(hello.queue_pair);
  writer.put(hello.packet);
  writer.put(hello.mtu_bytes);
  writer.put(hello.receives);
  writer.put(hello.ring_bytes);
  writer.put(hello.ring_key);
  writer.put(hello.ring_address);
  writer.put(hello.max_write_bytes);
  return bytes;
}

Result<Hello> decode_hello(Bytes bytes) {
  const auto refuse = [](const std::string& why) {
    return Error(Blame::Protocol, "verbs: the peer's hello " + why);
  };
  if (bytes.size() != Hello::kBytes)
    return refuse("has " + std::to_string(bytes.size()) + " bytes");
  Reader reader(bytes);
  if (reader.get<std::uint32_t>() != kMagic) return refuse("has no valid magic number");
  if (const auto version = reader.get<std::uint32_t>(); version != kVersion) {
    return refuse("has version " + std::to_string(version) + ", this process uses version " +
                  std::to_string(kVersion) + "; run the same Weft on both");
  }
  Hello hello;
  for (std::uint8_t& byte : hello.gid) byte = reader.get<std::uint8_t>();
  hello.lid = reader.get<std::uint16_t>();
  hello.fabric = static_cast<Fabric>(reader.get<std::uint8_t>());
  reader.get<std::uint8_t>();
  hello.queue_pair = reader.get<std::uint32_t>();
  hello.packet = reader.get<std::uint32_t>();
  hello.mtu_bytes = reader.get<std::uint32_t>();
  hello.receives = reader.get<std::uint32_t>();
  hello.ring_bytes = reader.get<std::uint32_t>();
  hello.ring_key = reader.get<std::uint32_t>();
  hello.ring_address = reader.get<std::uint64_t>();
  hello.max_write_bytes = reader.get<std::uint32_t>();
  if (const char* why = why_impossible(hello)) return refuse(std::string("names ") + why);
  return hello;
}

std::array<std::byte, Note::kBytes> encode(const Note& note) {
  std::array<std::byte, Note::kBytes> bytes{};
  Writer writer(bytes.data());
  writer.put(static_cast<std::uint32_t>(note.kind));
  writer.put(note.granted);
  writer.put(note.key);
  writer.put(std::uint32_t{0});
  writer.put(note.position);
  writer.put(note.bytes);
  writer.put(note.address);
  return bytes;
}

std::optional<Note> decode_note(Bytes bytes) {
  if (bytes.size() != Note::kBytes) return std::nullopt;
  Reader reader(bytes);
  Note note;
  const auto kind = reader.get<std::uint32_t>();
  if (kind < 1 || kind > 4) return std::nullopt;
  note.kind = static_cast<Note::Kind>(kind);
  note.granted = reader.get<std::uint32_t>();
  note.key = reader.get<std::uint32_t>();
  reader.get<std::uint32_t>();
  note.position = reader.get<std::uint64_t>();
  note.bytes = reader.get<std::uint64_t>();
  note.address = reader.get<std::uint64_t>();
  return note;
}

}  // namespace weft::transport::verbs
