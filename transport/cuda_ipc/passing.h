// The socket of a lane's own over which descriptors of memory go from the sender of one end to the
// receiver of the other, each with the number of its allocation. (By pidfd_getfd it would take the
// rights of a debugger.) The side that has the memory listens, and says in its hello where; the
// other one connects before it says what it reaches.
//
// One message may tell of more descriptors than the socket holds, so the receiver takes them as
// they come, whatever has become of the messages. For one thread at a time.
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

  // Listens. Where it cannot, why_not() says so.
  PassingEnd();

  // The descriptor of the socket's name, for the hello; 0: there is none, or none any more.
  std::uint32_t name() const {
    return listening_.name ? static_cast<std::uint32_t>(listening_.name.get()) : 0;
  }
  // Why nothing can be passed to that process; nothing where it has connected. Looks for it when it
  // is first asked.
  std::optional<std::string> why_not(std::uint64_t process);
  // After why_not() has said nothing. Once Gone, always.
  Outcome pass(std::uint64_t allocation, const Descriptor& descriptor);
  // Passes nothing from now on.
  void close() noexcept;

 private:
  ListeningSocket listening_;
  Descriptor socket_;
  std::optional<std::string> why_not_;
};

// The receiver's end.
class TakingEnd {
 public:
  // Connects to that of the process; see PassingEnd::name(). Throws PeerLost, Busy.
  TakingEnd(std::uint64_t process, std::uint32_t name);

  // To be watched.
  int descriptor() const { return socket_.get(); }
  // Keeps what has come. False when nothing more will; then it need not be watched any more.
  bool take();
  // What has come with that number, an invalid one if nothing has; the last one, where the sender
  // has thought better of it.
  Descriptor find(std::uint64_t allocation);
  // Why nothing more comes, where that is our own fault.
  const std::optional<Error>& failure() const { return failure_; }

 private:
  Descriptor socket_;
  std::map<std::uint64_t, Descriptor> passed_;  // that no message has told of yet
  bool is_over_ = false;
  std::optional<Error> failure_;
};

}  // namespace weft::transport::cuda_ipc
