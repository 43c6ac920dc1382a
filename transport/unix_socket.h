// SPDX-License-Identifier: Apache-2.0
// Unix sockets on which processes of one host pass descriptors to each other (shm passes its
// segments, cuda_ipc GPU memory). A listening socket has a name in the file system only for a
// moment; afterwards peers reach it through its owner's /proc/<pid>/fd, so that a killed process
// leaves nothing behind.
//
// All calls are non-blocking and thread-safe. `who` begins error texts: "shm".
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
  Descriptor name;  // peers connect through this descriptor's number
};

// Only this user can connect. Throws Busy, or Unsupported if no folder for temporary files is
// writable.
ListeningSocket listen_for_this_user(const std::string& who);
// Returns an invalid descriptor if nobody has connected. Throws Busy.
Descriptor accept_from(const Descriptor& listening, const std::string& who);
// Connects to the socket that `process` holds under descriptor number `name`; std::nullopt if the
// listener's queue is full. Throws PeerLost if nobody listens any more.
std::optional<Descriptor> connect_to(pid_t process, int name, const std::string& who);

// Returns why this process and `process` may not reach each other's sockets, whether or not there
// is a socket: connecting would fail on one side or the other. Nothing if they may, or if `process`
// has ended.
std::optional<std::string> why_closed_to_this_one(pid_t process, int name);

// Returns the process at the other end. Throws PeerLost if it belongs to another user.
pid_t check_peer(const Descriptor& socket, const std::string& who);

// Sends one message: a few bytes and a descriptor, which the caller keeps. Returns false if the
// socket has no room now. Throws PeerLost.
bool pass(const Descriptor& socket, std::span<const std::byte> words, const Descriptor& passed,
          const std::string& who);
// Receives one message into `words`. std::nullopt if nothing has arrived; an invalid descriptor if
// the message has another form or the socket has ended. Throws Busy if this process has no
// descriptor left.
std::optional<Descriptor> take_passed(const Descriptor& socket, std::span<std::byte> words,
                                      const std::string& who);

}  // namespace weft::transport
