// What the launcher of this process says about it: weft-run, torchrun and weft::spawn by RANK and WORLD_SIZE, mpirun and
// srun by variables of their own (docs/environment.md). For what a program decides before it joins, such as the name of its
// worker; init_process_group and rpc::init read the same. Any thread.
#pragma once

#include <optional>

#include <weft/base/export.h>

namespace weft {

// Nothing where no launcher started this process. Throws Caller when the variable is no number.
WEFT_API std::optional<int> launched_rank();
WEFT_API std::optional<int> launched_world_size();
// Among this machine's ranks: which GPU is this rank's, whose port it takes. Nothing as well where a launcher does not say.
WEFT_API std::optional<int> launched_local_rank();

}  // namespace weft
