// SPDX-License-Identifier: Apache-2.0
// The address of a shm listener: the boot of a host, a process namespace, and a process in it.
#pragma once

#include <string>

#include <sys/types.h>

namespace weft::transport::shm {

struct Address {
  std::string host;       // the kernel's boot id
  std::string processes;  // the process namespace
  pid_t process = 0;
  int descriptor = 0;  // number of the socket's name in that process

  // Throws Caller if the text is not such an address.
  static Address parse(const std::string& text);
  std::string text() const;
  // Returns the address of this process. Throws Unsupported if /proc does not show it, Busy if
  // there are no descriptors.
  static Address here();
};

}  // namespace weft::transport::shm
