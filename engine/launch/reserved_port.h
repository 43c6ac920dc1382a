// SPDX-License-Identifier: Apache-2.0
// A TCP port that this process has chosen for a program that has yet to listen there. Internal.
//
// The choice is a socket without files: an abstract Unix address with the port's number. Processes
// of Weft that choose ports in one network namespace see each other's, whoever their user is, and
// forked children keep it. It ends with its last holder, also if that is killed. It does not hold
// the port itself, so any program may listen there, whatever options it sets.
#pragma once

#include <optional>
#include <utility>

#include <weft/base/descriptor.h>

namespace weft::launch {

class ReservedPort {
 public:
  // Returns nothing if another process of Weft has chosen that port. Throws Busy.
  static std::optional<ReservedPort> of(int port);
  // Chooses a port from [first, end) that nobody listens on; if all of them are taken, or the range
  // is empty, one that the kernel chooses. Throws Busy.
  static ReservedPort choose(int first, int end);

  int number() const { return port_; }

 private:
  ReservedPort(int port, Descriptor socket) : port_(port), socket_(std::move(socket)) {}

  int port_;
  Descriptor socket_;  // empty where abstract addresses are not allowed
};

}  // namespace weft::launch
