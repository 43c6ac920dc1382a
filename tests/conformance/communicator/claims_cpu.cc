// The claims for what needs no GPU: Gloo on the host, Gloo through pinned memory and NCCL on fake GPUs.
#include <weft/tests/conformance/communicator/host_ranks.h>
#include <weft/tests/conformance/communicator/threads.h>
#include <weft/transport/registry.h>

#ifdef WEFT_TEST_FAKE_CUDA
#include <weft/cuda/retire.h>
#include <weft/tests/conformance/communicator/cuda_ranks.h>
#include <weft/tests/harness/fake_driver.h>
#include <weft/transport/staged.h>
#endif
#ifdef WEFT_TEST_FAKE_NCCL
#include <weft/tests/harness/fake_nccl.h>
#include <weft/transport/nccl/nccl_communicator.h>
#endif

namespace weft::conformance {
namespace {

constexpr int kRanks = 3;  // two would not show an order, four take longer

class GlooOnHost final : public Threads {
 public:
  GlooOnHost() : Threads(kRanks) {}
  std::string name() const override { return "Gloo"; }
  bool sees_peers_end() const override { return true; }
  void run(std::chrono::milliseconds timeout, const std::function<void(Rank&)>& body) const override {
    const auto gloo = transport::open("gloo");
    const auto join = [&](Rank& rank) {
      equip_host(rank);
      rank.communicator = gloo->join(options_for(rank, timeout));
    };
    run_ranks(join, body);
  }
};

#ifdef WEFT_TEST_FAKE_CUDA
// Ranks that are threads with a fake GPU each.
class FakeGpus : public Threads {
 public:
  FakeGpus() : Threads(kRanks) {}
  void run(std::chrono::milliseconds timeout, const std::function<void(Rank&)>& body) const override {
    harness::FakeDriver fake({.devices = kRanks, .threads = true});
    std::vector<std::shared_ptr<cuda::Device>> devices;
    for (int rank = 0; rank < kRanks; ++rank) devices.push_back(cuda::Device::open(fake.driver(), rank));
    run_on(fake, devices, timeout, body);
    for (auto& device : devices) reclaim(std::move(device));
  }

 protected:
  using Devices = std::vector<std::shared_ptr<cuda::Device>>;
  virtual void run_on(harness::FakeDriver& fake, const Devices& devices, std::chrono::milliseconds timeout,
                      const std::function<void(Rank&)>& body) const = 0;

  static const std::shared_ptr<cuda::Device>& device_of(const Devices& devices, const Rank& rank) {
    return devices[static_cast<std::size_t>(rank.rank)];
  }
};

class GlooStaged final : public FakeGpus {
 public:
  std::string name() const override { return "GlooStaged"; }
  bool sees_peers_end() const override { return true; }

 protected:
  void run_on(harness::FakeDriver&, const Devices& devices, std::chrono::milliseconds timeout,
              const std::function<void(Rank&)>& body) const override {
    const auto gloo = transport::open("gloo");
    const auto join = [&](Rank& rank) {
      equip(rank, device_of(devices, rank));
      rank.communicator =
          transport::staged::over(gloo->join(options_for(rank, timeout)), device_of(devices, rank), rank.loop);
    };
    run_ranks(join, body);
  }
};
#endif

#ifdef WEFT_TEST_FAKE_NCCL
class NcclOnFake final : public FakeGpus {
 public:
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
      rank.communicator = std::make_shared<transport::nccl::NcclCommunicator>(options, nccl.library());
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
#ifdef WEFT_TEST_FAKE_CUDA
  all.push_back(std::make_shared<GlooStaged>());
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
