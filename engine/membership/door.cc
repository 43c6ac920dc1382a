// SPDX-License-Identifier: Apache-2.0
#include <cerrno>
#include <chrono>

#include <sys/epoll.h>
#include <sys/socket.h>

#include <weft/base/log.h>
#include <weft/base/shortage.h>
#include <weft/engine/membership/door.h>

namespace weft::group {

namespace {

constexpr auto kRest = std::chrono::milliseconds(100);

}  // namespace

void Door::open(std::function<void(Descriptor)> comes, std::function<bool()> makes_room) {
  comes_ = std::move(comes);
  makes_room_ = std::move(makes_room);
  watch();
}

void Door::watch() {
  accepting_ = loop_->watch(listening_.get(), EPOLLIN, [weak = weak_from_this()](std::uint32_t) {
    if (const auto self = weak.lock()) self->accept();
  });
}

void Door::close() {
  comes_ = nullptr;
  makes_room_ = nullptr;
  accepting_.reset();
  resting_.reset();
}

void Door::accept() {
  while (comes_) {
    Descriptor socket(::accept4(listening_.get(), nullptr, nullptr, SOCK_NONBLOCK | SOCK_CLOEXEC));
    if (const int number = errno; !socket && is_shortage(number)) {
      if (makes_room_ && makes_room_()) continue;
      const bool is_first = lacks_.exchange(number) == 0;
      if (is_first && warns_)
        log::warn(whose_ + " cannot accept other ranks' connections" + remedy_for(lacks_));
      // The listening socket stays readable while accept() fails, so stop watching it for a while.
      accepting_.reset();
      resting_ = loop_->at(Deadline::in(kRest), [weak = weak_from_this()] {
        if (const auto self = weak.lock()) self->watch();
      });
    }
    if (!socket) return;
    lacks_ = 0;
    const auto comes = comes_;  // which may close the door
    comes(std::move(socket));
  }
}

}  // namespace weft::group
