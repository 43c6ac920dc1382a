// SPDX-License-Identifier: Apache-2.0
// A socket for each direction of a connection. The sender passes descriptors of memory over it to
// the peer's receiver, each with the number of its allocation. (pidfd_getfd would need the rights
// of a debugger.) The side that has the memory listens and names the socket in its hello; the other
// side connects before it sends its reach message.
//
// One message may name more descriptors than the socket holds, so the receiver takes descriptors as
// they arrive, independently of messages. Used by one thread at a time.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>

#include <weft/base/error.h>
#include <weft/transport/unix_socket.h>

namespace weft::transport::cuda_ipc {

// The sender's end.
class PassingEnd {
 public:
  enum class Outcome { Passed, Full, Gone };

  // Listens. If that fails, why_not() returns the reason.
  PassingEnd();

  // The descriptor of the socket's name, for the hello; 0 if it does not listen (any more).
  std::uint32_t name() const {
    return listening_.name ? static_cast<std::uint32_t>(listening_.name.get()) : 0;
  }
  // Why nothing can be passed to that process; empty if it has connected. The first call accepts
  // its connection.
  std::optional<std::string> why_not(std::uint64_t process);
  // Requires that why_not() has returned empty. After Gone, always returns Gone.
  Outcome pass(std::uint64_t allocation, const Descriptor& descriptor);
  // Stops passing.
  void close() noexcept;

 private:
  ListeningSocket listening_;
  Descriptor socket_;
  std::optional<std::string> why_not_;
};

// The receiver's end.
class TakingEnd {
 public:
  // Connects to the process's PassingEnd, by its name(). Throws PeerLost, Busy.
  TakingEnd(std::uint64_t process, std::uint32_t name);

  // The descriptor to watch.
  int descriptor() const { return socket_.get(); }
  // Takes and keeps the descriptors that have arrived. Returns false when no more will arrive; then
  // it need not be watched any more.
  bool take();
  // Removes and returns the descriptor with that number; an invalid one if none has arrived. If the
  // sender passed several with that number, the last one.
  Descriptor find(std::uint64_t allocation);
  // The error that stopped take(); empty if the peer just closed the socket.
  const std::optional<Error>& failure() const { return failure_; }

 private:
  Descriptor socket_;
  std::map<std::uint64_t, Descriptor> passed_;  // that no message has named yet
  bool is_over_ = false;
  std::optional<Error> failure_;
};

}  // namespace weft::transport::cuda_ipc
