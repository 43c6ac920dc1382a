// SPDX-License-Identifier: Apache-2.0
#include <cerrno>
#include <chrono>

#include <poll.h>
#include <sys/socket.h>

#include <weft/base/error.h>
#include <weft/engine/membership/neighbours.h>
#include <weft/engine/membership/still_listens.h>

namespace weft::group {

namespace {

// A machine that can be reached answers within this time. A process that ends closes its listening
// socket, and what was connected to that, within it; one that lives waits longer for a hello.
constexpr auto kAnswers = std::chrono::seconds(1);

// Returns the events that have happened by then; 0: none.
short await(int socket, short events, Deadline deadline) {
  pollfd one{socket, events, 0};
  int count = 0;
  do {
    count = ::poll(&one, 1, static_cast<int>(deadline.remaining().count()));
  } while (count < 0 && errno == EINTR);
  return count > 0 ? one.revents : short{0};
}

}  // namespace

bool still_listens(const Published& address, Deadline deadline) {
  for (;;) {
    try {
      const Descriptor socket = dial_socket(address);
      const Deadline soon = Deadline::sooner(deadline, Deadline::in(kAnswers));
      if (await(socket.get(), POLLOUT, soon) == 0) return false;
      int error = 0;
      socklen_t bytes = sizeof error;
      ::getsockopt(socket.get(), SOL_SOCKET, SO_ERROR, &error, &bytes);
      if (error != 0) return false;
      // Accepted, perhaps by a process that is just ending. Then the socket ends soon.
      const Deadline ends = Deadline::sooner(deadline, Deadline::in(kAnswers));
      if (await(socket.get(), POLLIN, ends) == 0 || deadline.passed()) return true;
    } catch (const Error& error) {
      return error.blame() == Blame::Busy;  // without a descriptor, it is not known to have ended
    }
  }
}

}  // namespace weft::group
