#include <algorithm>
#include <cstring>
#include <fstream>
#include <sstream>

#include <sys/stat.h>
#include <unistd.h>

#include <weft/transport/cuda_ipc/wire.h>

namespace weft::transport::cuda_ipc {

namespace {

constexpr char kMagic[8] = {'W', 'E', 'F', 'T', 'i', 'p', 'c', '1'};
constexpr std::size_t kMaxName = 256;
constexpr std::size_t kNamedBytes = 8 + 1 + 8 + 8 + 8 + 1 + 64;  // the most that one payload takes in a message
constexpr std::size_t kFrontBytes = 64;

class Writer {
 public:
  explicit Writer(Kind kind) { put(static_cast<std::uint8_t>(kind)); }
  template <class Number>
  requires std::is_unsigned_v<Number>
  void put(Number number) {
    for (std::size_t i = 0; i < sizeof number; ++i) bytes_.push_back(static_cast<std::byte>(number >> (8 * i)));
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

// Reads zeros past the end, and says so.
class Reader {
 public:
  explicit Reader(Bytes bytes) : left_(bytes) {}
  template <class Number>
  Number get() {
    Number number = 0;
    const Bytes bytes = get(sizeof number);
    for (std::size_t i = 0; i < bytes.size(); ++i) {
      number = static_cast<Number>(number | std::to_integer<Number>(bytes[i]) << (8 * i));
    }
    return number;
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

Error wrong(const std::string& text) { return Error(Blame::PeerLost, "the peer sent what is not allowed, " + text); }

}  // namespace

Identity Identity::here() {
  Identity identity;
  std::getline(std::ifstream("/proc/sys/kernel/random/boot_id"), identity.host);
  struct stat about {};
  if (::stat("/proc/self/ns/pid", &about) != 0) identity.host.clear();
  identity.processes = std::to_string(about.st_ino);
  identity.process = static_cast<std::uint64_t>(::getpid());
  // The 22nd field; the second is a name in brackets, which may hold anything.
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
    return std::string("/proc does not tell ") + (one == &here ? "us" : "it") +
           " which host and process namespace this is (is it mounted?)";
  }
  if (here.host != there.host) return "it is on another host";
  if (here.processes != there.processes) return "it is in another container: the process namespaces differ";
  if (here.process == there.process && here.started == there.started)
    return "it is in this very process, whose own memory the driver does not open";
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
    return wrong("no hello; the lane there is none of cuda_ipc");
  }
  hello.identity.host = reader.text();
  hello.identity.processes = reader.text();
  hello.identity.process = reader.get<std::uint64_t>();
  hello.identity.started = reader.get<std::uint64_t>();
  hello.page.descriptor = reader.get<std::uint32_t>();
  hello.page.key = reader.get<std::uint64_t>();
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
  if (!is_reach || reader.is_cut() || !reader.rest().empty()) return wrong("no reach behind its hello");
  return gpus;
}

Capabilities capabilities_over(const Capabilities& below) {
  Capabilities own = below;
  own.device_memory = true;
  own.one_sided = false;
  own.inline_bytes -= std::min<std::size_t>(own.inline_bytes, 1);
  own.max_payloads = std::min(below.max_payloads, below.max_header / (2 * kNamedBytes));
  own.max_header = below.max_header - kFrontBytes - own.max_payloads * kNamedBytes;
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
    writer.put(static_cast<std::uint8_t>(payload.named ? 1 : 0));
    if (!payload.named) continue;
    writer.put(payload.named->allocation);
    writer.put(payload.named->replaces);
    writer.put(payload.named->offset);
    writer.put(static_cast<std::uint8_t>(payload.named->handle ? 1 : 0));
    if (payload.named->handle) writer.put_bytes(*payload.named->handle);
  }
  writer.put_bytes(message.header);
  return writer.take();
}

Result<Shared> decode_shared(Bytes bytes, std::span<const std::uint64_t> sizes, const Capabilities& limits) {
  Reader reader(bytes);
  reader.get<std::uint8_t>();
  Shared message;
  message.gpu = reader.get<std::uint32_t>();
  message.slot = reader.get<std::uint32_t>();
  message.value = reader.get<std::uint32_t>();
  const auto payloads = reader.get<std::uint32_t>();
  if (payloads > limits.max_payloads) return wrong("a message of " + std::to_string(payloads) + " payloads");
  std::uint64_t total = 0;
  std::size_t below = 0;
  for (std::uint32_t i = 0; i < payloads && !reader.is_cut(); ++i) {
    Payload& payload = message.payloads.emplace_back();
    payload.bytes = reader.get<std::uint64_t>();
    if (payload.bytes > limits.max_message - total) return wrong("payloads that are too large");
    total += payload.bytes;
    if (reader.get<std::uint8_t>() == 0) {
      if (below == sizes.size() || sizes[below] != payload.bytes) return wrong("payloads other than it announced");
      ++below;
      continue;
    }
    Named& named = payload.named.emplace();
    named.allocation = reader.get<std::uint64_t>();
    named.replaces = reader.get<std::uint64_t>();
    named.offset = reader.get<std::uint64_t>();
    if (reader.get<std::uint8_t>() != 0) named.handle = reader.array<64>();
  }
  if (reader.is_cut() || below != sizes.size()) return wrong("a message that is cut");
  if (message.slot >= kSlots || message.gpu >= kMaxGpus) return wrong("a slot that there is not");
  message.header = reader.rest();
  if (message.header.size() > limits.max_header) return wrong("a header that is too large");
  return message;
}

}  // namespace weft::transport::cuda_ipc
