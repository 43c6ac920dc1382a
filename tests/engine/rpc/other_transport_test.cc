// SPDX-License-Identifier: Apache-2.0
// Workers that cannot connect over the preferred transport use the next one.
#include <cerrno>
#include <fstream>
#include <ostream>
#include <string>
#include <system_error>
#include <utility>
#include <vector>

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sched.h>
#include <sys/wait.h>
#include <unistd.h>

#include <torch/csrc/distributed/c10d/HashStore.hpp>

#include <weft/base/descriptor.h>
#include <weft/tests/engine/rpc/workers.h>
#include <weft/transport/shm/address.h>

namespace elsewhere {

int add(int a, int b) { return a + b; }
int make() { return 7; }

}  // namespace elsewhere

namespace weft {
namespace {

using harness::error_of;
using harness::Processes;

// Makes this process, which has one thread, the root of its own user namespace. Returns an errno,
// or 0.
int enter_user_namespace() {
  const std::string user = "0 " + std::to_string(::geteuid()) + " 1",
                    group = "0 " + std::to_string(::getegid()) + " 1";
  if (::unshare(CLONE_NEWUSER) != 0) return errno;
  for (const auto& [file, text] : {std::pair("setgroups", std::string("deny")),
                                   std::pair("uid_map", user), std::pair("gid_map", group)}) {
    std::ofstream out(std::string("/proc/self/") + file);
    out << text << std::flush;
    if (!out) return EPERM;
  }
  return 0;
}

int become_another_user() {
  constexpr uid_t kOther = 12345;
  return ::setresgid(kOther, kOther, kOther) == 0 && ::setresuid(kOther, kOther, kOther) == 0
             ? 0
             : errno;
}

using Change = int (*)();

// Runs `change` in a child process and returns its errno.
int tried(Change change) {
  const pid_t child = ::fork();
  if (child == 0) ::_exit(change());
  int status = 0;
  ::waitpid(child, &status, 0);
  return WIFEXITED(status) ? WEXITSTATUS(status) : EPERM;
}

struct Case {
  const char* name;
  std::vector<Change> changes;  // of each worker; null changes nothing
};
void PrintTo(const Case& one, std::ostream* out) { *out << one.name; }

class WorkersOfOneHost : public testing::TestWithParam<Case> {};

TEST_P(WorkersOfOneHost, IsolatedOnesCallEachOtherByTcp) {
  for (const Change change : GetParam().changes) {
    if (const int number = change == nullptr ? 0 : tried(change)) {
      GTEST_SKIP() << "this process may not do that: " << std::generic_category().message(number);
    }
  }
  Processes processes(2, [](int rank) {
    if (const Change change = GetParam().changes[static_cast<std::size_t>(rank)])
      ASSERT_EQ(change(), 0);
    rpc::Agent agent = rpc::init("worker" + std::to_string(rank));
    const int other = 1 - rank;
    EXPECT_EQ(agent.sync<&elsewhere::add>(other, 1, 2), 3);
    EXPECT_EQ(agent.remote<&elsewhere::make>(other).to_here(), 7);
    EXPECT_EQ(agent.transport_to(other), "tcp");
    agent.shutdown();
  });
  processes.expect_success();
}

INSTANTIATE_TEST_SUITE_P(Rpc, WorkersOfOneHost,
                         testing::Values(Case{"NamespaceEach",
                                              {&enter_user_namespace, &enter_user_namespace}},
                                         Case{"NamespaceOfOne", {nullptr, &enter_user_namespace}},
                                         Case{"AnotherUser", {nullptr, &become_another_user}}),
                         [](const auto& one) { return one.param.name; });

// Publishes a wrong descriptor for worker 1, so that connecting over shared memory fails and no
// check detects it before.
class WrongDescriptors final : public c10d::HashStore {
 public:
  void set(const std::string& key, const std::vector<std::uint8_t>& value) override {
    std::string text(value.begin(), value.end());
    const auto host = transport::shm::Address::here();
    const std::string begin =
        host.host + "/" + host.processes + "/" + std::to_string(host.process) + "/";
    if (key.ends_with("worker/1")) {
      for (auto at = text.find(begin); at != std::string::npos; at = text.find(begin, at + 1)) {
        for (auto digit = at + begin.size();
             digit < text.size() && text[digit] >= '0' && text[digit] <= '9'; ++digit) {
          text[digit] = '9';
        }
      }
    }
    c10d::HashStore::set(key, {text.begin(), text.end()});
  }
};

TEST(WorkersByShm, UseTcpAfterShmHasFailed) {
  // Gives the workers' descriptors two digits: their replacement, 99, is not open.
  std::vector<Descriptor> lower;
  while (lower.empty() || lower.back().get() < 10)
    lower.emplace_back(::open("/dev/null", O_RDONLY | O_CLOEXEC));
  const auto store = c10::make_intrusive<WrongDescriptors>();
  harness::run_threads(2, [&](int rank) {
    rpc::Agent agent =
        rpc::init("worker" + std::to_string(rank),
                  {.rank = rank, .world_size = 2, .store = store, .transports = {"shm", "tcp"}});
    if (rank == 0) {
      const Error first = error_of([&] { agent.sync<&elsewhere::add>("worker1", 1, 2); });
      EXPECT_EQ(first.blame(), Blame::PeerLost) << first.what();
      // Calls may use that connection until its end is known.
      EXPECT_TRUE(harness::comes_true([&] {
        try {
          return agent.sync<&elsewhere::add>("worker1", 1, 2) == 3;
        } catch (const Error& error) {
          EXPECT_EQ(error.blame(), Blame::PeerLost) << error.what();
          return false;
        }
      }));
      EXPECT_EQ(agent.transport_to("worker1"), "tcp");
      EXPECT_EQ(agent.remote<&elsewhere::make>("worker1").to_here(), 7);
    }
    agent.shutdown();
  });
}

}  // namespace
}  // namespace weft
