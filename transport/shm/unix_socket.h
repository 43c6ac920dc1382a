// The unix sockets on which segments are passed. A listener's socket has a name in the file system for a moment only: then
// it is reached through its owner's /proc/<pid>/fd, so that a killed process leaves nothing behind.
#pragma once

#include <optional>
#include <string>

#include <sys/types.h>

#include <weft/transport/shm/descriptor.h>

namespace weft::transport::shm {

// Where a listener is: one boot of one host, one process namespace, one process in it.
struct Address {
  std::string host;       // the kernel's boot id
  std::string processes;  // the process namespace
  pid_t process = 0;
  int descriptor = 0;  // of the socket's name, in that process

  // Throws Caller where the text is none.
  static Address parse(const std::string& text);
  std::string text() const;
  // Throws Unsupported where /proc does not say.
  static Address here();
};

struct ListeningSocket {
  Descriptor socket;
  Descriptor name;
};

// Non-blocking, for this user only. Throws Busy, or Unsupported where no folder for temporary files can be written.
ListeningSocket listen_for_this_user();
// An invalid one when nobody has connected. Throws Busy.
Descriptor accept_from(const Descriptor& listening);
// Connects; std::nullopt when the listener's queue is full. Throws PeerLost where nobody listens any more.
std::optional<Descriptor> connect_to(const Address& address);

// The process at the other end. Throws PeerLost where it belongs to another user than this one.
pid_t check_peer(const Descriptor& socket);

// One message with a descriptor. Throws PeerLost.
void pass(const Descriptor& socket, const Descriptor& memory);
// std::nullopt when it has not come. Throws PeerLost where something else came, or the end.
std::optional<Descriptor> take_passed(const Descriptor& socket);

}  // namespace weft::transport::shm
