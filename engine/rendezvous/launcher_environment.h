// What the launcher of this process says about it: weft-run, torchrun and weft::spawn by RANK and
// WORLD_SIZE, mpirun and srun by variables of their own (docs/environment.md). For what a program
// decides before it joins, such as the name of its worker; init_process_group and rpc::init read
// the same. Any thread.
#pragma once

#include <weft/base/export.h>

namespace weft {

// Throw Caller where no launcher started this process, naming the variables, and where the variable
// is no number.
WEFT_API int launched_rank();
WEFT_API int launched_world_size();
// Among this machine's ranks: which GPU is this rank's, whose port it takes. Throws as well where
// the launcher does not say.
WEFT_API int launched_local_rank();
// The same for programs that may run alone: `otherwise` where no launcher says.
WEFT_API int launched_rank_or(int otherwise);
WEFT_API int launched_world_size_or(int otherwise);
WEFT_API int launched_local_rank_or(int otherwise);

}  // namespace weft
