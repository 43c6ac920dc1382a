// Training steps on a GPU: what a captured one costs its host, and what of the communication is not
// hidden.
#pragma once

#include <string>

#include <weft/profiling/bench/report.h>

namespace weft::bench {

// A worker process: one rank on the first GPU. `how`: "measured" (rank 0 prints the seconds of the
// host and of the whole for eager and for captured steps), "traced" (a few eager steps, for a
// timeline).
int train_on_gpu(const std::string& how);

// DistributedDataParallel over NCCL with one rank: a step as a program writes it, and the same step
// captured into a CUDA graph with its collectives and launched again.
void bench_captured_step(Report& report);
// With two ranks on this GPU, which take turns there; from their timeline.
void bench_exposed(Report& report);

}  // namespace weft::bench
