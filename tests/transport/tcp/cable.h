// Peers that go without a word: two networks on one machine with a cable between them, which can be
// cut; a machine that has come up anew.
#pragma once

#include <functional>
#include <memory>
#include <string>

#include <weft/tests/transport/tcp/streams.h>

namespace weft::transport::tcp {

// Does to the peer of a TCP socket what a machine does that went down and came up again: it knows
// nothing of the connection. False where this process may not do that.
bool forget(Descriptor socket);
constexpr const char* kMayNotForget =
    "making a socket forget its connection (TCP_REPAIR) takes CAP_NET_ADMIN";

// Lines between a Child and the test.
void tell_line(int to, const std::string& line);
std::string hear_line(const Child& child);
// Blocks for one byte; throws when the test has ended.
void wait_for_byte(int socket);

// This process (10.77.7.1) and a child (10.77.7.2), each with a network of its own.
class Cable {
 public:
  // The child's body runs when the cable is there; the first line that it tells is heard().
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

// Null, and why, where this process may not make networks, or the machine makes no cable.
std::unique_ptr<Cable> lay_cable(const std::function<void(int to_parent)>& body,
                                 std::string& why_not);

}  // namespace weft::transport::tcp
