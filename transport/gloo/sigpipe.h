// SPDX-License-Identifier: Apache-2.0
// Gloo's writes to sockets raise SIGPIPE when the peer has died, which would end this process too.
// While a WithoutSigpipe lives, its thread gets EPIPE instead; threads that are started meanwhile
// never get the signal.
#pragma once

#include <csignal>
#include <ctime>

namespace weft::transport::gloo {

class WithoutSigpipe {
 public:
  WithoutSigpipe() {
    sigemptyset(&pipe_);
    sigaddset(&pipe_, SIGPIPE);
    pthread_sigmask(SIG_BLOCK, &pipe_, &before_);
  }
  // Consumes signals that were raised meanwhile; else they would be delivered now.
  ~WithoutSigpipe() {
    if (sigismember(&before_, SIGPIPE) == 1) return;
    const timespec now{};
    while (sigtimedwait(&pipe_, nullptr, &now) > 0) {
    }
    pthread_sigmask(SIG_SETMASK, &before_, nullptr);
  }
  WithoutSigpipe(const WithoutSigpipe&) = delete;
  WithoutSigpipe& operator=(const WithoutSigpipe&) = delete;

 private:
  sigset_t pipe_;
  sigset_t before_;
};

}  // namespace weft::transport::gloo
