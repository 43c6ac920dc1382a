// SPDX-License-Identifier: Apache-2.0
// CUDA IPC between two processes on a real GPU. (cuda_ipc_test and connection_ipc_test check it on
// fake GPUs, where one fake driver plays two processes.)
#include <array>
#include <cstdlib>

#include <weft/engine/launch/process.h>
#include <weft/tests/conformance/communicator/cuda_ranks.h>
#include <weft/tests/conformance/connection/connection_pair.h>
#include <weft/tests/harness/file_bootstrap.h>
#include <weft/tests/harness/folder.h>
#include <weft/tests/harness/start_again.h>
#include <weft/transport/cuda_ipc/cuda_ipc.h>
#include <weft/transport/staged/staged_connection.h>

namespace weft::conformance {
namespace {

constexpr const char* kFolderVariable = "WEFT_CLAIMS_FOLDER";
// Drivers give memory that is allocated after a round of 4 MiB the addresses of the memory freed
// after that round.
constexpr std::array<std::size_t, 8> kSizes{1,        65'537,   1u << 20, (5u << 20) + 13,
                                            4u << 20, 4u << 20, 4u << 20, 3};

std::vector<std::byte> word(const std::string& text) {
  const auto bytes = bytes_of(text);
  return {bytes.begin(), bytes.end()};
}

// One of the two processes: its GPU, a shm connection to the other, and the CUDA IPC connection
// over it.
class End {
 public:
  explicit End(const std::string& folder)
      : store(folder), device_(cuda::Device::open(real_driver().value(), 0)) {
    equip(bench, device_, OnDevice::Shareable);
    stage_ = std::make_shared<transport::staged::Stage>(std::vector{device_});
  }
  ~End() {
    pair.reset();
    stage_.reset();
    bench = {};
    reclaim(std::move(device_));
  }
  End(const End&) = delete;
  End& operator=(const End&) = delete;

  void listen() {
    Harbour harbour(*shm_->connector(), loop);
    store.set("address", word(harbour.address()));
    take(harbour.next());
  }
  void connect() {
    const auto bytes = store.get("address", patience());
    const std::string address(reinterpret_cast<const char*>(bytes.data()), bytes.size());
    take(shm_->connector()->connect(address, {loop, patience()}));
  }
  void wait_for_message() {
    const int wanted = ++seen_;
    EXPECT_TRUE(loop->drive([&] { return *come_ >= wanted; }, patience())) << "nothing arrives";
  }

  harness::FileBootstrap store;
  std::shared_ptr<EventLoop> loop = std::make_shared<EventLoop>("end");
  Rank bench;
  std::shared_ptr<Connection> pair;

 private:
  void take(std::shared_ptr<Connection> below) {
    ASSERT_TRUE(below);
    pair = transport::cuda_ipc::over(transport::staged::over(std::move(below), stage_, loop),
                                     stage_, loop);
    pair->receive({[come = come_](const Arrival&) { ++*come; }, [](const Error&) {}});
  }

  std::shared_ptr<cuda::Device> device_;
  std::shared_ptr<transport::staged::Stage> stage_;
  std::shared_ptr<transport::Transport> shm_ = transport::open("shm");
  std::shared_ptr<std::atomic<int>> come_ = std::make_shared<std::atomic<int>>(0);
  int seen_ = 0;
};

// Sends back each payload, ordered after its copy and without waiting for it.
void echo(const std::string& folder) {
  End end(folder);
  end.listen();
  std::uint32_t round = 0;
  for (const std::size_t bytes : kSizes) {
    const auto memory = end.bench.allocate(bytes);
    end.wait_for_message();
    end.store.set("seen/" + std::to_string(++round), {});
    const Op taken = end.pair->accept(std::array{memory->slice()}, memory, {});
    expect_good(end.pair->send({}, std::array{memory->slice()}, memory, taken.done()));
    expect_good(taken);
  }
  end.store.set("echoed", {});
  end.store.get("enough", patience());
}

void ask(const std::string& folder) {
  End end(folder);
  end.connect();
  EXPECT_EQ(end.pair->transport(), "cuda_ipc");
  std::uint32_t round = 0;
  for (const std::size_t bytes : kSizes) {
    SCOPED_TRACE(bytes);
    const auto payload = pattern(++round, bytes);
    const auto from = end.bench.allocate(bytes), back = end.bench.allocate(bytes);
    const Gate gate = end.bench.gate();
    const Op sent = end.pair->send({}, std::array{from->slice()}, from, gate.fence);
    // A payload sent by CUDA IPC is announced before its bytes are ready; through pinned memory the
    // peer would not have seen it yet. In the first round the handshake may still be under way, and
    // then the payload takes the connection below.
    if (round > 1) end.store.get("seen/" + std::to_string(round), patience());
    EXPECT_FALSE(sent.ended());
    from->write(payload.data());
    gate.open();
    end.wait_for_message();
    expect_good(end.pair->accept(std::array{back->slice()}, back, {}));
    expect_good(sent);
    std::vector<std::byte> got(bytes);
    back->read(got.data());
    EXPECT_TRUE(same(got, payload));
  }
  end.store.set("enough", {});
  end.store.get("echoed", patience());  // leaving earlier would fail the other's last send
}

TEST(CudaIpcOfProcesses, CarriesMemoryOfOneGpuBothWays) {
  if (!real_driver().ok()) GTEST_SKIP() << "no GPU: " << real_driver().error().text();
  if (const char* const folder = std::getenv(kFolderVariable)) return echo(folder);
  const harness::Folder folder;
  const std::string log = folder.path() + "/other.log";
  launch::Children other;
  other.add(harness::start_again(log, {std::string(kFolderVariable) + "=" + folder.path()}));
  ask(folder.path());
  const auto ended = other.wait(std::chrono::minutes(1));
  EXPECT_TRUE(ended.process != 0 && ended.status == 0) << launch::describe_status(ended.status);
  if (HasFailure()) ADD_FAILURE() << "the other process:\n" << harness::text_of_file(log);
}

}  // namespace
}  // namespace weft::conformance
