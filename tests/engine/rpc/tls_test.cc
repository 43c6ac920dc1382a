// SPDX-License-Identifier: Apache-2.0
// Agents whose connections speak TLS, and what becomes of those that do not agree on it. The whole
// program is given a certificate.
#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <functional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <ifaddrs.h>
#include <net/if.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <unistd.h>

#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <torch/types.h>

#include <weft/base/descriptor.h>
#include <weft/engine/call/core.h>
#include <weft/engine/store/address.h>
#include <weft/tests/engine/rpc/workers.h>
#include <weft/tests/harness/tls_environment.h>
#include <weft/transport/tls/plain_text.h>

namespace encrypted {

at::Tensor doubled(const at::Tensor& tensor) { return tensor * 2; }
int times(int a, int b) { return a * b; }
std::atomic<bool> may_call{false};
void let_call() { may_call = true; }

}  // namespace encrypted

namespace weft {
namespace {

using harness::As;
using harness::error_of;
using harness::Processes;
using harness::Setting;
using testing::AllOf;
using testing::HasSubstr;

harness::TlsEnvironment environment;
// Whether agents of this very process have read the environment: forked workers cannot change it
// any more.
bool is_read = false;
constexpr const char* kIsRead = "an earlier test of this process has read the environment";

class RpcTls : public testing::TestWithParam<Setting> {};
INSTANTIATE_TEST_SUITE_P(, RpcTls,
                         testing::Values(Setting{As::Threads, "tcp", 2},
                                         Setting{As::Processes, "tcp", 3}),
                         harness::name_of);

TEST_P(RpcTls, CallsCarryTensors) {
  is_read |= GetParam().as == As::Threads;
  harness::run_workers(GetParam(), [](rpc::Agent& agent) {
    const auto to = harness::after(agent, 1);
    for (const int elements : {1, 100'000, 1'500'000}) {
      const at::Tensor sent = at::full({elements}, agent.self().rank + 1.0);
      EXPECT_TRUE(agent.sync<&encrypted::doubled>(to, sent).equal(sent * 2));
    }
    EXPECT_EQ(agent.transport_to(to), "tcp");
  });
}

// --- Workers that do not agree on TLS ---

void without_tls() {
  for (const char* const name : {"WEFT_TLS_CERT", "WEFT_TLS_KEY", "WEFT_TLS_CA"}) ::unsetenv(name);
}

// Joins two workers, of which worker 1 first changes its environment. Each calls the other: the
// caller's error has its text of `called`, and the log of the other worker the text of `listened`
// (both by the caller's rank).
struct Mismatch {
  std::function<void()> change;
  std::string called[2];
  std::string listened[2];
};

void expect_refused(const Mismatch& mismatch) {
  int ends[2];
  ASSERT_EQ(::pipe2(ends, O_CLOEXEC), 0);
  const Descriptor hears(ends[0]);
  Descriptor says(ends[1]);
  Processes workers(2, [&](int rank) {
    says = Descriptor();
    if (rank == 1) mismatch.change();
    rpc::Agent agent = rpc::init("worker" + std::to_string(rank), {.transports = {"tcp"}});
    const int other = 1 - rank;
    const Error error = error_of([&] { agent.sync<&encrypted::times>(other, 2, 3); });
    EXPECT_EQ(error.blame(), Blame::PeerLost) << error.what();
    EXPECT_THAT(error.text(), AllOf(HasSubstr("worker" + std::to_string(other)),
                                    HasSubstr(mismatch.called[rank])));
    const std::string& listened = mismatch.listened[other];
    EXPECT_TRUE(harness::comes_true([&] {
      const std::string text = harness::LogWatch::current().text();
      return text.find("tcp: refused a connection from 127.0.0.1:") != std::string::npos &&
             text.find(listened) != std::string::npos;
    })) << "worker "
        << rank
        << " does not say why it refuses the other: " << harness::LogWatch::current().text();
    Processes::say("done");
    char none = 0;
    EXPECT_EQ(::read(hears.get(), &none, 1), 0);  // returns once the test closes the other end
    agent.leave();
  });
  for (int rank = 0; rank < 2; ++rank) workers.wait_for(rank, "done");
  says = Descriptor();
  workers.expect_success();
}

TEST(RpcTlsMismatch, PlainTextIsNamedOnBothSides) {
  if (is_read) GTEST_SKIP() << kIsRead;
  namespace tls = transport::tls;
  expect_refused({.change = without_tls,
                  .called = {std::string(tls::kPeerIsPlain), std::string(tls::kPeerSpeaksTls)},
                  .listened = {std::string(tls::kPeerSpeaksTls), std::string(tls::kPeerIsPlain)}});
}

TEST(RpcTlsMismatch, OtherAuthorityIsNamedOnBothSides) {
  if (is_read) GTEST_SKIP() << kIsRead;
  harness::Authority other("another authority");
  const std::string remedy = "that authority as WEFT_TLS_CA";
  expect_refused({.change = [&] { harness::set_environment(other.issue()); },
                  .called = {remedy, remedy},
                  .listened = {"by the alert 'unknown CA'", "by the alert 'unknown CA'"}});
}

TEST(RpcTlsMismatch, OtherNameIsNamedOnBothSides) {
  if (is_read) GTEST_SKIP() << kIsRead;
  const auto files = environment.authority().issue({.names = "DNS:mail.example,IP:10.9.8.7"});
  const std::string names = "is for mail.example, 10.9.8.7";
  expect_refused({.change = [&] { harness::set_environment(files); },
                  .called = {names, "'bad certificate'"},
                  .listened = {"by the alert 'bad certificate'", names}});
}

TEST(RpcTlsMismatch, ExpiredCertificateFailsJoining) {
  if (is_read) GTEST_SKIP() << kIsRead;
  const auto files = environment.authority().issue({.valid_until = -60});
  Processes workers(1, [&](int) {
    harness::set_environment(files);
    const Error error = error_of([] { rpc::init("worker0", {.rank = 0, .world_size = 1}); });
    EXPECT_EQ(error.blame(), Blame::Caller);
    EXPECT_THAT(error.text(), AllOf(HasSubstr("WEFT_TLS_CERT ('" + files.certificate + "')"),
                                    HasSubstr("has expired: issue a new one")));
  });
  workers.expect_success();
}

// --- Workers without TLS and secret ---

// The name of an interface that other machines may reach; "" if this machine has none.
std::string outward_interface() {
  ifaddrs* all = nullptr;
  if (::getifaddrs(&all) != 0) return "";
  std::string name;
  for (const ifaddrs* one = all; one != nullptr && name.empty(); one = one->ifa_next) {
    const bool is_ipv4 = one->ifa_addr != nullptr && one->ifa_addr->sa_family == AF_INET;
    if (is_ipv4 && (one->ifa_flags & IFF_LOOPBACK) == 0 && (one->ifa_flags & IFF_UP) != 0)
      name = one->ifa_name;
  }
  ::freeifaddrs(all);
  return name;
}

// Expects as many warnings of a worker that listens on `interface` twice in one process.
void expect_warnings(const std::string& interface, int warnings,
                     const std::function<void(rpc::Options&)>& change) {
  Processes workers(1, [&](int) {
    rpc::Options options{.rank = 0, .world_size = 1, .transports = {"tcp"}};
    without_tls();
    ::setenv("WEFT_SOCKET_IFNAME", interface.c_str(), 1);
    change(options);
    for (const char* const name : {"first", "second"}) {
      options.store = c10::make_intrusive<c10d::HashStore>();
      rpc::init(name, options).shutdown();
    }
    const std::string danger = "has neither a secret nor TLS: any process that reaches its store";
    const std::string text = harness::LogWatch::current().text();
    int said = 0;
    for (auto at = text.find(danger); at != std::string::npos; at = text.find(danger, at + 1))
      ++said;
    EXPECT_EQ(said, warnings) << text;
    if (warnings == 0) return;
    EXPECT_THAT(text, AllOf(HasSubstr("worker 'first' listens on " +
                                      group::address_of_interface(interface) + " and " + danger),
                            HasSubstr("join its job and call its functions (rpc::Options::secret; "
                                      "WEFT_TLS_CERT)")));
  });
  workers.expect_success();
}

TEST(RpcOpen, WorkerThatOthersReachWarnsOnce) {
  if (is_read) GTEST_SKIP() << kIsRead;
  const std::string interface = outward_interface();
  if (interface.empty()) GTEST_SKIP() << "this machine has the loopback interface only";
  expect_warnings(interface, 1, [](rpc::Options&) {});
  expect_warnings(interface, 0, [](rpc::Options& options) { options.secret = "sixteen and mine"; });
  expect_warnings(interface, 0, [](rpc::Options& options) { options.transports = {"shm"}; });
  expect_warnings(interface, 0,
                  [](rpc::Options&) { harness::set_environment(environment.authority().issue()); });
  expect_warnings("lo", 0, [](rpc::Options&) {});
}

// --- Strangers ---

// Sockets that connect to an agent's port: every second one begins a handshake, and none ends it.
std::vector<Descriptor> half_open(const rpc::Agent& agent, std::size_t count) {
  const auto offers = agent.shared_core()->directory().find(agent.self().rank).offers;
  const std::string host = "127.0.0.1:";
  const std::string& address = offers.at(0).address;
  const int port = std::atoi(address.c_str() + address.find(host) + host.size());
  const auto there = group::socket_address("127.0.0.1", port);
  constexpr std::string_view kHello("\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", 11);
  std::vector<Descriptor> strangers;
  while (strangers.size() < count) {
    Descriptor one(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
    EXPECT_EQ(::connect(one.get(), there.get(), there.length), 0);
    if (strangers.size() % 2 == 0) ::send(one.get(), kHello.data(), kHello.size(), MSG_NOSIGNAL);
    strangers.push_back(std::move(one));
  }
  return strangers;
}

TEST(RpcTlsStrangers, HalfOpenConnectionsKeepNobodyOut) {
  constexpr std::size_t kMany = 1'000;
  constexpr rlim_t kDescriptors = 2 * kMany + 400;
  rlimit limit{};
  ::getrlimit(RLIMIT_NOFILE, &limit);
  limit.rlim_cur = std::max(limit.rlim_cur, std::min(limit.rlim_max, kDescriptors));
  if (limit.rlim_cur < kDescriptors || ::setrlimit(RLIMIT_NOFILE, &limit) != 0)
    GTEST_SKIP() << "this process may not have as many descriptors";
  is_read = true;
  harness::run_workers({As::Threads, "tcp", 2}, [&](rpc::Agent& agent) {
    const int other = 1 - agent.self().rank;
    std::vector<Descriptor> strangers;
    if (other == 1) {
      strangers = half_open(agent, kMany);
      agent.sync<&encrypted::let_call>(other);
    }
    EXPECT_TRUE(harness::comes_true([] { return encrypted::may_call.load(); }));
    EXPECT_EQ(agent.sync<&encrypted::times>(other, 2, 3), 6);  // its first call, if it is worker 1
    agent.shutdown({.timeout = std::chrono::seconds(30)});
  });
}

}  // namespace
}  // namespace weft
