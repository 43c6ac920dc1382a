// SPDX-License-Identifier: Apache-2.0
#include <functional>
#include <utility>
#include <vector>

#include <ATen/ops/zeros.h>
#include <torch/csrc/distributed/c10d/HashStore.hpp>

#include <weft/base/make_error.h>
#include <weft/cuda/fence.h>
#include <weft/cuda/ipc.h>
#include <weft/cuda/retire.h>
#include <weft/engine/store/store.h>
#include <weft/profiling/bench/gpu_nccl.h>
#include <weft/profiling/bench/workers.h>
#include <weft/transport/nccl/library.h>
#include <weft/transport/registry.h>
#include <weft/weft.h>

namespace weft::bench {

namespace {

constexpr int kCalls = 100;  // calls between two waits for the device

using transport::nccl::Library;

void wait_for(const cuda::StreamRef& stream) {
  if (!cuda::record(stream).synchronize()) broken("a fence without a deadline timed out");
}

// A communicator of one rank as a program without Weft would make it.
class RawNccl {
 public:
  RawNccl(std::shared_ptr<const Library> library, cuda::Device& device)
      : library_(std::move(library)), stream_(device) {
    const cuda::DeviceGuard guard(device);
    ncclUniqueId id{};
    check(library_->get_unique_id(&id), "ncclGetUniqueId");
    ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
    check(library_->comm_init_rank_config(&comm_, 1, id, 0, &config), "ncclCommInitRankConfig");
  }
  ~RawNccl() { library_->comm_destroy(comm_); }
  RawNccl(const RawNccl&) = delete;
  RawNccl& operator=(const RawNccl&) = delete;

  void all_reduce(const Slice& word) {
    check(library_->all_reduce(word.data, word.data, 1, ncclFloat32, ncclSum, comm_,
                               stream_.native()),
          "ncclAllReduce");
  }
  // Calls it like a program that computes meanwhile: after the work that its stream has computed,
  // and before the work that follows there.
  void all_reduce_between_events(const Slice& word, const cuda::StreamRef& computing) {
    const cuda::DeviceGuard guard(stream_.device());
    ready_.record(computing);
    ready_.wait(stream_);
    all_reduce(word);
    done_.record(stream_);
    done_.wait(computing);
  }
  void wait() { wait_for(stream_); }

 private:
  void check(ncclResult_t result, const char* what) const {
    if (result != ncclSuccess) throw transport::nccl::error_of(*library_, result, what);
  }

  std::shared_ptr<const Library> library_;
  cuda::Stream stream_;
  cuda::Event ready_{stream_.device()}, done_{stream_.device()};
  ncclComm_t comm_ = nullptr;
};

struct Caller {
  std::string name;
  std::function<void()> call;
  std::function<void()> wait;
};

void compare(Report& report, const std::string& name, const std::vector<Caller>& callers) {
  std::vector<Samples> samples(callers.size());
  for (int run = -1; run < report.runs(); ++run) {
    for (std::size_t i = 0; i < callers.size(); ++i) {
      const double start = now();
      for (int call = 0; call < kCalls; ++call) callers[i].call();
      const double took = now() - start;
      callers[i].wait();
      if (run >= 0) samples[i].add(took / kCalls);
    }
  }
  for (std::size_t i = 0; i < callers.size(); ++i) {
    report.add(time_row(name, callers[i].name, sizeof(float), samples[i], 1e6, "us"));
  }
}

}  // namespace

void bench_nccl(Report& report, const std::shared_ptr<cuda::Device>& device) {
  const std::string name = "nccl all_reduce of one rank";
  if (!report.wants(name)) return;
  auto library = Library::open();
  if (!library.ok()) return report.note(name + ": " + library.error().text());
  const auto word = std::make_shared<cuda::ShareableMemory>(*device, sizeof(float));
  RawNccl raw(library.value(), *device);

  const auto loop = std::make_shared<EventLoop>("bench");
  cuda::Stream stream(*device);
  transport::JoinOptions options;
  options.group_name = "bench";
  options.store = std::make_shared<group::StoreBootstrap>(c10::make_intrusive<c10d::HashStore>());
  options.device = device->id();
  options.cuda = device;
  options.timeout = std::chrono::minutes(1);
  options.loop = loop;
  auto communicator = transport::open("nccl")->join(options);

  ProcessGroup group = init_process_group({.backend = "nccl",
                                           .rank = 0,
                                           .world_size = 1,
                                           .store = c10::make_intrusive<c10d::HashStore>(),
                                           .device = c10::Device(c10::kCUDA, 0)});
  const at::Tensor tensor = at::zeros({1}, at::TensorOptions(c10::Device(c10::kCUDA, 0)));

  compare(report, name,
          {{"NCCL", [&] { raw.all_reduce(word->slice()); }, [&] { raw.wait(); }},
           {"NCCL between events", [&] { raw.all_reduce_between_events(word->slice(), stream); },
            [&] { wait_for(stream); }},
           {"weft communicator",
            [&] {
              const Op op = communicator->all_reduce({word->slice(), Dtype::Float32}, ReduceOp::Sum,
                                                     word, cuda::record(stream));
              op.done().wait(stream);
            },
            [&] { wait_for(stream); }},
           {"weft ProcessGroup", [&] { group.all_reduce(tensor).wait(); },
            [&] { group.barrier().wait(); }}});
}

}  // namespace weft::bench
