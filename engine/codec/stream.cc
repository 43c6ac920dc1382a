// SPDX-License-Identifier: Apache-2.0
#include <utility>

#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>

#include <weft/base/error.h>
#include <weft/engine/codec/stream.h>
#include <weft/engine/tensor/tensor.h>

namespace weft::codec {

namespace {

// "WEFT" in little-endian order, and the version of the form.
constexpr std::uint32_t kMagic = 0x54464557;
constexpr std::uint32_t kVersion = 1;

struct Front {
  std::uint32_t magic = kMagic;
  std::uint32_t version = kVersion;
  std::uint64_t body_bytes = 0;
  std::uint64_t parts = 0;
};
struct PartEntry {
  std::uint64_t begin = 0;
  std::uint64_t bytes = 0;
  std::int32_t device_type = 0;  // 0 host, 1 CUDA
  std::int32_t device_index = 0;
};

thread_local Writer* writing = nullptr;
thread_local Reader* reading = nullptr;

template <class T>
class Current {
 public:
  Current(T*& slot, T* value) : slot_(slot), before_(std::exchange(slot, value)) {}
  ~Current() { slot_ = before_; }
  Current(const Current&) = delete;
  Current& operator=(const Current&) = delete;

 private:
  T*& slot_;
  T* before_;
};

std::size_t padded(std::size_t bytes) {
  return (bytes + kPartAlignment - 1) / kPartAlignment * kPartAlignment;
}

[[noreturn]] void foreign(const std::string& what) {
  throw Error(Blame::Caller, "these bytes were not made by weft::encode: " + what);
}

template <class T>
T take(std::span<const std::byte>& bytes) {
  if (bytes.size() < sizeof(T)) foreign("they end early");
  T value;
  std::memcpy(&value, bytes.data(), sizeof(T));
  bytes = bytes.subspan(sizeof(T));
  return value;
}

template <class T>
void append(std::vector<std::byte>& bytes, const T& value) {
  const auto* data = reinterpret_cast<const std::byte*>(&value);
  bytes.insert(bytes.end(), data, data + sizeof(T));
}

at::Tensor moved_to_cuda(const at::Tensor& storage, int index) {
  const c10::Device device(c10::kCUDA, static_cast<c10::DeviceIndex>(index));
  try {
    return storage.to(device);
  } catch (const std::exception&) {
    throw Error(Blame::Caller, "these bytes hold a tensor for " + device.str() +
                                   ", which this process does not have");
  }
}

// Measures how deep containers are nested, as a reader counts them.
struct Depth : msgpack::null_visitor {
  bool start_array(std::uint32_t) { return open(); }
  bool start_map(std::uint32_t) { return open(); }
  bool end_array() { return close(); }
  bool end_map() { return close(); }
  bool open() { return ++open_now <= kDeepest; }
  bool close() {
    --open_now;
    return true;
  }
  std::size_t open_now = 0;
};

bool is_too_deep(std::span<const std::byte> body) {
  if (body.size() <= kDeepest) return false;  // each container takes at least a byte
  Depth depth;
  msgpack::parse(reinterpret_cast<const char*>(body.data()), body.size(), depth);
  return depth.open_now > kDeepest;
}

}  // namespace

Encoded Writer::write(const std::function<void(Packer&)>& pack) {
  Packer packer(encoded_.body);
  {
    const Current<Writer> scope(writing, this);
    pack(packer);
  }
  if (is_too_deep(encoded_.body.bytes())) {
    throw Error(
        Blame::Caller,
        "a value of more than " + std::to_string(kDeepest) +
            " containers (vectors, maps, structs, …) in one another cannot be sent; the list of a "
            "call's arguments is one, too");
  }
  encoded_.parts = tensors_.take_parts();
  encoded_.watched = tensors_.take_watched();
  return std::move(encoded_);
}

Writer& Writer::current() {
  if (writing == nullptr) {
    throw Error(Blame::Caller,
                "a tensor or an RRef was packed outside of a call; use weft::encode, or pass it as "
                "an argument");
  }
  return *writing;
}

void Reader::read(std::span<const std::byte> body,
                  const std::function<void(const msgpack::object&)>& convert) {
  const Current<Reader> scope(reading, this);
  try {
    // An element takes at least a byte, so no message claims more elements than it has bytes.
    const std::size_t most = body.size();
    const msgpack::unpack_limit limit(most, most, most, most, most, kDeepest);
    msgpack::zone zone(1024);
    std::size_t offset = 0;
    const auto in_place = [](msgpack::type::object_type, std::size_t, void*) { return true; };
    const auto object = msgpack::unpack(zone, reinterpret_cast<const char*>(body.data()),
                                        body.size(), offset, in_place, nullptr, limit);
    if (offset != body.size()) foreign("bytes follow the value");
    convert(object);
  } catch (const Error&) {
    throw;
  } catch (const msgpack::type_error&) {
    throw Error(Blame::Caller, "these bytes hold a value of another type");
  } catch (const msgpack::unpack_error& error) {
    foreign(error.what());
  } catch (const std::bad_alloc&) {
    throw Error(Blame::Busy,
                "no memory to decode a message of " + std::to_string(body.size()) + " bytes");
  } catch (const std::exception& error) {
    throw Error(Blame::Caller, "these bytes cannot be decoded: " + tensor::text_of(error));
  } catch (...) {
    throw Error(
        Blame::Caller,
        "these bytes cannot be decoded: an exception that is not a std::exception was thrown");
  }
}

Reader& Reader::current() {
  if (reading == nullptr)
    throw Error(Blame::Caller,
                "a tensor or an RRef was unpacked outside of a call; use weft::decode");
  return *reading;
}

std::vector<std::byte> join(const Encoded& message) {
  Front front;
  front.body_bytes = message.body.size();
  front.parts = message.parts.size();
  std::vector<std::byte> bytes;
  append(bytes, front);
  for (const Part& part : message.parts) {
    append(bytes, PartEntry{part.begin, part.bytes, part.device().is_cpu() ? 0 : 1,
                            std::max<int>(0, part.device().index())});
  }
  const auto body = message.body.bytes();
  bytes.insert(bytes.end(), body.begin(), body.end());
  for (const Part& part : message.parts) {
    bytes.resize(padded(bytes.size()));
    if (part.device().is_cpu()) {
      bytes.insert(bytes.end(), part.data(), part.data() + part.bytes);
    } else {
      const auto bytes_on_device = at::TensorOptions().dtype(at::kByte).device(part.device());
      const at::Tensor here =
          at::from_blob(part.data(), {static_cast<std::int64_t>(part.bytes)}, bytes_on_device)
              .cpu();
      const auto* data = static_cast<const std::byte*>(here.const_data_ptr());
      bytes.insert(bytes.end(), data, data + part.bytes);
    }
  }
  return bytes;
}

Split split(std::span<const std::byte> bytes) {
  const std::size_t all = bytes.size();
  const auto front = take<Front>(bytes);
  if (front.magic != kMagic) foreign("they do not begin with WEFT");
  if (front.version != kVersion) {
    foreign("they have version " + std::to_string(front.version) + ", this is version " +
            std::to_string(kVersion));
  }
  if (front.parts > kMaxStorages || front.parts > bytes.size() / sizeof(PartEntry))
    foreign("they end inside the table of storages");
  std::vector<PartEntry> entries;
  for (std::uint64_t i = 0; i < front.parts; ++i) entries.push_back(take<PartEntry>(bytes));
  if (front.body_bytes > bytes.size()) foreign("they end inside the value");
  Split result;
  result.body = bytes.first(front.body_bytes);
  bytes = bytes.subspan(front.body_bytes);
  for (const PartEntry& entry : entries) {
    const std::size_t at = all - bytes.size();
    const std::size_t pad = padded(at) - at;
    if (pad > bytes.size() || entry.bytes > bytes.size() - pad) foreign("they end inside a tensor");
    if (entry.begin % kPartAlignment != 0) foreign("a storage begins at an unaligned offset");
    if (entry.device_type < 0 || entry.device_type > 1 || entry.device_index < 0 ||
        entry.device_index > 127)
      foreign("a tensor is on an unknown device");
    at::Tensor storage = at::empty({static_cast<std::int64_t>(entry.bytes)}, at::kByte);
    if (entry.bytes > 0) std::memcpy(storage.mutable_data_ptr(), bytes.data() + pad, entry.bytes);
    if (entry.device_type == 1) storage = moved_to_cuda(storage, entry.device_index);
    result.parts.push_back({entry.begin, entry.bytes, storage.storage(), 0});
    bytes = bytes.subspan(pad + entry.bytes);
  }
  if (!bytes.empty()) foreign("bytes follow the last tensor");
  return result;
}

}  // namespace weft::codec
