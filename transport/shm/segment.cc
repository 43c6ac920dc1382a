// SPDX-License-Identifier: Apache-2.0
#include <array>
#include <cerrno>
#include <cstring>
#include <new>
#include <span>

#include <sys/mman.h>

#include <weft/base/error.h>
#include <weft/base/make_error.h>
#include <weft/transport/shared_memory.h>
#include <weft/transport/shm/segment.h>
#include <weft/transport/unix_socket.h>

namespace weft::transport::shm {

struct Segment::Control {
  RingControl rings[2];  // 0: from the maker to the taker
  LoanControl loans[2];  // 0: by the maker
  SideControl sides[2];  // 0: the maker
  alignas(64) std::atomic<std::uint32_t> fate;
};

namespace {

// The segment: two small rings, the control data, two large rings. Each begins at a page boundary;
// pages have up to 64 KiB (Linux on ARM).
constexpr std::size_t kControlAt = 2 * kSmallRingBytes;
constexpr std::size_t kControlBytes = 4096;
constexpr std::size_t kLargeAt = kControlAt + (64 << 10);
constexpr std::size_t kSegmentBytes = kLargeAt + 2 * kRingBytes;
// The mapping, which has each ring twice.
constexpr std::size_t kMappedControlAt = 2 * kControlAt;
constexpr std::size_t kMappedLargeAt = kMappedControlAt + (64 << 10);
constexpr std::size_t kMappedBytes = kMappedLargeAt + 4 * kRingBytes;
constexpr char kHello[8] = {'W', 'E', 'F', 'T', 's', 'h', 'm', '5'};
constexpr std::uint32_t kAccepted = 1;  // fate is 0 until it is decided
constexpr std::uint32_t kGivenUp = 2;

// True if the kernel can allocate the pages of a mapping, as the large rings need it.
bool can_populate() {
  static const bool can = [] {
    void* const page = mmap(nullptr, 1, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (page == MAP_FAILED) return false;
    const bool is_known = populate(static_cast<std::byte*>(page), 1) == 0;
    munmap(page, 1);
    return is_known;
  }();
  return can;
}

}  // namespace

Segment Segment::make() {
  static_assert(sizeof(Control) <= kControlBytes);
  const std::size_t allocated = can_populate() ? kControlAt + kControlBytes : kSegmentBytes;
  Segment segment(make_shared_memory(kSegmentBytes, "shm", allocated), Side::Maker);
  new (segment.base_ + kMappedControlAt) Control{};
  return segment;
}

Segment Segment::take(Descriptor memory) {
  if (!is_shared_memory(memory, kSegmentBytes)) {
    throw Error(
        Blame::Protocol,
        "shm: the peer passed a descriptor that is not a sealed segment of this version of Weft");
  }
  return {std::move(memory), Side::Taker};
}

bool Segment::pass_to(const Descriptor& socket) const {
  return pass(socket, std::as_bytes(std::span(kHello)), memory_, "shm");
}

std::optional<Segment> Segment::take_from(const Descriptor& socket) {
  std::array<std::byte, sizeof kHello> words{};
  auto memory = take_passed(socket, words, "shm");
  if (!memory) return std::nullopt;
  if (!*memory || std::memcmp(words.data(), kHello, sizeof kHello) != 0) {
    throw Error(
        Blame::Protocol,
        "shm: the process that connected does not speak this version of Weft's shared memory");
  }
  return take(std::move(*memory));
}

Segment::Segment(Descriptor memory, Side side) : memory_(std::move(memory)), side_(side) {
  void* base =
      mmap(nullptr, kMappedBytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (base == MAP_FAILED)
    throw system_error(Blame::Busy, "shm: no address space for a segment", errno);
  base_ = static_cast<std::byte*>(base);
  const auto map = [&](std::size_t at, std::size_t from, std::size_t bytes, int populate) {
    if (mmap(base_ + at, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED | populate,
             memory_.get(), static_cast<off_t>(from)) != MAP_FAILED) {
      return;
    }
    const int number = errno;
    munmap(base_, kMappedBytes);
    throw system_error(Blame::Busy, "shm: cannot map a segment", number);
  };
  for (std::size_t half = 0; half < 4; ++half) {
    // Not populated: most connections of a large group carry a few short messages.
    map(half * kSmallRingBytes, half / 2 * kSmallRingBytes, kSmallRingBytes, 0);
    map(kMappedLargeAt + half * kRingBytes, kLargeAt + half / 2 * kRingBytes, kRingBytes, 0);
  }
  map(kMappedControlAt, kControlAt, kControlBytes, MAP_POPULATE);
}

Segment::Segment(Segment&& other) noexcept
    : memory_(std::move(other.memory_)),
      side_(other.side_),
      base_(std::exchange(other.base_, nullptr)) {}

Segment::~Segment() {
  if (base_ != nullptr) munmap(base_, kMappedBytes);
}

Segment::Control& Segment::control() const {
  return *std::launder(reinterpret_cast<Control*>(base_ + kMappedControlAt));
}

RingMemory Segment::ring(int direction) const {
  const std::size_t before = 2 * static_cast<std::size_t>(direction);  // mappings
  return {base_ + before * kSmallRingBytes, kSmallRingBytes,
          base_ + kMappedLargeAt + before * kRingBytes, kRingBytes};
}

RingWriter Segment::writer() const {
  const int direction = side_ == Side::Maker ? 0 : 1;
  return {&control().rings[direction], ring(direction)};
}

RingReader Segment::reader() const {
  const int direction = side_ == Side::Maker ? 1 : 0;
  return {&control().rings[direction], ring(direction)};
}

LoanControl* Segment::lent() const { return &control().loans[side_ == Side::Maker ? 0 : 1]; }
LoanControl* Segment::borrowed() const { return &control().loans[side_ == Side::Maker ? 1 : 0]; }

bool Segment::decide(std::uint32_t fate) const noexcept {
  std::uint32_t none = 0;
  return control().fate.compare_exchange_strong(none, fate);
}

bool Segment::accept() const noexcept { return decide(kAccepted); }
bool Segment::give_up() const noexcept { return decide(kGivenUp); }

SideControl& Segment::mine() const { return control().sides[side_ == Side::Maker ? 0 : 1]; }
SideControl& Segment::theirs() const { return control().sides[side_ == Side::Maker ? 1 : 0]; }

}  // namespace weft::transport::shm
