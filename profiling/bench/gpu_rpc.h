// Remote calls that take a tensor of a GPU, between two processes on one GPU.
#pragma once

#include <string>
#include <vector>

#include <weft/profiling/bench/report.h>

namespace weft::bench {

// A worker process, one of two: rank 0 prints a line for each of the sizes, its bytes and the
// seconds that each call took. The device is "cuda:0"; "cpu" is for trying the program out.
int call_with_tensors(const std::string& device, const std::vector<std::string>& sizes);

// A call from when it is made until this process's stream knows that all of the tensor has arrived:
// the callee gives the last number back, and that stream is waited for. The same by Python's
// torch.distributed.rpc.
void bench_gpu_calls(Report& report);

}  // namespace weft::bench
