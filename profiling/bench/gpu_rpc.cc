#include <algorithm>
#include <cstdio>
#include <cstdlib>
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
  int calls;  // of one sample
  int samples;
};
constexpr Case kCases[] = {{64, 200, 20}, {1 << 20, 50, 20}, {256 << 20, 2, 10}};

const Case& case_of(std::size_t bytes) {
  const auto* const found = std::ranges::find(kCases, bytes, &Case::bytes);
  return found == std::end(kCases) ? kCases[0] : *found;
}

at::Tensor last_of(at::Tensor tensor) { return tensor.slice(0, tensor.size(0) - 1).clone(); }

void wait_for(const c10::Device& device) {
  if (device.is_cuda()) c10::cuda::getCurrentCUDAStream(device.index()).synchronize();
}

// The same in Python; a text, as packs of programs take no sources along. Arguments: device, bytes, calls, samples.
constexpr const char* kPython = R"(
import os, sys, time, torch
import torch.distributed.rpc as rpc

device, (size, calls, samples) = torch.device(sys.argv[1]), map(int, sys.argv[2:5])
rank = int(os.environ["RANK"])

def last_of(tensor):
    return tensor[-1:].clone()

options = rpc.TensorPipeRpcBackendOptions()
if device.type == "cuda":
    options.set_device_map(f"worker{1 - rank}", {device: device})
rpc.init_rpc(f"worker{rank}", rank=rank, world_size=2, rpc_backend_options=options)
if rank == 0:
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

// A device copy of as many bytes and a wait for it, in this process.
Samples copies(std::size_t bytes, int count) {
  const auto from = torch::ones({static_cast<std::int64_t>(bytes)}, at::TensorOptions(at::kCUDA).dtype(at::kByte));
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

int call_with_tensors(const std::string& name, std::size_t bytes) {
  const c10::Device device(name);
  const Case& one = case_of(bytes);
  const int rank = rank_of_worker();
  rpc::Options options;
  if (device.is_cuda()) options.device_maps = {{"worker" + std::to_string(1 - rank), {{device, device}}}};
  auto agent = rpc::init("worker" + std::to_string(rank), options);
  if (rank == 0) {
    const auto tensor = torch::ones({static_cast<std::int64_t>(one.bytes / 4)}, device);
    at::Tensor last;
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
  for (const Case& one : kCases) {
    const std::string name = "rpc tensor argument " + std::to_string(one.bytes);
    if (!report.wants(name)) continue;
    if (python == nullptr)
      report.note("torch.distributed.rpc is not measured: WEFT_BENCH_PYTHON names no python with torch");
    const std::string bytes = std::to_string(one.bytes);
    Samples weft, torch;
    const auto add_to = [](Samples& samples, const std::vector<std::string>& command) {
      std::istringstream text(run_workers(command, 2, {{"CUDA_MODULE_LOADING", "EAGER"}}).text);
      for (double time = 0; text >> time;) samples.add(time);
    };
    for (int round = 0; round < 2; ++round) {
      add_to(weft, {this_program(), "--caller", "cuda:0", bytes});
      if (python == nullptr) continue;
      add_to(torch, {python, "-c", kPython, "cuda:0", bytes, std::to_string(std::max(2, one.calls / 10)),
                     std::to_string(one.samples)});
    }
    report.add(time_row(name, "weft", one.bytes, weft, 1e6, "us"));
    if (torch.count() > 0) report.add(time_row(name, "torch.distributed.rpc", one.bytes, torch, 1e6, "us"));
    report.add(time_row(name, "device copy", one.bytes, copies(one.bytes, 30), 1e6, "us"));
  }
}

}  // namespace weft::bench
