#include <algorithm>
#include <cerrno>
#include <csignal>
#include <cstring>
#include <fstream>
#include <random>

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

namespace {

// The port that was bound on all interfaces (0: one that the kernel chooses), -1 where it is taken.
int bindable(int port) {
  const int socket = ::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_ANY);
  address.sin_port = htons(static_cast<std::uint16_t>(port));
  socklen_t length = sizeof address;
  const bool bound = socket >= 0 && ::bind(socket, reinterpret_cast<sockaddr*>(&address), length) == 0 &&
                     ::getsockname(socket, reinterpret_cast<sockaddr*>(&address), &length) == 0;
  const int number = errno;
  if (socket >= 0) ::close(socket);
  if (bound) return ntohs(address.sin_port);
  if (number != EADDRINUSE && number != EACCES) throw system_error(Blame::Busy, "looking for a free port", number);
  return -1;
}

// Where the kernel begins to hand out ports to whoever connects.
int first_handed_out() {
  int first = 0;
  std::ifstream("/proc/sys/net/ipv4/ip_local_port_range") >> first;
  return first;
}

}  // namespace

int free_port() {
  constexpr int kLowest = 16384;
  constexpr int kTries = 100;
  const int end = first_handed_out();
  std::random_device random;
  for (int i = 0; i < kTries && end > kLowest; ++i) {
    const int port = bindable(std::uniform_int_distribution(kLowest, end - 1)(random));
    if (port > 0) return port;
  }
  const int port = bindable(0);
  if (port < 0) throw system_error(Blame::Busy, "looking for a free port", EADDRINUSE);
  return port;
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
