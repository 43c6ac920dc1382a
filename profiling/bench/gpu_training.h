// SPDX-License-Identifier: Apache-2.0
// Training steps on a GPU: the host's time for a captured step, and the communication that is not
// hidden.
#pragma once

#include <string>

#include <weft/profiling/bench/report.h>

namespace weft::bench {

// Runs a worker process: one rank on the first GPU. `how`: "measured" (rank 0 prints the seconds of
// the host and of the whole step, for eager and captured steps), "traced" (a few eager steps, for a
// timeline).
int train_on_gpu(const std::string& how);

// Measures DistributedDataParallel over NCCL with one rank: a step as a program writes it, and the
// same step captured into a CUDA graph with its collectives and launched again.
void bench_captured_step(Report& report);
// Measures, from a timeline, the exposed communication of two ranks that take turns on this GPU.
void bench_exposed(Report& report);

}  // namespace weft::bench
