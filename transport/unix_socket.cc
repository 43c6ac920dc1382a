// SPDX-License-Identifier: Apache-2.0
#include <atomic>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <vector>

#include <fcntl.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>

#include <weft/base/error.h>
#include <weft/base/make_error.h>
#include <weft/transport/unix_socket.h>

namespace weft::transport {

namespace {

constexpr const char* kLooksAway =
    " does not let this one look into its /proc: it runs as another user or in another user "
    "namespace, has capabilities "
    "that this one lacks, or is not dumpable";

bool is_trusted(uid_t user) { return user == ::geteuid() || user == 0; }

std::string belongs_to(pid_t process, uid_t user) {
  return "process " + std::to_string(process) + " belongs to user " + std::to_string(user) +
         ", not to this one";
}

// Returns nothing if /proc does not show it.
std::optional<uid_t> effective_user(const std::string& folder) {
  std::ifstream status(folder + "/status");
  for (std::string word; status >> word;) {
    uid_t real = 0, effective = 0;
    if (word == "Uid:" && status >> real >> effective) return effective;
  }
  return std::nullopt;
}

sockaddr_un name_of(const std::string& path, const std::string& who) {
  sockaddr_un name{};
  name.sun_family = AF_UNIX;
  if (path.size() >= sizeof name.sun_path) {
    throw Error(
        Blame::Unsupported,
        who + ": the path of a socket in the folder for temporary files is too long: " + path);
  }
  path.copy(name.sun_path, path.size());
  return name;
}

Descriptor unix_socket(const std::string& who) {
  Descriptor socket(::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  if (!socket) throw system_error(Blame::Busy, who + ": cannot make a socket", errno);
  return socket;
}

// Returns a path that no other process uses now. Containers may share the folder while their
// processes have equal numbers.
std::string fresh_path() {
  static std::atomic<unsigned> count{0};
  struct stat processes {};
  ::stat("/proc/self/ns/pid", &processes);
  const char* folder = std::getenv("TMPDIR");
  return std::string(folder != nullptr && *folder != '\0' ? folder : "/tmp") + "/weft-" +
         std::to_string(processes.st_ino) + "-" + std::to_string(::getpid()) + "-" +
         std::to_string(count++);
}

}  // namespace

ListeningSocket listen_for_this_user(const std::string& who) {
  Descriptor socket = unix_socket(who);
  ::fchmod(socket.get(), 0600);  // becomes the mode of the name
  const std::string path = fresh_path();
  const sockaddr_un name = name_of(path, who);
  ::unlink(path.c_str());  // left by a killed process of the same number
  if (::bind(socket.get(), reinterpret_cast<const sockaddr*>(&name), sizeof name) != 0) {
    throw system_error(
        Blame::Unsupported,
        who + ": cannot make a socket at " + path + "; set TMPDIR to a folder that can be written",
        errno);
  }
  Descriptor held(::open(path.c_str(), O_PATH | O_CLOEXEC));
  const int number = errno;
  ::unlink(path.c_str());
  if (!held) throw system_error(Blame::Busy, who + ": cannot hold the socket " + path, number);
  if (::listen(socket.get(), 128) != 0)
    throw system_error(Blame::Busy, who + ": cannot listen", errno);
  return {std::move(socket), std::move(held)};
}

Descriptor accept_from(const Descriptor& listening, const std::string& who) {
  Descriptor socket(::accept4(listening.get(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
  if (!socket && errno != EAGAIN && errno != EINTR && errno != ECONNABORTED) {
    throw system_error(Blame::Busy, who + ": cannot accept a connection", errno);
  }
  return socket;
}

std::optional<std::string> why_closed_to_this_one(pid_t process, int name) {
  const std::string folder = "/proc/" + std::to_string(process);
  struct stat theirs {};
  const bool may_look = ::stat((folder + "/fd/" + std::to_string(name)).c_str(), &theirs) == 0 ||
                        (errno != EACCES && errno != EPERM);
  if (!may_look) return "process " + std::to_string(process) + kLooksAway;
  // A process that may look into the other's /proc may lack the rights the other way round: check
  // its user.
  struct stat own {};
  const auto user = effective_user(folder);
  if (user && !is_trusted(*user)) return belongs_to(process, *user);
  const bool differ = ::stat((folder + "/ns/user").c_str(), &theirs) == 0 &&
                      ::stat("/proc/self/ns/user", &own) == 0 &&
                      (own.st_ino != theirs.st_ino || own.st_dev != theirs.st_dev);
  if (differ) return "process " + std::to_string(process) + " is in another user namespace";
  return std::nullopt;
}

std::optional<Descriptor> connect_to(pid_t process, int descriptor, const std::string& who) {
  Descriptor socket = unix_socket(who);
  const std::string path = "/proc/" + std::to_string(process) + "/fd/" + std::to_string(descriptor);
  const sockaddr_un name = name_of(path, who);
  if (::connect(socket.get(), reinterpret_cast<const sockaddr*>(&name), sizeof name) == 0)
    return socket;
  if (errno == EAGAIN || errno == EINTR) return std::nullopt;
  const bool may_not = errno == EACCES || errno == EPERM;
  throw system_error(
      Blame::PeerLost,
      who + ": process " + std::to_string(process) +
          (may_not ? std::string(kLooksAway) + "; start both processes alike, or choose tcp"
                   : " does not listen any more"),
      errno);
}

pid_t check_peer(const Descriptor& socket, const std::string& who) {
  ucred peer{};
  socklen_t size = sizeof peer;
  if (::getsockopt(socket.get(), SOL_SOCKET, SO_PEERCRED, &peer, &size) != 0) {
    throw system_error(Blame::PeerLost, who + ": cannot tell who connected", errno);
  }
  if (is_trusted(peer.uid)) return peer.pid;
  throw Error(Blame::PeerLost, who + ": " + belongs_to(peer.pid, peer.uid));
}

bool pass(const Descriptor& socket, std::span<const std::byte> words, const Descriptor& passed,
          const std::string& who) {
  iovec bytes{const_cast<std::byte*>(words.data()), words.size()};
  alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int))] = {};
  msghdr message{};
  message.msg_iov = &bytes;
  message.msg_iovlen = 1;
  message.msg_control = control;
  message.msg_controllen = sizeof control;
  cmsghdr* part = CMSG_FIRSTHDR(&message);
  part->cmsg_level = SOL_SOCKET;
  part->cmsg_type = SCM_RIGHTS;
  part->cmsg_len = CMSG_LEN(sizeof(int));
  const int number = passed.get();
  std::memcpy(CMSG_DATA(part), &number, sizeof number);
  // The words are few enough to be sent whole or not at all.
  if (::sendmsg(socket.get(), &message, MSG_NOSIGNAL) == static_cast<ssize_t>(words.size()))
    return true;
  // ETOOMANYREFS: more of this user's descriptors are in transit than it may have open.
  if (errno == EAGAIN || errno == EINTR || is_shortage(errno) || errno == ETOOMANYREFS)
    return false;
  throw system_error(Blame::PeerLost, who + ": cannot pass a descriptor", errno);
}

std::optional<Descriptor> take_passed(const Descriptor& socket, std::span<std::byte> words,
                                      const std::string& who) {
  iovec bytes{words.data(), words.size()};
  alignas(cmsghdr) char control[CMSG_SPACE(4 * sizeof(int))];
  msghdr message{};
  message.msg_iov = &bytes;
  message.msg_iovlen = 1;
  message.msg_control = control;
  message.msg_controllen = sizeof control;
  const auto count = ::recvmsg(socket.get(), &message, MSG_CMSG_CLOEXEC);
  if (count < 0 && (errno == EAGAIN || errno == EINTR)) return std::nullopt;
  std::vector<Descriptor> passed;  // unexpected descriptors are closed again
  for (cmsghdr* part = count > 0 ? CMSG_FIRSTHDR(&message) : nullptr; part != nullptr;
       part = CMSG_NXTHDR(&message, part)) {
    if (part->cmsg_level != SOL_SOCKET || part->cmsg_type != SCM_RIGHTS) continue;
    for (std::size_t at = 0; CMSG_LEN(at + sizeof(int)) <= part->cmsg_len; at += sizeof(int)) {
      int number = -1;
      std::memcpy(&number, CMSG_DATA(part) + at, sizeof number);
      passed.emplace_back(number);
    }
  }
  if (count > 0 && (message.msg_flags & MSG_CTRUNC) != 0 && passed.empty()) {
    throw system_error(Blame::Busy,
                       who + ": this process has no descriptor left for one that a peer passes",
                       EMFILE);
  }
  if (count != static_cast<ssize_t>(words.size()) || passed.size() != 1) return Descriptor();
  return std::move(passed[0]);
}

}  // namespace weft::transport
