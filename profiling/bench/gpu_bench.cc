// SPDX-License-Identifier: Apache-2.0
// Cases that need a GPU, measured on one: the latency from one stream to another, the cost of a
// collective over NCCL's own call, a training step as a CUDA graph, the communication of
// DistributedDataParallel that is not hidden, and the cost of a remote call with a tensor. (The
// kernels are in the kernels bench, connections in the transport bench.)
#include <cstdlib>
#include <cstring>

#include <weft/base/cuda_variables.h>
#include <weft/base/make_error.h>
#include <weft/cuda/device.h>
#include <weft/cuda/driver.h>
#include <weft/cuda/retire.h>
#include <weft/profiling/bench/gpu_nccl.h>
#include <weft/profiling/bench/gpu_rpc.h>
#include <weft/profiling/bench/gpu_streams.h>
#include <weft/profiling/bench/gpu_training.h>

namespace weft::bench {
namespace {

void bench(Report& report) {
  // Streams that wait for each other need a hardware queue each, and no kernel may be loaded while
  // they wait.
  setenv("CUDA_DEVICE_MAX_CONNECTIONS", "32", /*overwrite=*/0);
  setenv("CUDA_MODULE_LOADING", "EAGER", /*overwrite=*/0);
  auto driver = cuda::Driver::open();
  if (!driver.ok()) return report.note("no GPU cases: " + driver.error().text());
  if (cuda::Device::count(*driver.value()) == 0)
    return report.note("no GPU cases: the driver sees no GPU");
  {
    const auto device = cuda::Device::open(driver.value(), 0);
    report.note("GPU cases on " + device->properties().name);
    bench_streams(report, device);
    bench_nccl(report, device);
    if (!device->retirement().reclaim_all(Deadline::never()))
      broken("a fence without a deadline timed out");
  }
  bench_captured_step(report);
  bench_exposed(report);
  bench_gpu_calls(report);
}

}  // namespace
}  // namespace weft::bench

int main(int argc, char** argv) {
  weft::set_cuda_variables();  // needed because it uses the driver before it makes a group
  if (argc == 3 && std::strcmp(argv[1], "--worker") == 0) return weft::bench::train_on_gpu(argv[2]);
  if (argc >= 4 && std::strcmp(argv[1], "--caller") == 0) {
    return weft::bench::call_with_tensors(argv[2], {argv + 3, argv + argc});
  }
  weft::bench::Report report("gpu", argc, argv, /*default_runs=*/21);
  weft::bench::bench(report);
  return report.finish();
}
