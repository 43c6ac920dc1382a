// SPDX-License-Identifier: Apache-2.0
#include <cerrno>
#include <chrono>

#include <sys/epoll.h>
#include <sys/socket.h>

#include <weft/engine/membership/awaited_ranks.h>
#include <weft/engine/store/address.h>

namespace weft::group {

namespace {

// How long a hello may take after the rank has closed its listening socket.
constexpr auto kHelloFollows = std::chrono::milliseconds(800);

// True if nobody listens at the other end any more: the connection was refused, or has ended. False
// if it still stands or cannot be made.
bool is_closed(int socket) {
  int error = 0;
  socklen_t bytes = sizeof error;
  ::getsockopt(socket, SOL_SOCKET, SO_ERROR, &error, &bytes);
  if (error == 0) {
    char byte = 0;
    const auto count = ::recv(socket, &byte, 1, MSG_DONTWAIT);
    if (count == 0) return true;
    error = count < 0 ? errno : 0;
  }
  return error == ECONNREFUSED || error == ECONNRESET;
}

}  // namespace

void AwaitedRanks::watch(int rank, const std::string& host, int port) {
  const SocketAddress there = socket_address(host, port);
  Awaited one{
      Descriptor(::socket(there.storage.ss_family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0)),
      {},
      {}};
  if (one.socket.get() < 0) return;  // without a descriptor, its death cannot be seen
  const bool is_made = ::connect(one.socket.get(), there.get(), there.length) == 0;
  const int error = is_made ? 0 : errno;
  if (error != 0 && error != EINPROGRESS && error != ECONNREFUSED) return;
  const int socket = one.socket.get();
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
  if (!is_closed(found->second.socket.get())) {
    ranks_.erase(found);  // no connection can be made, which tells nothing about the rank
    return;
  }
  found->second.ending.reset();
  give_grace(rank);
}

void AwaitedRanks::give_grace(int rank) {
  ranks_[rank].grace = loop_->at(Deadline::in(kHelloFollows), [weak = weak_from_this(), rank] {
    const auto self = weak.lock();
    if (!self || !self->ranks_.contains(rank)) return;
    if (self->greets_()) return self->give_grace(rank);
    self->ranks_.erase(rank);
    self->died_(rank);
  });
}

}  // namespace weft::group
