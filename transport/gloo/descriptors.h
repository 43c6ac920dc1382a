// Gloo opens sockets, epoll instances and pipes that a program inherits which the rank starts by
// exec: it would hold the connections of a rank that has died, and its peers would wait. Gloo
// offers no way to open them otherwise.
#pragma once

#include <vector>

namespace weft::transport::gloo {

// Made before Gloo opens its own. Between that and close_on_exec() a program that another thread
// starts inherits them.
class Descriptors {
 public:
  // Notes which epoll instances this process has.
  Descriptors();
  // Lets no program inherit the epoll instances that have been opened meanwhile, unless they are
  // closed on exec already, as all but Gloo's are, nor the descriptors that these watch, nor the
  // other ends of their pipes. Nothing without /proc.
  void close_on_exec() const;

 private:
  std::vector<int> before_;
};

}  // namespace weft::transport::gloo
