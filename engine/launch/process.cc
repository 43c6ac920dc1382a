#include <algorithm>
#include <cerrno>
#include <csignal>
#include <cstring>

#include <arpa/inet.h>
#include <netinet/in.h>
#include <poll.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <weft/base/deadline.h>
#include <weft/base/error.h>
#include <weft/engine/launch/process.h>

namespace weft::launch {

int free_port() {
  const int socket = ::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  socklen_t length = sizeof address;
  const bool bound = socket >= 0 && ::bind(socket, reinterpret_cast<sockaddr*>(&address), length) == 0 &&
                     ::getsockname(socket, reinterpret_cast<sockaddr*>(&address), &length) == 0;
  const int number = errno;
  if (socket >= 0) ::close(socket);
  if (!bound) throw system_error(Blame::Busy, "looking for a free port", number);
  return ntohs(address.sin_port);
}

std::string describe_status(int status) {
  if (WIFEXITED(status)) return "exit code " + std::to_string(WEXITSTATUS(status));
  return "signal " + std::to_string(WTERMSIG(status)) + " (" + strsignal(WTERMSIG(status)) + ")";
}

Children::~Children() { end_all(std::chrono::seconds(2)); }

Children::Ended Children::wait(std::chrono::milliseconds patience) {
  const Deadline deadline = Deadline::in(patience);
  while (!processes_.empty()) {
    std::vector<pollfd> watched;
    for (const pid_t process : processes_) {
      int status = 0;
      if (::waitpid(process, &status, WNOHANG) == process) {
        std::erase(processes_, process);
        for (const pollfd& item : watched) ::close(item.fd);
        return {process, status};
      }
      const int descriptor = static_cast<int>(::syscall(SYS_pidfd_open, process, 0));
      if (descriptor >= 0) watched.push_back({descriptor, POLLIN, 0});
    }
    const auto left = std::min(deadline.remaining(), std::chrono::milliseconds(1000));
    // A descriptor of a process becomes readable when it ends; without any (old kernels) look again soon.
    const auto limit = watched.size() == processes_.size() ? left : std::min(left, std::chrono::milliseconds(10));
    ::poll(watched.data(), watched.size(), static_cast<int>(limit.count()));
    for (const pollfd& item : watched) ::close(item.fd);
    if (deadline.passed()) break;
  }
  return {};
}

void Children::signal_all(int number) const {
  for (const pid_t process : processes_) ::kill(process, number);
}

void Children::end_all(std::chrono::milliseconds grace) {
  if (processes_.empty()) return;
  signal_all(SIGTERM);
  signal_all(SIGCONT);  // a stopped process sees no SIGTERM
  const Deadline deadline = Deadline::in(grace);
  while (!processes_.empty() && !deadline.passed()) wait(deadline.remaining());
  signal_all(SIGKILL);
  while (!processes_.empty()) wait(std::chrono::seconds(1));
}

}  // namespace weft::launch
