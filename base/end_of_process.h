// SPDX-License-Identifier: Apache-2.0
// Sockets by whose end other processes see that this one has ended. A forked child holds copies of
// its parent's sockets, so without this a killed parent would seem to live as long as its child.
#pragma once

namespace weft {

// Beside a socket that it does not own: while it lives, fork() gives the child /dev/null under the
// socket's number. Destroyed before the socket is closed. Any thread may use it.
class EndOfProcess {
 public:
  explicit EndOfProcess(int socket);
  ~EndOfProcess();
  EndOfProcess(const EndOfProcess&) = delete;
  EndOfProcess& operator=(const EndOfProcess&) = delete;

 private:
  int socket_;
};

}  // namespace weft
