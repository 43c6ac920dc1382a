// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cerrno>
#include <chrono>
#include <optional>
#include <utility>

#include <poll.h>
#include <sys/socket.h>

#include <weft/base/error.h>
#include <weft/engine/membership/link.h>
#include <weft/engine/membership/still_listens.h>

namespace weft::group {

namespace {

// A machine that can be reached answers within this time. A process that ends closes its listening
// socket, and what was connected to that, within it; one that lives waits longer for a hello.
constexpr auto kAnswers = std::chrono::seconds(1);
constexpr std::size_t kAskedAtOnce = 64;

struct Asked {
  std::size_t index = 0;  // of its address
  Descriptor socket;
  bool is_connected = false;
  Deadline until = Deadline::in(kAnswers);  // for what comes next
};

// Begins to connect. Returns the answer if there is one at once.
std::optional<bool> dial(Asked& one, const Published& address) {
  try {
    one.socket = dial_socket(address);
  } catch (const Error& error) {
    return error.blame() == Blame::Busy;  // without a descriptor, it is not known to have ended
  }
  one.is_connected = false;
  one.until = Deadline::in(kAnswers);
  return std::nullopt;
}

// Takes in that poll() has seen these events. Returns the answer once it is known.
std::optional<bool> take(Asked& one, short events, const Published& address, Deadline deadline) {
  if (events == 0) return one.until.passed() ? std::optional(one.is_connected) : std::nullopt;
  if (one.is_connected) {
    // It was accepted, perhaps by a process that is just ending.
    return deadline.passed() ? true : dial(one, address);
  }
  int error = 0;
  socklen_t bytes = sizeof error;
  ::getsockopt(one.socket.get(), SOL_SOCKET, SO_ERROR, &error, &bytes);
  if (error != 0) return false;
  one.is_connected = true;
  one.until = Deadline::in(kAnswers);
  return std::nullopt;
}

// Returns what has happened at each, once something has, or the time of one is over.
std::vector<pollfd> await(const std::vector<Asked>& asked) {
  std::vector<pollfd> sockets;
  Deadline soonest = Deadline::never();
  for (const Asked& one : asked) {
    sockets.push_back({one.socket.get(), one.is_connected ? short{POLLIN} : short{POLLOUT}, 0});
    soonest = Deadline::sooner(soonest, one.until);
  }
  const auto limit = static_cast<int>(soonest.remaining().count());
  if (::poll(sockets.data(), sockets.size(), limit) < 0) {
    for (pollfd& one : sockets) one.revents = 0;
  }
  return sockets;
}

}  // namespace

std::vector<bool> still_listen(const std::vector<Published>& addresses, Deadline deadline) {
  std::vector<bool> listen(addresses.size(), true);
  std::vector<Asked> asked;
  for (std::size_t next = 0;;) {
    for (; next < addresses.size() && asked.size() < kAskedAtOnce && !deadline.passed(); ++next) {
      Asked one{.index = next};
      const auto answer = dial(one, addresses[next]);
      if (answer) listen[next] = *answer;
      if (!answer) asked.push_back(std::move(one));
    }
    if (asked.empty()) return listen;
    const std::vector<pollfd> sockets = await(asked);
    std::vector<Asked> waiting;
    for (std::size_t i = 0; i < asked.size(); ++i) {
      const auto at = asked[i].index;
      const auto answer = take(asked[i], sockets[i].revents, addresses[at], deadline);
      if (answer) listen[at] = *answer;
      if (!answer) waiting.push_back(std::move(asked[i]));
    }
    asked = std::move(waiting);
  }
}

}  // namespace weft::group
