// SPDX-License-Identifier: Apache-2.0
#include <cerrno>
#include <chrono>
#include <cstring>

#include <sys/epoll.h>
#include <sys/socket.h>

#include <weft/engine/membership/awaited_ranks.h>
#include <weft/engine/membership/silent_machines.h>
#include <weft/engine/store/address.h>

namespace weft::group {

namespace {

// How long a hello may take after the rank's listening socket has refused a connection.
constexpr auto kHelloFollows = std::chrono::milliseconds(20);

// Returns how the connection has ended, ECONNRESET if the peer has closed it; 0: it stands.
int end_of(int socket) {
  int error = 0;
  socklen_t bytes = sizeof error;
  ::getsockopt(socket, SOL_SOCKET, SO_ERROR, &error, &bytes);
  if (error != 0) return error;
  char byte = 0;
  const auto count = ::recv(socket, &byte, 1, MSG_DONTWAIT);
  return count == 0 ? ECONNRESET : count < 0 && errno != EAGAIN ? errno : 0;
}

}  // namespace

void AwaitedRanks::watch(int rank, const std::string& host, int port) {
  const SocketAddress there = socket_address(host, port);
  Awaited one{
      host,
      port,
      Descriptor(::socket(there.storage.ss_family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0)),
      {},
      {}};
  if (one.socket.get() < 0) return;  // without a descriptor, its death cannot be seen
  keep_alive(one.socket.get());
  const bool is_made = ::connect(one.socket.get(), there.get(), there.length) == 0;
  const int error = is_made ? 0 : errno;
  if (error != 0 && error != EINPROGRESS && error != ECONNREFUSED) return unreachable(rank, error);
  const int socket = one.socket.get();
  // Its watch ends before its socket is closed: another thread may be given the number at once.
  ranks_.erase(rank);
  ranks_[rank] = std::move(one);
  if (error == ECONNREFUSED) return give_grace(rank);
  ranks_[rank].ending =
      loop_->watch(socket, EPOLLIN | EPOLLRDHUP, [weak = weak_from_this(), rank](std::uint32_t) {
        if (const auto self = weak.lock()) self->on_event(rank);
      });
}

void AwaitedRanks::on_event(int rank) {
  const auto found = ranks_.find(rank);
  if (found == ranks_.end()) return;
  const int end = end_of(found->second.socket.get());
  const Awaited one = std::move(found->second);
  ranks_.erase(found);
  switch (end) {
    case ECONNRESET: return watch_again(rank, one.host, one.port);
    case ECONNREFUSED: return give_grace(rank);
    default: return unreachable(rank, end);
  }
}

// Other errors tell nothing about the rank.
void AwaitedRanks::unreachable(int rank, int error) {
  if (!is_no_answer(error)) return;
  ended_(rank, {std::string("its machine does not answer: ") + std::strerror(error), true, true});
}

// Not at once: the other end may be a process that closes every connection.
void AwaitedRanks::watch_again(int rank, const std::string& host, int port) {
  ranks_[rank].grace =
      loop_->at(Deadline::in(kHelloFollows), [weak = weak_from_this(), rank, host, port] {
        const auto self = weak.lock();
        if (self && self->ranks_.contains(rank)) self->watch(rank, host, port);
      });
}

void AwaitedRanks::give_grace(int rank) {
  ranks_[rank].grace = loop_->at(Deadline::in(kHelloFollows), [weak = weak_from_this(), rank] {
    const auto self = weak.lock();
    if (!self || !self->ranks_.contains(rank)) return;
    if (self->greets_()) return self->give_grace(rank);
    self->ranks_.erase(rank);
    self->ended_(rank, {"its process ended"});
  });
}

}  // namespace weft::group
