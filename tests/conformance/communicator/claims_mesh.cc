// The claims for every backend that has connections, and so makes its communicator of them: with threads and with processes
// as ranks, on host memory.
#include <weft/tests/conformance/communicator/host_ranks.h>
#include <weft/tests/conformance/communicator/processes.h>
#include <weft/transport/registry.h>

namespace weft::conformance {
namespace {

std::string title(const transport::Backend& backend, const std::string& as, int ranks) {
  std::string name(backend.name);
  name.front() = static_cast<char>(std::toupper(name.front()));
  return name + as + std::to_string(ranks);
}

// Why the backend cannot be opened here; empty if it can.
std::string why_closed(const transport::Backend& backend) {
  const auto opened = backend.open();
  return opened ? "" : std::string(backend.name) + ": " + opened.error().text();
}

// verbs is tested in a guest that is emulated, where joining alone takes a second.
std::chrono::milliseconds short_timeout_of(const transport::Backend& backend) {
  return std::chrono::milliseconds(backend.name == "verbs" ? 10'000 : 1500);
}

class MeshThreads final : public Threads {
 public:
  MeshThreads(const transport::Backend& backend, int ranks) : Threads(ranks), backend_(backend) {}
  std::string name() const override { return title(backend_, "Threads", ranks()); }
  std::string why_not() const override { return why_closed(backend_); }
  bool sees_peers_end() const override { return true; }
  std::chrono::milliseconds short_timeout() const override { return short_timeout_of(backend_); }
  void run(std::chrono::milliseconds timeout, const std::function<void(Rank&)>& body) const override {
    const auto join = [&](Rank& rank) {
      equip_host(rank);
      rank.communicator = transport::open(backend_.name)->join(options_for(rank, timeout));
    };
    run_ranks(join, body);
  }

 private:
  const transport::Backend& backend_;
};

class MeshProcesses final : public Processes {
 public:
  MeshProcesses(const transport::Backend& backend, int ranks) : Processes(ranks), backend_(backend) {}
  std::string name() const override { return title(backend_, "Processes", ranks()); }
  bool sees_peers_end() const override { return true; }
  std::chrono::milliseconds short_timeout() const override { return short_timeout_of(backend_); }

  std::string why_not() const override { return why_closed(backend_); }
  void run(std::chrono::milliseconds timeout, const std::function<void(Rank&)>& body) const override {
    const auto join = [&](Rank& rank) {
      equip_host(rank);
      rank.communicator = transport::open(backend_.name)->join(Threads::options_for(rank, timeout));
    };
    run_ranks(join, body);
  }

 private:
  const transport::Backend& backend_;
};

std::vector<std::shared_ptr<Setting>> settings() {
  std::vector<std::shared_ptr<Setting>> all;
  for (const transport::Backend& backend : transport::backends()) {
    const auto opened = backend.open();
    if (opened && opened.value()->connector() == nullptr) continue;
    if (!opened && (backend.name == "gloo" || backend.name == "mpi" || backend.name == "nccl")) continue;
    for (const int ranks : {1, 2, 3, 4}) all.push_back(std::make_shared<MeshThreads>(backend, ranks));
    if (backend.name == "inproc") continue;  // within a process by its nature
    for (const int ranks : {2, 3, 4}) all.push_back(std::make_shared<MeshProcesses>(backend, ranks));
  }
  return all;
}

INSTANTIATE_TEST_SUITE_P(Mesh, CommunicatorClaims, testing::ValuesIn(settings()), name_of);

}  // namespace
}  // namespace weft::conformance
