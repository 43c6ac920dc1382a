// SPDX-License-Identifier: Apache-2.0
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include <weft/engine/rendezvous/job_store.h>
#include <weft/engine/rendezvous/scheme.h>
#include <weft/engine/store/address.h>
#include <weft/engine/store/tcp_store.h>

namespace weft::group {

namespace {

// Under torchrun, its agent hosts the store and every rank is a client.
bool agent_hosts(const Environment& environment) {
  const char* agent = environment("TORCHELASTIC_USE_AGENT_STORE");
  return agent != nullptr && std::string(agent) == "True";
}

// The store of torchrun's agent outlives failures, and ranks may have failed before all had counted
// their lives in it. So each restart of the ranks uses a part of the store of its own. The agents
// of several machines count restarts separately; there the ranks' own count serves. The first start
// has no prefix, as in Python's torch.distributed.
c10::intrusive_ptr<c10d::Store> of_this_attempt(const c10::intrusive_ptr<c10d::Store>& store,
                                                const Environment& environment) {
  const char* const agents = environment("GROUP_WORLD_SIZE");
  const char* const attempt = environment("TORCHELASTIC_RESTART_COUNT");
  const bool is_told = agents != nullptr && std::string(agents) == "1" && attempt != nullptr;
  if (!is_told || std::string(attempt) == "0") return store;
  return c10::make_intrusive<c10d::PrefixStore>("/worker/attempt_" + std::string(attempt), store);
}

}  // namespace

Rendezvous join_tcp(const TcpAddress& address, const Wanted& wanted, const std::string& group_name,
                    const Environment& environment, Deadline deadline, bool open, Seeker& seeker) {
  Rendezvous result;
  result.rank =
      open && !wanted.rank ? kAnyRank : require_rank(wanted, at(address.host, address.port));
  result.world_size = require_world_size(wanted, at(address.host, address.port));
  if (result.rank != kAnyRank) check_range(result.rank, result.world_size);
  wait_for_name(address.host, deadline);
  const bool by_agent = agent_hosts(environment);
  if (result.rank == 0 && !by_agent) {
    result.store =
        host_store(address, result.world_size, /*shared=*/!group_name.empty(), deadline, seeker);
    result.hosts = true;
  } else {
    result.store = by_agent || open ? join_store(address, result.rank, deadline, seeker)
                                    : join_store_of_this_life(address, result.rank, group_name,
                                                              deadline, seeker);
  }
  if (by_agent) result.store = of_this_attempt(result.store, environment);
  if (result.rank == 0 && !by_agent) tell_group_of_rank_zero(*result.store, group_name);
  result.local_address = address_for_others(address.host, address.port);
  return result;
}

}  // namespace weft::group
