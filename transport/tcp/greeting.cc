#include <algorithm>
#include <cerrno>
#include <cstring>

#include <sys/socket.h>

#include <weft/transport/tcp/greeting.h>

namespace weft::transport::tcp {

namespace {

// Eight letters, the version, the machine (32 bits each), the listener (64 bits); little-endian.
constexpr char kLetters[] = "weft/tcp";
constexpr std::size_t kLettersBytes = 8;
constexpr std::uint32_t kVersion = 1;

template <class T>
void put(std::byte* to, T value) {
  for (std::size_t i = 0; i < sizeof value; ++i) to[i] = static_cast<std::byte>(value >> (8 * i));
}

template <class T>
T take(const std::byte* from) {
  T value = 0;
  for (std::size_t i = 0; i < sizeof value; ++i) value |= static_cast<T>(from[i]) << (8 * i);
  return value;
}

}  // namespace

Greeting::Bytes Greeting::encode(const Identity& identity) {
  Bytes bytes{};
  std::memcpy(bytes.data(), kLetters, kLettersBytes);
  put(bytes.data() + 8, kVersion);
  put(bytes.data() + 12, identity.machine);
  put(bytes.data() + 16, identity.listener);
  return bytes;
}

Greeting::Progress Greeting::receive(int socket) {
  while (count_ < kBytes) {
    const auto got = ::recv(socket, bytes_.data() + count_, kBytes - count_, MSG_DONTWAIT);
    if (got < 0 && errno == EINTR) continue;
    if (got < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) return Progress::Wants;
    if (got <= 0) {
      failure_ = got == 0 ? "it closed before it had greeted" : std::strerror(errno);
      return Progress::Lost;
    }
    count_ += static_cast<std::size_t>(got);
    // At once, also where it is short: a stranger that then waits for an answer is not waited for.
    if (std::memcmp(bytes_.data(), kLetters, std::min(count_, kLettersBytes)) != 0) {
      failure_ = "something else than Weft is there";
      return Progress::Foreign;
    }
  }
  const auto version = take<std::uint32_t>(bytes_.data() + 8);
  if (version == kVersion) return Progress::Whole;
  failure_ = "it speaks version " + std::to_string(version) + " of the greeting, this side " + std::to_string(kVersion);
  return Progress::Foreign;
}

Identity Greeting::identity() const {
  return {take<std::uint32_t>(bytes_.data() + 12), take<std::uint64_t>(bytes_.data() + 16)};
}

}  // namespace weft::transport::tcp
