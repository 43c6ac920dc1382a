#include <atomic>
#include <cerrno>
#include <charconv>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <vector>

#include <fcntl.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>

#include <weft/base/error.h>
#include <weft/transport/shm/unix_socket.h>

namespace weft::transport::shm {

namespace {

constexpr char kHello[8] = {'W', 'E', 'F', 'T', 's', 'h', 'm', '1'};

sockaddr_un name_of(const std::string& path) {
  sockaddr_un name{};
  name.sun_family = AF_UNIX;
  if (path.size() >= sizeof name.sun_path) {
    throw Error(Blame::Unsupported, "shm: the folder for temporary files has too long a name for a socket: " + path);
  }
  path.copy(name.sun_path, path.size());
  return name;
}

Descriptor unix_socket() {
  Descriptor socket(::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  if (!socket) throw system_error(Blame::Busy, "shm: cannot make a socket", errno);
  return socket;
}

template <class Number>
bool parse_number(const std::string& text, Number& number) {
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), number);
  return error == std::errc() && end == text.data() + text.size() && number > 0;
}

}  // namespace

Address Address::parse(const std::string& text) {
  std::vector<std::string> parts{""};
  for (const char letter : text) {
    if (letter == '/') {
      parts.emplace_back();
    } else {
      parts.back() += letter;
    }
  }
  Address address;
  if (parts.size() != 4 || parts[0].empty() || parts[1].empty() || !parse_number(parts[2], address.process) ||
      !parse_number(parts[3], address.descriptor)) {
    throw Error(Blame::Caller, "shm: '" + text + "' is not an address of this transport (host/processes/pid/descriptor)");
  }
  address.host = parts[0];
  address.processes = parts[1];
  return address;
}

std::string Address::text() const {
  return host + "/" + processes + "/" + std::to_string(process) + "/" + std::to_string(descriptor);
}

Address Address::here() {
  Address address;
  std::getline(std::ifstream("/proc/sys/kernel/random/boot_id"), address.host);
  struct stat about {};
  if (address.host.empty() || ::stat("/proc/self/ns/pid", &about) != 0) {
    throw Error(Blame::Unsupported, "shm: /proc does not say which host and process namespace this is; mount it");
  }
  address.processes = std::to_string(about.st_ino);
  address.process = ::getpid();
  return address;
}

ListeningSocket listen_for_this_user() {
  static std::atomic<unsigned> count{0};
  Descriptor socket = unix_socket();
  ::fchmod(socket.get(), 0600);  // the mode that the name gets
  const char* folder = std::getenv("TMPDIR");
  const std::string path = std::string(folder != nullptr && *folder != '\0' ? folder : "/tmp") + "/weft-" +
                           std::to_string(::getpid()) + "-" + std::to_string(count++);
  const sockaddr_un name = name_of(path);
  ::unlink(path.c_str());  // of a process of that number that was killed right here
  if (::bind(socket.get(), reinterpret_cast<const sockaddr*>(&name), sizeof name) != 0) {
    throw system_error(Blame::Unsupported,
                       "shm: cannot make a socket at " + path + "; set TMPDIR to a folder that can be written", errno);
  }
  Descriptor held(::open(path.c_str(), O_PATH | O_CLOEXEC));
  const int number = errno;
  ::unlink(path.c_str());
  if (!held) throw system_error(Blame::Busy, "shm: cannot hold the socket " + path, number);
  if (::listen(socket.get(), 128) != 0) throw system_error(Blame::Busy, "shm: cannot listen", errno);
  return {std::move(socket), std::move(held)};
}

Descriptor accept_from(const Descriptor& listening) {
  Descriptor socket(::accept4(listening.get(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
  if (!socket && errno != EAGAIN && errno != EINTR && errno != ECONNABORTED) {
    throw system_error(Blame::Busy, "shm: cannot accept a connection", errno);
  }
  return socket;
}

std::optional<Descriptor> connect_to(const Address& address) {
  Descriptor socket = unix_socket();
  const std::string path = "/proc/" + std::to_string(address.process) + "/fd/" + std::to_string(address.descriptor);
  const sockaddr_un name = name_of(path);
  if (::connect(socket.get(), reinterpret_cast<const sockaddr*>(&name), sizeof name) == 0) return socket;
  if (errno == EAGAIN || errno == EINTR) return std::nullopt;
  throw system_error(Blame::PeerLost, "shm: process " + std::to_string(address.process) + " does not listen any more",
                     errno);
}

pid_t check_peer(const Descriptor& socket) {
  ucred peer{};
  socklen_t size = sizeof peer;
  if (::getsockopt(socket.get(), SOL_SOCKET, SO_PEERCRED, &peer, &size) != 0) {
    throw system_error(Blame::PeerLost, "shm: cannot tell who connected", errno);
  }
  if (peer.uid == ::geteuid() || peer.uid == 0) return peer.pid;
  throw Error(Blame::PeerLost, "shm: process " + std::to_string(peer.pid) + " belongs to user " + std::to_string(peer.uid) +
                                   ", not to this one");
}

void pass(const Descriptor& socket, const Descriptor& memory) {
  char hello[sizeof kHello];
  std::memcpy(hello, kHello, sizeof hello);
  iovec bytes{hello, sizeof hello};
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
  const int number = memory.get();
  std::memcpy(CMSG_DATA(part), &number, sizeof number);
  // An empty socket has room for it.
  if (::sendmsg(socket.get(), &message, MSG_NOSIGNAL) != static_cast<ssize_t>(sizeof hello)) {
    throw system_error(Blame::PeerLost, "shm: cannot pass a segment", errno);
  }
}

std::optional<Descriptor> take_passed(const Descriptor& socket) {
  char hello[sizeof kHello];
  iovec bytes{hello, sizeof hello};
  alignas(cmsghdr) char control[CMSG_SPACE(4 * sizeof(int))];
  msghdr message{};
  message.msg_iov = &bytes;
  message.msg_iovlen = 1;
  message.msg_control = control;
  message.msg_controllen = sizeof control;
  const auto count = ::recvmsg(socket.get(), &message, MSG_CMSG_CLOEXEC);
  if (count < 0 && (errno == EAGAIN || errno == EINTR)) return std::nullopt;
  std::vector<Descriptor> passed;  // whatever came is closed again, if it is not what we want
  for (cmsghdr* part = count > 0 ? CMSG_FIRSTHDR(&message) : nullptr; part != nullptr; part = CMSG_NXTHDR(&message, part)) {
    if (part->cmsg_level != SOL_SOCKET || part->cmsg_type != SCM_RIGHTS) continue;
    for (std::size_t at = 0; CMSG_LEN(at + sizeof(int)) <= part->cmsg_len; at += sizeof(int)) {
      int number = -1;
      std::memcpy(&number, CMSG_DATA(part) + at, sizeof number);
      passed.emplace_back(number);
    }
  }
  if (count > 0 && (message.msg_flags & MSG_CTRUNC) != 0 && passed.empty()) {
    throw Error(Blame::Busy,
                "shm: this process has no descriptor left for the segment that a peer passes; raise ulimit -n");
  }
  if (count != static_cast<ssize_t>(sizeof hello) || std::memcmp(hello, kHello, sizeof hello) != 0 || passed.size() != 1) {
    throw Error(Blame::PeerLost, "shm: what connected does not speak this version of Weft's shared memory");
  }
  return std::move(passed[0]);
}

}  // namespace weft::transport::shm
