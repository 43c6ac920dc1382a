// SPDX-License-Identifier: Apache-2.0
// The claims for the settings that need no GPU: Gloo on the host, with threads and with processes;
// Gloo through pinned memory and NCCL, both on fake GPUs.
#include <weft/tests/conformance/communicator/host_ranks.h>
#include <weft/tests/conformance/communicator/processes.h>
#include <weft/transport/registry.h>

#ifdef WEFT_TEST_FAKE_CUDA
#include <weft/tests/conformance/communicator/fake_gpus.h>
#endif
#ifdef WEFT_TEST_FAKE_NCCL
#include <weft/cuda/retire.h>
#include <weft/tests/harness/fake_nccl.h>
#include <weft/transport/nccl/nccl_communicator.h>
#endif

namespace weft::conformance {
namespace {

constexpr int kRanks = 3;  // two ranks would not reveal an order, four take longer

class GlooOnHost final : public Threads {
 public:
  GlooOnHost() : Threads(kRanks) {}
  std::string name() const override { return "Gloo"; }
  bool sees_peers_end() const override { return true; }
  void run(std::chrono::milliseconds timeout,
           const std::function<void(Rank&)>& body) const override {
    const auto gloo = transport::open("gloo");
    const auto join = [&](Rank& rank) {
      equip_host(rank);
      rank.communicator = gloo->join(options_for(rank, timeout));
    };
    run_ranks(join, body);
  }
};

class GlooProcesses final : public Processes {
 public:
  GlooProcesses() : Processes(kRanks) {}
  std::string name() const override { return "GlooProcesses"; }
  bool sees_peers_end() const override { return true; }
  void run(std::chrono::milliseconds timeout,
           const std::function<void(Rank&)>& body) const override {
    const auto join = [&](Rank& rank) {
      equip_host(rank);
      rank.communicator = transport::open("gloo")->join(Threads::options_for(rank, timeout));
    };
    run_ranks(join, body);
  }
};

#ifdef WEFT_TEST_FAKE_NCCL
class NcclOnFake final : public FakeGpus {
 public:
  NcclOnFake() : FakeGpus(kRanks) {}
  std::string name() const override { return "NcclOnFake"; }

 protected:
  void run_on(harness::FakeDriver& fake, const Devices& devices, std::chrono::milliseconds timeout,
              const std::function<void(Rank&)>& body) const override {
    harness::FakeNccl nccl(fake);
    const auto join = [&](Rank& rank) {
      equip(rank, device_of(devices, rank));
      auto options = options_for(rank, timeout);
      options.cuda = device_of(devices, rank);
      options.device = options.cuda->id();
      rank.communicator =
          std::make_shared<transport::nccl::NcclCommunicator>(options, nccl.library());
    };
    run_ranks(join, body);
    for (const auto& device : devices) {
      EXPECT_TRUE(device->retirement().reclaim_all(Deadline::in(std::chrono::seconds(20))));
    }
  }
};
#endif

std::vector<std::shared_ptr<Setting>> settings() {
  std::vector<std::shared_ptr<Setting>> all;
#ifdef WEFT_TEST_GLOO
  all.push_back(std::make_shared<GlooOnHost>());
  all.push_back(std::make_shared<GlooProcesses>());
#ifdef WEFT_TEST_FAKE_CUDA
  all.push_back(std::make_shared<Staged>("gloo", kRanks));
#endif
#endif
#ifdef WEFT_TEST_FAKE_NCCL
  all.push_back(std::make_shared<NcclOnFake>());
#endif
  return all;
}

INSTANTIATE_TEST_SUITE_P(Cpu, CommunicatorClaims, testing::ValuesIn(settings()), name_of);

}  // namespace
}  // namespace weft::conformance
