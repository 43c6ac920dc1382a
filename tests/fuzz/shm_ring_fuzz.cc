// SPDX-License-Identifier: Apache-2.0
// For any control words that a peer writes into a ring, this side reads and writes only within the
// ring, and reports the ring as broken if the words are impossible. The input consists of records
// of 10 bytes: an event, its argument, a number.
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <vector>

#include <weft/base/error.h>
#include <weft/base/make_error.h>
#include <weft/transport/shm/ring.h>

namespace weft::transport::shm {
namespace {

constexpr std::size_t kSmall = 1024;
constexpr std::size_t kCapacity = 4096;
constexpr std::size_t kPage = 65536;  // at most: only whole pages can be allocated
constexpr std::size_t kRecord = 10;

// The words as the peer sees them, and twice the bytes of the small and the large ring, as the
// segment maps them. (Here the second half is separate memory, which does not change the memory
// that may be accessed.)
struct Memory {
  RingControl control{};
  std::vector<std::byte> small = std::vector<std::byte>(2 * kSmall);
  std::unique_ptr<std::byte, decltype(&std::free)> large{
      static_cast<std::byte*>(std::aligned_alloc(kPage, 2 * kPage)), std::free};
  // The large ring ends where its memory does.
  RingMemory rings() {
    return {small.data(), kSmall, large.get() + 2 * kPage - 2 * kCapacity, kCapacity};
  }
};

void read_all(std::span<const std::byte> bytes) {
  unsigned sum = 0;
  for (const std::byte byte : bytes) sum += std::to_integer<unsigned>(byte);
  volatile unsigned seen = sum;
  static_cast<void>(seen);
}

void run(const std::uint8_t* input, std::size_t bytes) {
  Memory incoming, outgoing;
  RingReader reader(&incoming.control, incoming.rings());
  RingWriter writer(&outgoing.control, outgoing.rings());
  const std::vector<std::byte> message(3 * kCapacity, std::byte{1});
  for (; bytes >= kRecord; input += kRecord, bytes -= kRecord) {
    std::uint64_t number = 0;
    std::memcpy(&number, input + 2, sizeof number);
    switch (input[0] % 8) {
      case 0: incoming.control.head = number; break;
      case 1: outgoing.control.tail = number; break;
      case 2: incoming.control.head += number % (kCapacity + 2); break;
      case 5: incoming.control.grown_at = number; break;
      case 6: incoming.control.grown_at = incoming.control.head + number % (2 * kSmall); break;
      case 3: {
        const auto seen = reader.peek(static_cast<std::size_t>(number % (2 * kCapacity)));
        if (seen.size() > kCapacity) broken("a ring shows more than it can hold");
        read_all(seen);
        if (!seen.empty()) reader.consume(input[1] % (seen.size() + 1));
        break;
      }
      case 4: {
        const auto some =
            std::span(message).first(static_cast<std::size_t>(number % message.size()));
        const std::span<const std::byte> pieces[] = {some.first(some.size() / 3),
                                                     some.subspan(some.size() / 3)};
        // It may take more than the capacity at once, if the peer says that it has read bytes that
        // were not written yet.
        if (writer.write(pieces) > some.size()) broken("a ring takes more than it was given");
        break;
      }
      default: outgoing.control.tail += number % (kCapacity + 2); break;
    }
  }
}

}  // namespace
}  // namespace weft::transport::shm

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t bytes) {
  weft::transport::shm::run(data, bytes);
  return 0;
}
