// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <map>
#include <sstream>
#include <vector>

#include <c10/cuda/CUDAStream.h>
#include <torch/torch.h>

#include <weft/profiling/bench/gpu_rpc.h>
#include <weft/profiling/bench/workers.h>
#include <weft/weft.h>

namespace weft::bench {

namespace {

struct Case {
  std::size_t bytes;
  int calls;  // calls in one sample
  int samples;
};
constexpr Case kCases[] = {{64, 200, 20}, {1 << 20, 50, 20}, {256 << 20, 2, 10}};

at::Tensor last_of(at::Tensor tensor) { return tensor.slice(0, tensor.size(0) - 1).clone(); }

void wait_for(const c10::Device& device) {
  if (device.is_cuda()) c10::cuda::getCurrentCUDAStream(device.index()).synchronize();
}

// The same in Python, as a string, because packed programs include no sources. Arguments: device,
// then bytes, calls and samples of each case.
constexpr const char* kPython = R"(
import os, sys, time, torch
import torch.distributed.rpc as rpc

device, cases = torch.device(sys.argv[1]), [map(int, case.split(",")) for case in sys.argv[2:]]
rank = int(os.environ["RANK"])

def last_of(tensor):
    return tensor[-1:].clone()

options = rpc.TensorPipeRpcBackendOptions()
if device.type == "cuda":
    options.set_device_map(f"worker{1 - rank}", {device: device})
rpc.init_rpc(f"worker{rank}", rank=rank, world_size=2, rpc_backend_options=options)
for size, calls, samples in cases if rank == 0 else []:
    print(size, end=" ")
    tensor = torch.ones(size // 4, device=device)
    for sample in range(-2, samples):
        start = time.monotonic()
        for _ in range(calls):
            result = rpc.rpc_sync("worker1", last_of, (tensor,))
            if device.type == "cuda":
                torch.cuda.current_stream(device).synchronize()
        if sample >= 0:
            print(f"{(time.monotonic() - start) / calls:.9f}", end=" ", flush=True)
    assert result.item() == 1
    print(flush=True)
rpc.shutdown()
)";

// Times a device copy of as many bytes and the wait for it, in this process.
Samples copies(std::size_t bytes, int count) {
  const auto from = torch::ones({static_cast<std::int64_t>(bytes)},
                                at::TensorOptions(at::kCUDA).dtype(at::kByte));
  const auto to = at::empty_like(from);
  Samples times;
  for (int i = -3; i < count; ++i) {
    const double start = now();
    to.copy_(from, /*non_blocking=*/true);
    wait_for(from.device());
    if (i >= 0) times.add(now() - start);
  }
  return times;
}

}  // namespace

int call_with_tensors(const std::string& name, const std::vector<std::string>& sizes) {
  const c10::Device device(name);
  const int rank = rank_of_worker();
  rpc::Options options;
  if (device.is_cuda())
    options.device_maps = {{"worker" + std::to_string(1 - rank), {{device, device}}}};
  auto agent = rpc::init("worker" + std::to_string(rank), options);
  for (const Case& one : kCases) {
    if (rank != 0 || std::ranges::find(sizes, std::to_string(one.bytes)) == sizes.end()) continue;
    const auto tensor = torch::ones({static_cast<std::int64_t>(one.bytes / 4)}, device);
    at::Tensor last;
    std::printf("%zu ", one.bytes);
    for (int sample = -2; sample < one.samples; ++sample) {
      const double start = now();
      for (int i = 0; i < one.calls; ++i) {
        last = agent.sync<&last_of>(1, tensor);
        wait_for(device);
      }
      if (sample >= 0) std::printf("%.9f ", (now() - start) / one.calls);
    }
    if (last.device() != device || last.item<float>() != 1) {
      std::fprintf(stderr, "gpu_bench: the call gave back something else\n");
      return 1;
    }
    std::printf("\n");
    std::fflush(stdout);
  }
  agent.shutdown();
  return 0;
}

void bench_gpu_calls(Report& report) {
  const char* const python = std::getenv("WEFT_BENCH_PYTHON");
  const auto name_of = [](std::size_t bytes) {
    return "rpc tensor argument " + std::to_string(bytes);
  };
  std::vector<std::string> own{this_program(), "--caller", "cuda:0"};
  std::vector<std::string> pythons{python == nullptr ? "" : python, "-c", kPython, "cuda:0"};
  std::vector<Case> wanted;
  for (const Case& one : kCases) {
    if (!report.wants(name_of(one.bytes))) continue;
    wanted.push_back(one);
    const std::string bytes = std::to_string(one.bytes);
    own.push_back(bytes);
    pythons.push_back(bytes + "," + std::to_string(std::max(2, one.calls / 10)) + "," +
                      std::to_string(one.samples));
  }
  if (wanted.empty()) return;
  if (python == nullptr) {
    report.note(
        "torch.distributed.rpc is not measured: WEFT_BENCH_PYTHON names no python with torch");
  }
  std::map<std::size_t, Samples> weft, torch;
  const auto add_to = [](std::map<std::size_t, Samples>& samples,
                         const std::vector<std::string>& command) {
    std::istringstream lines(run_workers(command, 2, {{"CUDA_MODULE_LOADING", "EAGER"}}).text);
    for (std::string line; std::getline(lines, line);) {
      std::istringstream words(line);
      std::size_t bytes = 0;
      words >> bytes;
      for (double time = 0; words >> time;) samples[bytes].add(time);
    }
  };
  for (int round = 0; round < 2; ++round) {
    add_to(weft, own);
    if (python != nullptr) add_to(torch, pythons);
  }
  for (const Case& one : wanted) {
    const std::string name = name_of(one.bytes);
    report.add(time_row(name, "weft", one.bytes, weft[one.bytes], 1e6, "us"));
    if (torch[one.bytes].count() > 0) {
      report.add(time_row(name, "torch.distributed.rpc", one.bytes, torch[one.bytes], 1e6, "us"));
    }
    report.add(time_row(name, "device copy", one.bytes, copies(one.bytes, 30), 1e6, "us"));
  }
}

}  // namespace weft::bench
