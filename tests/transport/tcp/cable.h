// SPDX-License-Identifier: Apache-2.0
// Peers that vanish silently: two networks on one machine with a cable between them that can be
// cut, and a machine that has rebooted.
#pragma once

#include <functional>
#include <memory>
#include <string>

#include <weft/tests/transport/tcp/streams.h>

namespace weft::transport::tcp {

// Puts the peer of a TCP socket into the state of a rebooted machine, which knows nothing of the
// connection. Returns false if this process may not do that.
bool forget(Descriptor socket);
constexpr const char* kMayNotForget =
    "making a socket forget its connection (TCP_REPAIR) takes CAP_NET_ADMIN";

// Lines from a Child to the test.
void tell_line(int to, const std::string& line);
std::string hear_line(const Child& child);
// Blocks until a byte arrives; throws when the test has ended.
void wait_for_byte(int socket);

// This process (10.77.7.1) and a child (10.77.7.2), each with a network of its own.
class Cable {
 public:
  // The child's body runs once the cable is there; heard() is the first line that it sends.
  explicit Cable(const std::function<void(int to_parent)>& body);
  const std::string& heard() const { return heard_; }
  Child& peer() { return *peer_; }
  void cut();
  void mend();

 private:
  void set(const std::string& state);

  std::unique_ptr<Child> peer_;
  std::string heard_;
};

// Returns null, and the reason, if this process may not make networks or the machine makes no
// cable.
std::unique_ptr<Cable> lay_cable(const std::function<void(int to_parent)>& body,
                                 std::string& why_not);

}  // namespace weft::transport::tcp
