// SPDX-License-Identifier: Apache-2.0
#include <utility>

#include <weft/base/log.h>
#include <weft/engine/call/core.h>
#include <weft/engine/rref/references.h>

namespace weft::rref {

std::uint64_t References::next_id() { return core_.identity().id_of(next_++); }

void References::keep_parent(ForkId child, std::shared_ptr<Handle> parent,
                             const call::WorkerGeneration& receiver) {
  parents_.keep(child, std::move(parent), receiver);
  end_if_late(receiver);
}

bool References::has_or_ends(ForkId fork) {
  if (users_.has(fork)) return true;
  values_.end(fork);
  return false;
}

void References::end_if_late(const call::WorkerGeneration& holder) {
  if (core_.members().has_successor(holder))
    worker_lost(holder.rank, static_cast<std::uint16_t>(holder.generation + 1));
}

bool References::concerns(int rank) const { return values_.concerns(rank) || parents_.await(rank); }

void References::worker_lost(int rank, std::optional<std::uint16_t> successor) {
  const auto is_lost = [rank, successor](const call::WorkerGeneration& worker) {
    return worker.rank == rank && (!successor || worker.is_before(*successor));
  };
  const std::size_t forks = values_.workers_lost(is_lost);
  if (forks + parents_.workers_lost(is_lost) > 0) {
    log::info("rank " + std::to_string(rank) + " is gone; " + std::to_string(forks) +
              " references that it held have ended");
  }
}

void References::close() {
  parents_.close();
  values_.close();
}

void References::count(rpc::DebugInfo& info) const {
  info.pending_users = users_.pending();
  values_.count(info);
}

std::shared_ptr<call::SentReferences> References::references_to(const call::Recipient& worker) {
  return std::make_shared<ForkWriter>(core_, worker);
}

void References::with_references_from(int worker,
                                      const std::function<void(call::ReceivedReferences&)>& read) {
  ForkReader forks(core_, worker);
  read(forks);
}

References& references_of(call::AgentCore& core) {
  return static_cast<References&>(core.extensions().references());
}

}  // namespace weft::rref
