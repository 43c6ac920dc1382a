// SPDX-License-Identifier: Apache-2.0
// Two processes with a connection between them, for claims about processes.
#pragma once

#include <memory>
#include <string>

#include <weft/tests/conformance/connection/child.h>
#include <weft/tests/conformance/connection/connection_pair.h>

namespace weft::conformance {

// The far end's process: it listens, and the test connects to it.
struct Far {
  Far(Child& self, const std::string& backend)
      : transport(open_for_claims(backend)), harbour(*transport->connector(), loop), wire(self) {
    wire.say(harbour.address());
    connection = harbour.next();
    if (!connection) throw Error(Blame::PeerLost, "the test does not connect");
  }
  // Waits until the test's process says that this one may end.
  void wait_for_word() { static_cast<void>(wire.hear()); }

  std::shared_ptr<transport::Transport> transport;
  std::shared_ptr<EventLoop> loop = std::make_shared<EventLoop>("far");
  Harbour harbour;
  Child& wire;
  std::shared_ptr<Connection> connection;
};

class ConnectionProcessClaims : public testing::TestWithParam<std::string> {
 protected:
  // Starts the other process and connects to it. Returns false if that failed, or if the transport
  // does not reach other processes; then the test is skipped.
  [[nodiscard]] bool start(const std::function<void(Far& far)>& body) {
    launch(body);
    return !IsSkipped() && !HasFatalFailure();
  }

  void launch(const std::function<void(Far& far)>& body) {
    // Drop an earlier connection of this test: the other process would begin with a copy of it.
    near.reset();
    loop.reset();
    transport.reset();
    child = std::make_unique<Child>(
        [&](Child& self) {
          Far far(self, GetParam());
          body(far);
        },
        lifetime);
    const std::string address = child->hear();
    ASSERT_FALSE(address.empty()) << "the child has ended";
    transport = open_for_claims(GetParam());
    if (transport->connector()->why_unreachable(address)) {
      child->kill();
      GTEST_SKIP() << GetParam() << " does not reach another process";
    }
    loop = std::make_shared<EventLoop>("near");
    near = transport->connector()->connect(address, {loop, Deadline::in(connects_within)});
  }

  std::chrono::seconds connects_within = harness::longest_wait();
  std::chrono::seconds lifetime =
      harness::longest_wait();  // of the other process; a whole test fits into it
  std::unique_ptr<Child> child;
  std::shared_ptr<transport::Transport> transport;
  std::shared_ptr<EventLoop> loop;
  std::shared_ptr<Connection> near;
};

}  // namespace weft::conformance
