// SPDX-License-Identifier: Apache-2.0
// The worker that an agent is, and its job. Owned by AgentCore, which sets the rank, the generation
// and the token as it joins; fixed from then on, so every thread may read it.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include <weft/base/error.h>
#include <weft/engine/call/numbers.h>
#include <weft/engine/call/types.h>
#include <weft/profiling/trace/operation.h>

namespace weft::call {

struct AgentIdentity {
  WorkerInfo self;                // a rank of -1 stands for any free rank
  std::optional<int> world_size;  // none: workers come and go
  Generation generation = 0;
  std::string token;     // shared by the workers of the job, and known to nobody else
  trace::Member member;  // the agent in traces

  // The ids that this worker assigns begin above it. So a worker that takes over a rank assigns no
  // id of its predecessor's again.
  std::uint64_t first_id() const { return static_cast<std::uint64_t>(generation) << 32; }
  // The id by which all workers know this worker's reference, context or pass of that number.
  // Throws Busy where workers come and go, if the id is one of the next generation.
  std::uint64_t id_of(std::uint64_t number) const {
    if (!world_size && number >> 32 != 0) {
      throw Error(Blame::Busy, describe(self) +
                                   " has made 2^32 references or autograd contexts, and has no ids "
                                   "for more; let it leave, and join again");
    }
    return number_of(self.rank, first_id() + number);
  }
};

}  // namespace weft::call
