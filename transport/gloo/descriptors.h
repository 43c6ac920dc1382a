// SPDX-License-Identifier: Apache-2.0
// Gloo opens its sockets, epoll instances and pipes without close-on-exec, so a program that the
// rank starts inherits them. It would keep the connections of a dead rank open, and the rank's
// peers would wait. Gloo offers no way to change that.
#pragma once

#include <vector>

namespace weft::transport::gloo {

// Must be constructed before Gloo opens its descriptors. A program that another thread starts
// before close_on_exec() still inherits them.
class Descriptors {
 public:
  // Records the epoll instances of this process.
  Descriptors();
  // Sets close-on-exec for the epoll instances that have been opened since and lack it (only Gloo's
  // do), for the descriptors that they watch, and for the other ends of watched pipes. Does nothing
  // without /proc.
  void close_on_exec() const;

 private:
  std::vector<int> before_;
};

}  // namespace weft::transport::gloo
