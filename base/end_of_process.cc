// SPDX-License-Identifier: Apache-2.0
#include <set>

#include <fcntl.h>
#include <pthread.h>
#include <unistd.h>

#include <weft/base/end_of_process.h>
#include <weft/base/fork_mutex.h>

namespace weft {

namespace {

constinit ForkMutex mutex(ForkOrder::Counts);

std::set<int>& sockets() {
  static auto* const all = new std::set<int>;  // static variables end before some objects
  return *all;
}

// In the child, which has one thread: fork() held the mutex, so the set is whole.
WEFT_UNCHECKED_LOCKING void give_up_sockets() {
  if (sockets().empty()) return;
  const int nothing = ::open("/dev/null", O_RDWR | O_CLOEXEC);
  for (const int socket : sockets()) {
    if (nothing >= 0) {
      ::dup3(nothing, socket, O_CLOEXEC);
    } else {
      ::close(socket);
    }
  }
  if (nothing >= 0) ::close(nothing);
  sockets().clear();  // the numbers may come to mean other files of the child
}

}  // namespace

EndOfProcess::EndOfProcess(int socket) : socket_(socket) {
  static const int registered = ::pthread_atfork(nullptr, nullptr, give_up_sockets);
  static_cast<void>(registered);
  MutexLock lock(mutex);
  sockets().insert(socket_);
}

EndOfProcess::~EndOfProcess() {
  MutexLock lock(mutex);
  sockets().erase(socket_);
}

}  // namespace weft
