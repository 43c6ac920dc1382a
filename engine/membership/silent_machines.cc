// SPDX-License-Identifier: Apache-2.0
#include <cerrno>
#include <chrono>

#include <sys/epoll.h>
#include <sys/socket.h>

#include <weft/engine/membership/link.h>
#include <weft/engine/membership/silent_machines.h>

namespace weft::group {

namespace {

constexpr std::size_t kAskedAtOnce = 64;
// How long this rank goes by what it has found out.
constexpr auto kSilentFor = std::chrono::seconds(30);
constexpr auto kAnswersFor = std::chrono::seconds(5);
constexpr auto kRest = std::chrono::milliseconds(100);

}  // namespace

bool is_no_answer(int error) {
  return error == ETIMEDOUT || error == EHOSTUNREACH || error == ENETUNREACH;
}

void SilentMachines::ask(const std::vector<Published>& one_of_each_machine) {
  std::erase_if(found_, [](const auto& one) { return one.second.holds.passed(); });
  if (!waiting_.empty()) return;  // as many as may be asked at once
  for (const Published& address : one_of_each_machine) {
    if (!asked_.contains(address.host) && !found_.contains(address.host))
      waiting_.push_back(address);
  }
  ask_more();
}

bool SilentMachines::contains(const std::string& host) const {
  const auto found = found_.find(host);
  return found != found_.end() && found->second.is_silent && !found->second.holds.passed();
}

void SilentMachines::ask_more() {
  while (!waiting_.empty() && asked_.size() < kAskedAtOnce) {
    const std::string host = waiting_.front().host;
    Asked& one = asked_[host];
    one.address = std::move(waiting_.front());
    waiting_.pop_front();
    one.limit = loop_->at(Deadline::in(kDialPatience), [weak = weak_from_this(), host] {
      if (const auto self = weak.lock()) self->note(host, /*is_silent=*/true);
    });
    if (!dial(one)) asked_.erase(host);
  }
}

bool SilentMachines::dial(Asked& one) {
  const std::string& host = one.address.host;
  one.next.reset();  // before its socket is closed: another thread may be given the number at once
  try {
    one.socket = dial_socket(one.address);
    one.next =
        loop_->watch(one.socket.get(), EPOLLOUT, [weak = weak_from_this(), host](std::uint32_t) {
          if (const auto self = weak.lock()) self->on_event(host);
        });
  } catch (const Error& error) {
    if (!is_no_answer(error.native_code())) return false;
    dial_again(host);
  }
  return true;
}

// A router may have reported that it knows no way, and know one soon.
void SilentMachines::dial_again(const std::string& host) {
  asked_.at(host).next = loop_->at(Deadline::in(kRest), [weak = weak_from_this(), host] {
    const auto self = weak.lock();
    if (self && !self->dial(self->asked_.at(host))) self->note(host, /*is_silent=*/false);
  });
}

void SilentMachines::on_event(const std::string& host) {
  int error = 0;
  socklen_t bytes = sizeof error;
  ::getsockopt(asked_.at(host).socket.get(), SOL_SOCKET, SO_ERROR, &error, &bytes);
  is_no_answer(error) ? dial_again(host) : note(host, /*is_silent=*/false);
}

void SilentMachines::note(const std::string& host, bool is_silent) {
  const auto holds = Deadline::in(is_silent ? kSilentFor : kAnswersFor);
  found_.insert_or_assign(host, Found{is_silent, holds});
  asked_.erase(host);
  ask_more();
}

}  // namespace weft::group
