// SPDX-License-Identifier: Apache-2.0
// Rank and size of this process, as its launcher tells them: weft-run, torchrun and weft::spawn by
// RANK and WORLD_SIZE, mpirun and srun by variables of their own (docs/environment.md). For
// decisions that a program makes before it joins, such as its worker's name; init_process_group and
// rpc::init read the same. Usable from every thread.
#pragma once

#include <weft/base/export.h>

namespace weft {

// This process's rank in the job. Throws Caller if no launcher started this process (the error
// names the variables), and if the variable is not a number.
WEFT_API int launched_rank();
// The number of ranks of the job. Throws like launched_rank().
WEFT_API int launched_world_size();
// This rank's number among the ranks of its machine, for instance to choose its GPU. Also throws if
// the launcher does not tell it.
WEFT_API int launched_local_rank();
// The same for programs that may run alone: `otherwise` if no launcher tells it.
WEFT_API int launched_rank_or(int otherwise);
// launched_world_size() for programs that may run alone.
WEFT_API int launched_world_size_or(int otherwise);
// launched_local_rank() for programs that may run alone.
WEFT_API int launched_local_rank_or(int otherwise);
// How often the launcher has started the ranks of this job again: 0 in the first start, and if no
// launcher tells it. weft-run, torchrun and Slurm tell it.
WEFT_API int launched_restarts();

}  // namespace weft
