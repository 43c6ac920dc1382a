// SPDX-License-Identifier: Apache-2.0
// Any message of a peer is delivered as received, delivered as incomplete with a reason, or
// refused; its connection continues in each case. No more memory is reserved than was received, and
// none of a device that the connection does not carry. The input gives the number of payloads, for
// each a byte from which its size is computed, and the header.
#include <algorithm>
#include <array>
#include <cstdint>
#include <cstring>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <tuple>
#include <vector>

#include <ATen/core/Tensor.h>

#include <weft/base/error.h>
#include <weft/base/make_error.h>
#include <weft/engine/call/message.h>
#include <weft/engine/codec/values.h>

namespace weft::call {
namespace {

// 255 stands for more bytes than any message may have.
std::uint64_t size_of(std::uint8_t code) {
  return code == 255 ? std::uint64_t{1} << 39 : code * std::uint64_t{7};
}

// A connection with one message, whose payloads consist of ones.
class FakeConnection final : public transport::Connection {
 public:
  explicit FakeConnection(std::span<const std::uint64_t> sizes) : sizes_(sizes) {}
  std::string_view transport() const override { return "fuzz"; }
  std::string peer() const override { return "nobody"; }
  const transport::Capabilities& capabilities() const override { return capabilities_; }
  void receive(Handlers) override {}
  Op send(std::span<const std::byte>, std::span<const Slice>, Pin, Fence) noexcept override {
    return Op();
  }
  Op accept(std::span<const Slice> destinations, Pin, Fence) noexcept override {
    if (accepted_) broken("a message is accepted twice");
    accepted_ = true;
    if (destinations.empty()) return Op();
    if (destinations.size() != sizes_.size())
      broken("the number of destinations is not that of the payloads");
    for (std::size_t i = 0; i < sizes_.size(); ++i) {
      if (destinations[i].bytes != sizes_[i] || !destinations[i].device.is_host())
        broken("a destination that does not fit its payload");
      if (sizes_[i] > 0) std::memset(destinations[i].data, 1, sizes_[i]);
    }
    return Op();
  }
  void close(const Error&) noexcept override {}
  bool accepted() const { return accepted_; }

 private:
  const std::span<const std::uint64_t> sizes_;
  const transport::Capabilities capabilities_{};
  bool accepted_ = false;
};

void use(Message message) {
  const std::span<const std::byte> body = message.body;
  try {
    codec::Reader(std::move(message.parts)).read(body, [](const msgpack::object& object) {
      const auto tensors = object.as<std::tuple<std::vector<at::Tensor>>>();
      codec::Writer().write([&](codec::Packer& packer) { packer.pack(tensors); });
    });
  } catch (const Error& error) {
    if (error.blame() != Blame::Caller && error.blame() != Blame::Busy)
      broken("a body is not blamed on its sender");
  }
}

void receive(std::span<const std::byte> header, std::span<const std::uint64_t> sizes) {
  static const auto pool = std::make_shared<ReceivePool>();
  static const std::vector<int> no_gpus;
  const transport::Arrival arrival{.header = header, .sizes = sizes, .in_place = {}};
  if (const auto body = challenge_in(arrival);
      body && (!sizes.empty() || body->size() > header.size()))
    broken("a challenge that was not received");
  FakeConnection connection(sizes);
  int ends = 0;
  receive_message(
      connection, arrival, {*pool, no_gpus}, nullptr,
      [&](Message message, const Error* lacking) {
        ++ends;
        if (lacking != nullptr) {
          if (!message.parts.empty()) broken("an incomplete message has storages");
          return;
        }
        const std::size_t aside = (message.head.flags & kBodyAside) != 0 ? 1 : 0;
        if (message.parts.size() + aside != sizes.size())
          broken("the number of storages is not that of the payloads");
        for (std::size_t i = 0; i < message.parts.size(); ++i) {
          if (message.parts[i].bytes != sizes[i + aside]) broken("a storage of another size");
        }
        use(std::move(message));
      },
      [&](const Error& why) {
        ++ends;
        if (!ends_connection(why.blame())) broken("a peer's bytes are not blamed on it");
      });
  if (ends != 1 || !connection.accepted())
    broken("a message is neither delivered nor refused, or not accepted");
}

}  // namespace
}  // namespace weft::call

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t bytes) {
  if (bytes == 0) return 0;
  std::span<const std::uint8_t> input(data + 1, bytes - 1);
  const std::size_t payloads = std::min<std::size_t>(data[0] % 8, input.size());
  std::vector<std::uint64_t> sizes;
  for (const std::uint8_t code : input.first(payloads)) sizes.push_back(weft::call::size_of(code));
  weft::call::receive(std::as_bytes(input.subspan(payloads)), sizes);
  return 0;
}
