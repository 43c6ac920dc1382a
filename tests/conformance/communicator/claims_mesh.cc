// SPDX-License-Identifier: Apache-2.0
// The claims for every backend that has connections, and so makes its communicator of them, and for
// "weft", which chooses one of those for each pair of ranks: with threads and with processes as
// ranks, on host memory. connection_test reports the backends that cannot be opened here.
#include <cstdlib>

#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <weft/tests/conformance/communicator/host_ranks.h>
#include <weft/tests/conformance/communicator/processes.h>
#include <weft/tests/conformance/connection/connection_pair.h>
#include <weft/tests/conformance/connection/leaving.h>

namespace weft::conformance {
namespace {

std::string title(const std::string& backend, const std::string& as, int ranks) {
  std::string name = backend;
  name.front() = static_cast<char>(std::toupper(name.front()));
  return name + as + std::to_string(ranks);
}

// On an emulated machine (tests/guest) joining alone takes a second.
std::chrono::milliseconds short_timeout_here() {
  const char* const given = std::getenv("WEFT_TEST_SHORT_TIMEOUT_MS");
  return std::chrono::milliseconds(given == nullptr ? 1500 : std::atoi(given));
}

class MeshThreads final : public Threads {
 public:
  MeshThreads(std::string backend, int ranks) : Threads(ranks), backend_(std::move(backend)) {}
  std::string name() const override { return title(backend_, "Threads", ranks()); }
  bool sees_peers_end() const override { return true; }
  std::chrono::milliseconds short_timeout() const override { return short_timeout_here(); }
  void run(std::chrono::milliseconds timeout,
           const std::function<void(Rank&)>& body) const override {
    const auto join = [&](Rank& rank) {
      equip_host(rank);
      rank.communicator = transport::open(backend_)->join(options_for(rank, timeout));
    };
    run_ranks(join, body);
  }

 private:
  const std::string backend_;
};

class MeshProcesses final : public Processes {
 public:
  MeshProcesses(std::string backend, int ranks) : Processes(ranks), backend_(std::move(backend)) {}
  std::string name() const override { return title(backend_, "Processes", ranks()); }
  bool sees_peers_end() const override { return true; }
  std::chrono::milliseconds short_timeout() const override { return short_timeout_here(); }
  void run(std::chrono::milliseconds timeout,
           const std::function<void(Rank&)>& body) const override {
    const auto join = [&](Rank& rank) {
      equip_host(rank);
      rank.communicator = transport::open(backend_)->join(Threads::options_for(rank, timeout));
    };
    run_ranks(join, body);
  }

 private:
  const std::string backend_;
};

constexpr uid_t kOtherUser = 12345;

bool become_other_user() {
  // The kernel closes the /proc of a process that changes its user, until it says that it may be
  // dumped.
  return ::setresgid(kOtherUser, kOtherUser, kOtherUser) == 0 &&
         ::setresuid(kOtherUser, kOtherUser, kOtherUser) == 0 && ::prctl(PR_SET_DUMPABLE, 1) == 0;
}

// Two users on one host with two ranks each: the ranks of one user reach each other by shm, those
// of different users by tcp.
class RanksOfTwoUsers final : public Processes {
 public:
  RanksOfTwoUsers() : Processes(4) {}
  std::string name() const override { return "WeftOfTwoUsersProcesses4"; }
  bool sees_peers_end() const override { return true; }
  std::chrono::milliseconds short_timeout() const override { return short_timeout_here(); }
  std::string why_not() const override {
    static const bool may = [] {
      const pid_t child = ::fork();
      if (child == 0) ::_exit(become_other_user() ? 0 : 1);
      int status = 1;
      return ::waitpid(child, &status, 0) == child && status == 0;
    }();
    return may ? "" : "this process may not become another user";
  }
  void run(std::chrono::milliseconds timeout,
           const std::function<void(Rank&)>& body) const override {
    const auto join = [&](Rank& rank) {
      if (rank.rank >= 2 && !become_other_user())
        throw Error(Blame::Unsupported, "this rank cannot become another user");
      equip_host(rank);
      rank.communicator = transport::open("weft")->join(Threads::options_for(rank, timeout));
      for (int peer = 0; peer < rank.size; ++peer) {
        if (peer == rank.rank) continue;
        const bool is_same_user = peer / 2 == rank.rank / 2;
        EXPECT_EQ(rank.communicator->transport(peer), is_same_user ? "shm" : "tcp")
            << "from rank " << rank.rank << " to rank " << peer;
      }
    };
    run_ranks(join, body);
  }
};

std::vector<std::shared_ptr<Setting>> settings() {
  std::vector<std::shared_ptr<Setting>> all;
  for (const std::string& backend : connecting_backends()) {
    for (const int ranks : {1, 2, 3, 4})
      all.push_back(std::make_shared<MeshThreads>(backend, ranks));
    if (why_within_the_process(backend)) continue;
    for (const int ranks : {2, 3, 4})
      all.push_back(std::make_shared<MeshProcesses>(backend, ranks));
  }
  // "weft" uses the others.
  all.push_back(std::make_shared<MeshThreads>("weft", 3));
  all.push_back(std::make_shared<MeshProcesses>("weft", 3));
  all.push_back(std::make_shared<RanksOfTwoUsers>());
  return all;
}

INSTANTIATE_TEST_SUITE_P(Mesh, CommunicatorClaims, testing::ValuesIn(settings()), name_of);

}  // namespace
}  // namespace weft::conformance
