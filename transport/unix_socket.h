// The unix sockets on which processes of one host pass descriptors to each other (shm its segments,
// cuda_ipc memory of GPUs). A listener's socket has a name in the file system for a moment only:
// then it is reached through its owner's /proc/<pid>/fd, so that a killed process leaves nothing
// behind.
//
// All non-blocking, and for every thread. `who` begins the texts of errors: "shm".
#pragma once

#include <cstddef>
#include <optional>
#include <span>
#include <string>

#include <sys/types.h>

#include <weft/base/descriptor.h>

namespace weft::transport {

struct ListeningSocket {
  Descriptor socket;
  Descriptor name;  // by whose number others reach it
};

// For this user only. Throws Busy, or Unsupported where no folder for temporary files can be
// written.
ListeningSocket listen_for_this_user(const std::string& who);
// An invalid one when nobody has connected. Throws Busy.
Descriptor accept_from(const Descriptor& listening, const std::string& who);
// Connects to the socket whose name has that number there; std::nullopt when the listener's queue
// is full. Throws PeerLost where nobody listens any more.
std::optional<Descriptor> connect_to(pid_t process, int name, const std::string& who);

// Why processes do not let each other reach such a socket, whether or not there is one; nothing
// where they do, and where the process has ended. Connecting would fail on one side or the other.
std::optional<std::string> why_closed_to_this_one(pid_t process, int name);

// The process at the other end. Throws PeerLost where it belongs to another user than this one.
pid_t check_peer(const Descriptor& socket, const std::string& who);

// One message: a few words, and a descriptor, which stays the caller's. False where the socket has
// no room for it now. Throws PeerLost.
bool pass(const Descriptor& socket, std::span<const std::byte> words, const Descriptor& passed,
          const std::string& who);
// Fills `words`. std::nullopt when nothing has come; an invalid one where it was something else, or
// the end. Throws Busy where this process has no descriptor left for it.
std::optional<Descriptor> take_passed(const Descriptor& socket, std::span<std::byte> words,
                                      const std::string& who);

}  // namespace weft::transport
