// SPDX-License-Identifier: Apache-2.0
#include <netinet/in.h>
// Not netinet/tcp.h: its tcp_info is shorter.
#include <linux/tcp.h>
#include <sys/socket.h>

#include <weft/transport/tcp/silence.h>

namespace weft::transport::tcp {

Silence::Finding Silence::look(int socket) {
  tcp_info info{};
  socklen_t bytes = sizeof info;
  // Only TCP sockets need this.
  if (::getsockopt(socket, IPPROTO_TCP, TCP_INFO, &info, &bytes) != 0) return Finding::Quiet;
  // Either bytes were sent, or the peer has no room and was asked whether it has some now. One such
  // probe may stay unanswered (kernels answer at most twice a second, and packets get lost), and
  // the next may follow a minute or two later.
  const bool asked = info.tcpi_unacked > 0 || info.tcpi_probes > 1;
  if (!asked) {
    since_.reset();
    return info.tcpi_notsent_bytes > 0 ? Finding::Underway : Finding::Quiet;
  }
  const auto now = Deadline::Clock::now();
  const auto heard = now - std::chrono::milliseconds(info.tcpi_last_ack_recv);
  if (!since_ || heard > *since_) since_ = now;
  return now - *since_ >= limit_ ? Finding::Lost : Finding::Underway;
}

}  // namespace weft::transport::tcp
