// SPDX-License-Identifier: Apache-2.0
// Behaviour of verbs alone, on a real device of the guest.
#include <array>
#include <cstdlib>
#include <future>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <weft/tests/conformance/connection/connection_pair.h>
#include <weft/tests/harness/leftovers.h>
#include <weft/transport/routes.h>
#include <weft/transport/verbs/queue_pair.h>

namespace weft::conformance {
namespace {

using harness::open_descriptors;
using testing::HasSubstr;

// Both ends of a verbs connection, made with the functions of ConnectionClaims.
struct Verbs {
  Verbs() : harbour(*transport->connector(), far_loop) {}
  std::shared_ptr<Connection> connect() const {
    return transport->connector()->connect(harbour.address(), {near_loop, patience()});
  }

  std::shared_ptr<transport::Transport> transport = transport::open("verbs");
  std::shared_ptr<EventLoop> near_loop = std::make_shared<EventLoop>("near");
  std::shared_ptr<EventLoop> far_loop = std::make_shared<EventLoop>("far");
  Harbour harbour;
};

TEST(Rdma, BackendIsUsableAndDescribesItself) {
  const auto verbs = transport::open("verbs");
  EXPECT_THAT(verbs->describe(), testing::Contains(HasSubstr("used: rxe")));
  EXPECT_THAT(verbs->describe(), testing::Contains(HasSubstr("memory of GPUs: ")));
}

TEST(Rdma, OtherFabricIsRefusedNamingBoth) {
  const auto verbs = transport::open("verbs");
  const auto why = verbs->connector()->why_unreachable("ib/127.0.0.1:1");
  ASSERT_TRUE(why);
  EXPECT_THAT(*why, HasSubstr("InfiniBand"));
  EXPECT_THAT(*why, HasSubstr("RoCE"));
}

TEST(Rdma, IsPreferredToTcp) {
  const transport::Routes all;
  EXPECT_THAT(all.names(), testing::ElementsAre("shm", "verbs", "inproc", "tcp"));
  const auto loop = std::make_shared<EventLoop>("host");
  transport::Routes host({"tcp", "verbs"});
  const auto offers = host.listen({.loop = loop, .interface_address = {}, .accepted = [](auto) {}});
  EXPECT_EQ(all.connect(offers, {loop, patience()})->transport(), "verbs");
  host.close();
}

// Closes the connection after that many turns of its loop.
void close_after(int turns, const std::shared_ptr<EventLoop>& loop,
                 const std::shared_ptr<Connection>& connection) {
  if (turns == 0) return connection->close(Error(Blame::Cancelled, "enough"));
  loop->post([=] { close_after(turns - 1, loop, connection); });
}

// From the moment in which the operation fails, the memory belongs to its owner again.
TEST(Rdma, ClosingStopsWritesToDestinations) {
  Verbs verbs;
  for (const int turns : {1, 3, 10, 30}) {
    const auto near = verbs.connect();
    const auto far = verbs.harbour.next();
    ASSERT_TRUE(far);
    Mailbox near_mail(*near, verbs.near_loop);
    const auto payload = pattern(1, 64 << 20);
    const Op sent = near->send(bytes_of("cut"), std::array{slice_of(payload)}, nullptr, {});
    std::vector<std::byte> got(payload.size());
    std::promise<Op> promised;
    far->receive({[&, far](const Arrival&) {
                    promised.set_value(far->accept(std::array{slice_of(got)}, nullptr, {}));
                    close_after(turns, verbs.far_loop, far);
                  },
                  [](const Error&) {}});
    const Op accepted = promised.get_future().get();
    EXPECT_EQ(failure_of(accepted).blame(), Blame::Cancelled);
    const std::vector<std::byte> then = got;
    EXPECT_EQ(failure_of(sent).blame(), Blame::PeerLost);
    EXPECT_THAT(near_mail.wait_closed().text(), HasSubstr("enough"));
    EXPECT_TRUE(same(got, then)) << turns;
    EXPECT_FALSE(same(got, payload)) << "the payload arrived whole, so nothing was tested";
  }
}

TEST(Rdma, TcpStrangerEndsOnlyItself) {
  Verbs verbs;
  const std::string address = verbs.harbour.address();
  const auto tcp = transport::open("tcp");
  std::vector<std::byte> hello(64, std::byte{0x57});
  for (const auto& words : {std::vector<std::byte>(), std::vector<std::byte>(1), hello,
                            std::vector<std::byte>(60'000)}) {
    const auto stranger = tcp->connector()->connect(address.substr(address.find('/') + 1),
                                                    {verbs.near_loop, patience()});
    Mailbox mail(*stranger, verbs.near_loop);
    stranger->send(words, {}, nullptr, {});
    const auto guest = verbs.harbour.next();
    ASSERT_TRUE(guest);
    Mailbox guest_mail(*guest, verbs.far_loop);
    EXPECT_EQ(guest_mail.wait_closed().blame(), Blame::Protocol);
    mail.wait_closed();
  }
  const auto near = verbs.connect();
  const auto far = verbs.harbour.next();
  ASSERT_TRUE(far);
  Mailbox mail(*far, verbs.far_loop);
  near->send(bytes_of("still here"), {}, nullptr, {});
  EXPECT_EQ(mail.next().header, "still here");
}

TEST(Rdma, ConnectionsLeaveNoDescriptors) {
  Verbs verbs;
  const auto carry = [&] {
    const auto near = verbs.connect();
    auto far = verbs.harbour.next();
    ASSERT_TRUE(far);
    Mailbox near_mail(*near, verbs.near_loop);
    Mailbox far_mail(*far, verbs.far_loop);
    const auto payload = pattern(2, 300 << 10);
    near->send(bytes_of("one"), std::array{slice_of(payload)}, nullptr, {});
    EXPECT_TRUE(same(far_mail.next().payloads.at(0), payload));
    far.reset();
    near_mail.wait_closed();
  };
  carry();
  const std::ptrdiff_t after_one = open_descriptors();  // some may still be closing
  for (int i = 0; i < 20; ++i) carry();
  EXPECT_TRUE(verbs.near_loop->drive([&] { return open_descriptors() <= after_one; }, patience()))
      << open_descriptors() << " descriptors, " << after_one << " after the first connection";
}

// A queue pair by itself, under a real device's rules.
TEST(Rdma, WrongKeyFailsAndWritesNothing) {
  using namespace transport::verbs;
  const auto library = Library::open();
  ASSERT_TRUE(library.ok());
  const Path path = find_path(open_devices(library.value()), Config(), "");
  Completions completions(path.device, 64);
  QueuePair a(path, completions, {16, 16, 64});
  QueuePair b(path, completions, {16, 16, 64});
  const auto hello_of = [&](const QueuePair& pair) {
    Hello hello;
    hello.gid = path.choice.gid.bytes;
    hello.queue_pair = pair.number();
    hello.packet = pair.first_packet();
    hello.mtu_bytes = static_cast<std::uint32_t>(path.choice.port.mtu_bytes);
    return hello;
  };
  a.join(hello_of(b));
  b.join(hello_of(a));
  std::vector<std::byte> from(8192, std::byte{1});
  std::vector<std::byte> to(8192);
  const Registration local(path.device, slice_of(from), Access::Read);
  const Registration remote(path.device, slice_of(to), Access::RemoteWrite);
  const auto write = [&](std::uint32_t key) {
    EXPECT_TRUE(a.post_write(7, {from.data(),
                                 8192,
                                 local.local_key(),
                                 reinterpret_cast<std::uintptr_t>(to.data()),
                                 key,
                                 {}}));
    std::array<ibv_wc, 1> room{};
    const Deadline deadline = patience();
    while (completions.poll(room).empty()) {
      if (deadline.passed()) break;
    }
    return room[0];
  };
  EXPECT_EQ(write(remote.remote_key()).status, IBV_WC_SUCCESS);
  EXPECT_TRUE(same(to, from));
  to.assign(to.size(), {});
  const ibv_wc refused = write(remote.remote_key() ^ 0x5a);
  EXPECT_EQ(refused.status, IBV_WC_REM_ACCESS_ERR);
  const Error error = error_of(*library.value(), refused, "somebody");
  EXPECT_EQ(error.blame(), Blame::PeerLost);
  EXPECT_EQ(error.native_code(), IBV_WC_REM_ACCESS_ERR);
  EXPECT_THAT(error.text(), HasSubstr("somebody failed: remote access error"));
  EXPECT_TRUE(same(to, std::vector<std::byte>(to.size())));
}

// Two devices and a cable between them, which verbs.sh has set up. cut() makes it lose all packets
// in both directions. The kernel keeps both ports up, as with a switch between them.
class VerbsCable : public testing::Test {
 protected:
  static void cut() {
    for (const char* end : {"va", "vb"}) {
      ASSERT_EQ(
          std::system(
              ("/bin/tc qdisc replace dev " + std::string(end) + " root netem loss 100%").c_str()),
          0);
    }
  }
  void TearDown() override {
    for (const char* end : {"va", "vb"}) {
      EXPECT_EQ(std::system(("/bin/tc qdisc del dev " + std::string(end) + " root").c_str()), 0);
    }
  }
};

TEST_F(VerbsCable, CutWhileClosingDoesNotBlock) {
  Verbs verbs;
  const auto near = verbs.connect();
  const auto far = verbs.harbour.next();
  ASSERT_TRUE(far);
  Mailbox mail(*near, verbs.near_loop);
  near->send(bytes_of("first"), {}, nullptr, {});
  Mailbox far_mail(*far, verbs.far_loop);
  EXPECT_EQ(far_mail.next().header, "first");
  cut();
  near->close(Error(Blame::Cancelled, "enough"));
  EXPECT_EQ(mail.wait_closed().blame(), Blame::Cancelled);
}

TEST_F(VerbsCable, CutBeforeConnectingTimesOut) {
  Verbs verbs;
  const std::string address = verbs.harbour.address();
  cut();
  const auto near = verbs.transport->connector()->connect(
      address, {verbs.near_loop, Deadline::in(std::chrono::milliseconds(500))});
  Mailbox mail(*near, verbs.near_loop);
  EXPECT_EQ(mail.wait_closed().blame(), Blame::Timeout);
}

}  // namespace
}  // namespace weft::conformance
