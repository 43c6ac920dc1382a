// SPDX-License-Identifier: Apache-2.0
// For any bytes of a stranger, in any pieces, an inbox shows only messages within its limits, reads
// only bytes that it was given, and ends the connection or waits for more. The first byte of the
// input sets how many bytes each read moves; if it is odd, the stream has a unit.
#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <vector>

#include <weft/base/error.h>
#include <weft/base/make_error.h>
#include <weft/transport/stream/frame.h>
#include <weft/transport/stream/inbox.h>

namespace weft::transport {
namespace {

// A stream of bytes that have all arrived, and then its end.
class Given final : public ByteStream {
 public:
  Given(Bytes bytes, std::size_t at_most, std::size_t unit)
      : bytes_(bytes), at_most_(at_most), unit_(unit) {}
  std::string peer() const override { return "stranger"; }
  void start(EventLoop&, std::function<void()>, std::function<void()>) override {}
  void stop() noexcept override {}
  std::size_t write(std::span<const Bytes>) noexcept override { return 0; }
  Bytes peek(std::size_t) noexcept override {
    return bytes_.first(std::min(bytes_.size(), at_most_));
  }
  void consume(std::size_t bytes) noexcept override {
    if (bytes > bytes_.size()) broken("an inbox consumes bytes that have not arrived");
    bytes_ = bytes_.subspan(bytes);
  }
  std::size_t read(std::span<std::byte> to) noexcept override {
    const std::size_t count = std::min({to.size(), bytes_.size(), at_most_});
    std::copy_n(bytes_.begin(), count, to.begin());
    bytes_ = bytes_.subspan(count);
    return count;
  }
  std::size_t window() const override { return at_most_; }
  std::size_t unit() const override { return unit_; }
  std::optional<Error> end() const noexcept override {
    if (!bytes_.empty()) return std::nullopt;
    return Error(Blame::PeerLost, "no more bytes");
  }
  void finish_writing() noexcept override {}

 private:
  Bytes bytes_;
  std::size_t at_most_;
  std::size_t unit_;
};

Capabilities small_limits() {
  Capabilities limits;
  limits.max_header = 200;
  limits.max_payloads = 20;
  limits.max_message = 1000;
  return limits;
}

// The number of messages shown, so that a test can see that the target shows some.
struct Outcome {
  std::size_t messages = 0;
  bool has_ended = false;
};

Outcome run(ByteStream::Bytes input) {
  Outcome outcome;
  if (input.empty()) return outcome;
  const auto first = std::to_integer<std::size_t>(input[0]);
  const std::size_t at_most = first * 8 + 1;
  const Capabilities limits = small_limits();
  Given stream(input.subspan(1), at_most, first % 2 == 0 ? 1 : 64);
  bool again = false;
  Inbox inbox(
      stream, limits, "stranger", {}, [&](const Fence&) { again = true; }, [&] { again = true; });
  std::vector<std::byte> memory(static_cast<std::size_t>(limits.max_message));
  const Inbox::Arrived arrived = [&](const Arrival& arrival) {
    ++outcome.messages;
    std::uint64_t total = 0;
    std::vector<Slice> destinations;
    for (const std::uint64_t size : arrival.sizes) {
      if (size > limits.max_message - total) broken("a message above the limit was shown");
      destinations.push_back({&memory[0] + total, static_cast<std::size_t>(size), {}});
      total += size;
    }
    if (arrival.header.size() > limits.max_header || arrival.sizes.size() > limits.max_payloads) {
      broken("a message above the limits was shown");
    }
    // Reads every byte that was shown, so that a sanitizer detects bytes that do not exist.
    unsigned sum = 0;
    for (const std::byte byte : arrival.header) sum += std::to_integer<unsigned>(byte);
    for (const std::byte byte : arrival.in_place) sum += std::to_integer<unsigned>(byte);
    const bool discards = sum % 3 == 0;
    inbox.accept(discards ? std::span<const Slice>() : destinations, nullptr, {});
  };
  do {
    again = false;
    if (inbox.pump(&arrived)) {
      outcome.has_ended = true;
      inbox.refuse(Error(Blame::PeerLost, "ended"));
      inbox.end();
      return outcome;
    }
  } while (again);
  return outcome;
}

}  // namespace

// For the test of the target itself.
std::pair<std::size_t, bool> fuzz_frames(ByteStream::Bytes input) {
  const Outcome outcome = run(input);
  return {outcome.messages, outcome.has_ended};
}

}  // namespace weft::transport

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t bytes) {
  weft::transport::fuzz_frames({reinterpret_cast<const std::byte*>(data), bytes});
  return 0;
}
