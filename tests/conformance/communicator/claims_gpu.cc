// SPDX-License-Identifier: Apache-2.0
// The claims on a real GPU: Gloo through pinned memory, NCCL with one rank, and NCCL with two ranks
// on one GPU. NCCL accepts the latter only from processes that appear to be on different hosts.
#include <weft/tests/conformance/communicator/cuda_ranks.h>
#include <weft/tests/conformance/communicator/threads.h>
#include <weft/tests/harness/again.h>
#include <weft/tests/harness/file_bootstrap.h>
#include <weft/transport/registry.h>
#include <weft/transport/staged/staged_communicator.h>

namespace weft::conformance {
namespace {

std::string no_gpu() { return real_driver().ok() ? "" : "no GPU: " + real_driver().error().text(); }

std::string no_backend(const char* name) {
  if (const std::string reason = no_gpu(); !reason.empty()) return reason;
  try {
    transport::open(name);
    return {};
  } catch (const Error& error) {
    return error.text();
  }
}

// Time limit for joining while processes take turns on the GPU.
constexpr auto kShortOnGpu = std::chrono::seconds(8);

class GlooOnGpu final : public Threads {
 public:
  GlooOnGpu() : Threads(2) {}
  std::string name() const override { return "GlooOnGpu"; }
  std::chrono::milliseconds short_timeout() const override { return kShortOnGpu; }
  std::string why_not() const override { return no_backend("gloo"); }
  bool sees_peers_end() const override { return true; }
  void run(std::chrono::milliseconds timeout,
           const std::function<void(Rank&)>& body) const override {
    auto device = cuda::Device::open(real_driver().value(), 0);
    const auto gloo = transport::open("gloo");
    const auto join = [&](Rank& rank) {
      equip(rank, device);
      rank.communicator =
          transport::staged::over(gloo->join(options_for(rank, timeout)), device, rank.loop);
    };
    run_ranks(join, body);
    reclaim(std::move(device));
  }
};

std::shared_ptr<Communicator> join_nccl(transport::JoinOptions options,
                                        const std::shared_ptr<cuda::Device>& device) {
  options.cuda = device;
  options.device = device->id();
  return transport::open("nccl")->join(options);
}

class NcclAlone final : public Threads {
 public:
  NcclAlone() : Threads(1) {}
  std::string name() const override { return "NcclAlone"; }
  std::chrono::milliseconds short_timeout() const override { return kShortOnGpu; }
  std::string why_not() const override { return no_backend("nccl"); }
  void run(std::chrono::milliseconds timeout,
           const std::function<void(Rank&)>& body) const override {
    auto device = cuda::Device::open(real_driver().value(), 0);
    const auto join = [&](Rank& rank) {
      equip(rank, device);
      rank.communicator = join_nccl(options_for(rank, timeout), device);
    };
    run_ranks(join, body);
    reclaim(std::move(device));
  }
};

// Two ranks on one GPU.
class NcclProcesses final : public Threads {
 public:
  NcclProcesses() : Threads(kRanks) {}
  std::string name() const override { return "NcclProcesses"; }
  std::chrono::milliseconds short_timeout() const override { return kShortOnGpu; }
  std::string why_not() const override { return no_backend("nccl"); }

  void run(std::chrono::milliseconds timeout,
           const std::function<void(Rank&)>& body) const override {
    again_.run([&](int number, const std::string& folder) {
      auto device = cuda::Device::open(real_driver().value(), 0);
      {
        Rank rank;
        rank.rank = number;
        rank.size = kRanks;
        rank.store = std::make_shared<harness::FileBootstrap>(folder);
        rank.loop = std::make_shared<EventLoop>("rank " + std::to_string(number));
        equip(rank, device);
        rank.communicator = join_nccl(options_for(rank, timeout), device);
        body(rank);
        leave(rank);
      }
      reclaim(std::move(device));
    });
  }

 private:
  static constexpr int kRanks = 2;

  // Without shared memory, and with no network but the loopback, as between two hosts.
  static std::vector<std::string> environment_of(int rank) {
    return {"NCCL_HOSTID=rank" + std::to_string(rank),
            "NCCL_SOCKET_IFNAME=lo",
            "NCCL_NET=Socket",
            "NCCL_IB_DISABLE=1",
            "NCCL_NVLS_ENABLE=0",
            "NCCL_MAX_NCHANNELS=1",
            "NCCL_ALGO=Ring",
            "NCCL_PROTO=Simple",
            "NCCL_RAS_ENABLE=0",
            "CUDA_MODULE_LOADING=EAGER"};
  }

  // A rank whose peer has died may spin for ever; the limit ends it.
  mutable harness::Again again_{
      kRanks, "/NcclProcesses", {.variables = environment_of, .limit = std::chrono::seconds(100)}};
};

// GoogleTest calls this again for each claim; the ranks of NcclProcesses are started once for all.
const std::vector<std::shared_ptr<Setting>>& settings() {
  static const std::vector<std::shared_ptr<Setting>> all{std::make_shared<GlooOnGpu>(),
                                                         std::make_shared<NcclAlone>(),
                                                         std::make_shared<NcclProcesses>()};
  return all;
}

INSTANTIATE_TEST_SUITE_P(Gpu, CommunicatorClaims, testing::ValuesIn(settings()), name_of);

}  // namespace
}  // namespace weft::conformance
