// Where a listener of shm is: one boot of one host, one process namespace, one process in it.
#pragma once

#include <string>

#include <sys/types.h>

namespace weft::transport::shm {

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

}  // namespace weft::transport::shm
