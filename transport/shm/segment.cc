#include <array>
#include <cerrno>
#include <cstring>
#include <new>
#include <span>

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>

#include <weft/base/error.h>
#include <weft/transport/shm/segment.h>
#include <weft/transport/unix_socket.h>

namespace weft::transport::shm {

struct Segment::Control {
  RingControl rings[2];  // 0: from the maker to the taker
  SideControl sides[2];  // 0: the maker
};

namespace {

constexpr std::size_t kControlBytes = 4096;
constexpr std::size_t kSegmentBytes = kControlBytes + 2 * kRingBytes;
constexpr std::size_t kMappedBytes = kControlBytes + 4 * kRingBytes;  // each ring twice
constexpr int kSeals = F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL;
constexpr char kHello[8] = {'W', 'E', 'F', 'T', 's', 'h', 'm', '1'};

}  // namespace

Segment Segment::make() {
  static_assert(sizeof(Control) <= kControlBytes);
  Descriptor memory(memfd_create("weft-shm", MFD_CLOEXEC | MFD_ALLOW_SEALING));
  if (!memory) throw system_error(Blame::Busy, "shm: cannot make a shared segment", errno);
  // Now, not at the first touch: that would be a SIGBUS.
  if (const int failed = posix_fallocate(memory.get(), 0, kSegmentBytes); failed != 0) {
    throw system_error(Blame::Busy,
                       "shm: no memory for a segment of " + std::to_string(kSegmentBytes >> 10) +
                           " KiB (in a container: see the size of /dev/shm and the memory limit)",
                       failed);
  }
  if (fcntl(memory.get(), F_ADD_SEALS, kSeals) != 0) throw system_error(Blame::Busy, "shm: cannot seal a segment", errno);
  Segment segment(std::move(memory), Side::Maker);
  new (segment.base_) Control{};
  return segment;
}

Segment Segment::take(Descriptor memory) {
  struct stat about {};
  const int seals = fcntl(memory.get(), F_GET_SEALS);
  if (fstat(memory.get(), &about) != 0 || about.st_size != static_cast<off_t>(kSegmentBytes) || seals < 0 ||
      (seals & kSeals) != kSeals) {
    throw Error(Blame::PeerLost, "shm: the peer passed a descriptor that is no sealed segment of this version of Weft");
  }
  return {std::move(memory), Side::Taker};
}

void Segment::pass_to(const Descriptor& socket) const {
  if (pass(socket, std::as_bytes(std::span(kHello)), memory_, "shm")) return;
  throw system_error(Blame::PeerLost, "shm: cannot pass a segment", errno);
}

std::optional<Segment> Segment::take_from(const Descriptor& socket) {
  std::array<std::byte, sizeof kHello> words{};
  auto memory = take_passed(socket, words, "shm");
  if (!memory) return std::nullopt;
  if (!*memory || std::memcmp(words.data(), kHello, sizeof kHello) != 0) {
    throw Error(Blame::PeerLost, "shm: what connected does not speak this version of Weft's shared memory");
  }
  return take(std::move(*memory));
}

Segment::Segment(Descriptor memory, Side side) : memory_(std::move(memory)), side_(side) {
  void* base = mmap(nullptr, kMappedBytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (base == MAP_FAILED) throw system_error(Blame::Busy, "shm: no address space for a segment", errno);
  base_ = static_cast<std::byte*>(base);
  const auto map = [&](std::size_t at, std::size_t from, std::size_t bytes) {
    if (mmap(base_ + at, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED | MAP_POPULATE, memory_.get(),
             static_cast<off_t>(from)) != MAP_FAILED) {
      return;
    }
    const int number = errno;
    munmap(base_, kMappedBytes);
    throw system_error(Blame::Busy, "shm: cannot map a segment", number);
  };
  map(0, 0, kControlBytes);
  for (std::size_t half = 0; half < 4; ++half) {
    map(kControlBytes + half * kRingBytes, kControlBytes + half / 2 * kRingBytes, kRingBytes);
  }
}

Segment::Segment(Segment&& other) noexcept
    : memory_(std::move(other.memory_)), side_(other.side_), base_(std::exchange(other.base_, nullptr)) {}

Segment::~Segment() {
  if (base_ != nullptr) munmap(base_, kMappedBytes);
}

Segment::Control& Segment::control() const { return *std::launder(reinterpret_cast<Control*>(base_)); }

std::byte* Segment::ring(int direction) const {
  return base_ + kControlBytes + static_cast<std::size_t>(direction) * 2 * kRingBytes;
}

RingWriter Segment::writer() const {
  const int direction = side_ == Side::Maker ? 0 : 1;
  return {&control().rings[direction], ring(direction), kRingBytes};
}

RingReader Segment::reader() const {
  const int direction = side_ == Side::Maker ? 1 : 0;
  return {&control().rings[direction], ring(direction), kRingBytes};
}

SideControl& Segment::mine() const { return control().sides[side_ == Side::Maker ? 0 : 1]; }
SideControl& Segment::theirs() const { return control().sides[side_ == Side::Maker ? 1 : 0]; }

}  // namespace weft::transport::shm
