// SPDX-License-Identifier: Apache-2.0
// Which ports connections use; inproc carries the hellos.
#include <future>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <weft/tests/harness/fake_verbs.h>
#include <weft/transport/verbs/verbs.h>

namespace weft::transport::inproc {
Result<std::shared_ptr<Transport>> open();
}

namespace weft::transport::verbs {
namespace {

TEST(Verbs, ConnectsFromTheListeningPort) {
  harness::FakeVerbs fake;
  fake.give_ports(2);
  Config config;
  Verbs verbs({fake.open()}, config, inproc::open().value());
  const auto loop = std::make_shared<EventLoop>("both");
  std::promise<std::shared_ptr<Connection>> accepted;
  const auto listener = verbs.listen(
      {.loop = loop, .interface_address = "192.0.2.2", .accepted = [&](auto connection) {
         accepted.set_value(std::move(connection));
       }});
  std::promise<std::shared_ptr<Connection>> connected;
  loop->post([&] { connected.set_value(verbs.connect(listener->address(), {.loop = loop})); });
  auto near = connected.get_future().get();
  auto far = accepted.get_future().get();
  std::promise<std::vector<int>> ports;
  loop->post([&] { ports.set_value(fake.ports_in_use()); });
  EXPECT_THAT(ports.get_future().get(), testing::ElementsAre(2, 2));
  const auto end = [&](std::shared_ptr<Connection> lane) {
    lane->close(Error(Blame::Cancelled, "enough"));
    lane.reset();
  };
  end(std::move(near));
  end(std::move(far));
  EXPECT_TRUE(loop->drive([&] { return fake.registrations() == 0; },
                          Deadline::in(std::chrono::seconds(60))));
}

}  // namespace
}  // namespace weft::transport::verbs
