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

constexpr std::size_t kControlBytes = 4096;
// The control data lies behind the rings, so that the rings begin at page boundaries; pages have up
// to 64 KiB (Linux on ARM).
constexpr std::size_t kSegmentBytes = 2 * kRingBytes + kControlBytes;
constexpr std::size_t kControlAt = 4 * kRingBytes;  // in the mapping, which has each ring twice
constexpr std::size_t kMappedBytes = kControlAt + kControlBytes;
constexpr char kHello[8] = {'W', 'E', 'F', 'T', 's', 'h', 'm', '4'};
constexpr std::uint32_t kAccepted = 1;  // fate is 0 until it is decided
constexpr std::uint32_t kGivenUp = 2;

}  // namespace

Segment Segment::make() {
  static_assert(sizeof(Control) <= kControlBytes);
  Segment segment(make_shared_memory(kSegmentBytes, "shm"), Side::Maker);
  new (segment.base_ + kControlAt) Control{};
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
  const auto map = [&](std::size_t at, std::size_t from, std::size_t bytes) {
    if (mmap(base_ + at, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED | MAP_POPULATE,
             memory_.get(), static_cast<off_t>(from)) != MAP_FAILED) {
      return;
    }
    const int number = errno;
    munmap(base_, kMappedBytes);
    throw system_error(Blame::Busy, "shm: cannot map a segment", number);
  };
  for (std::size_t half = 0; half < 4; ++half)
    map(half * kRingBytes, half / 2 * kRingBytes, kRingBytes);
  map(kControlAt, 2 * kRingBytes, kControlBytes);
}

Segment::Segment(Segment&& other) noexcept
    : memory_(std::move(other.memory_)),
      side_(other.side_),
      base_(std::exchange(other.base_, nullptr)) {}

Segment::~Segment() {
  if (base_ != nullptr) munmap(base_, kMappedBytes);
}

Segment::Control& Segment::control() const {
  return *std::launder(reinterpret_cast<Control*>(base_ + kControlAt));
}

std::byte* Segment::ring(int direction) const {
  return base_ + static_cast<std::size_t>(direction) * 2 * kRingBytes;
}

RingWriter Segment::writer() const {
  const int direction = side_ == Side::Maker ? 0 : 1;
  return {&control().rings[direction], ring(direction), kRingBytes};
}

RingReader Segment::reader() const {
  const int direction = side_ == Side::Maker ? 1 : 0;
  return {&control().rings[direction], ring(direction), kRingBytes};
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
