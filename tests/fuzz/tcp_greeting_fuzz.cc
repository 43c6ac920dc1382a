// SPDX-License-Identifier: Apache-2.0
// For any first bytes of a stranger, in any pieces, a greeting is whole, foreign or unfinished, and
// no byte beyond it is read. The first byte sets the length of the pieces.
#include <algorithm>
#include <cstdint>
#include <span>

#include <sys/socket.h>
#include <unistd.h>

#include <weft/base/error.h>
#include <weft/base/make_error.h>
#include <weft/transport/tcp/greeting.h>
#include <weft/transport/tcp/settings.h>

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t bytes) {
  using weft::transport::tcp::Greeting;
  if (bytes < 2) return 0;
  const std::size_t piece = data[0] % 32 + std::size_t{1};
  const std::size_t total = std::min<std::size_t>(bytes - 1, 200);
  int ends[2];
  if (::socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends) != 0)
    weft::broken("the fuzzer cannot make sockets");
  weft::transport::tls::Socket socket{weft::Descriptor(ends[0])};
  Greeting greeting;
  auto progress = Greeting::Progress::Wants;
  std::size_t sent = 0;
  while (sent < total && progress == Greeting::Progress::Wants) {
    const std::size_t count = std::min(piece, total - sent);
    if (::send(ends[1], data + 1 + sent, count, MSG_NOSIGNAL) != static_cast<ssize_t>(count))
      weft::broken("a short send");
    sent += count;
    progress = greeting.receive(socket);
  }
  ::close(ends[1]);
  if (progress == Greeting::Progress::Wants) {
    if (sent >= Greeting::kBytes) weft::broken("a whole greeting is taken for an unfinished one");
    progress = greeting.receive(socket);
    if (progress != Greeting::Progress::Lost) weft::broken("the end is not noticed");
  } else if (progress == Greeting::Progress::Whole) {
    const auto part = greeting.stripe();
    if (part.count < 1 || part.count > weft::transport::tcp::kMaxSockets ||
        part.index >= part.count) {
      weft::broken("an impossible part of a connection");
    }
    // Encoding a greeting again gives the same bytes.
    if (!std::ranges::equal(Greeting::encode(greeting.identity(), part),
                            std::as_bytes(std::span(data + 1, Greeting::kBytes)))) {
      weft::broken("a greeting changes when it is read");
    }
    char rest[256];
    std::size_t left = 0;
    for (ssize_t got = 0; (got = ::recv(ends[0], rest, sizeof rest, MSG_DONTWAIT)) > 0;)
      left += static_cast<std::size_t>(got);
    if (left != sent - Greeting::kBytes) weft::broken("more than the greeting was read");
  }
  if (progress != Greeting::Progress::Whole && greeting.failure().empty())
    weft::broken("a refusal without a reason");
  return 0;
}
