// SPDX-License-Identifier: Apache-2.0
// Remote calls with a GPU tensor, between two processes on one GPU.
#pragma once

#include <string>
#include <vector>

#include <weft/profiling/bench/report.h>

namespace weft::bench {

// Runs one of two worker processes. For each of the sizes, rank 0 prints a line with the bytes and
// the seconds that each call took. The device is "cuda:0"; "cpu" is for trying the program out.
int call_with_tensors(const std::string& device, const std::vector<std::string>& sizes);

// Times a call from its start until this process's stream knows that the whole tensor has arrived:
// the callee returns the last number, and the caller waits for that stream. Compares with Python's
// torch.distributed.rpc.
void bench_gpu_calls(Report& report);

}  // namespace weft::bench
