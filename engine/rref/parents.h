// SPDX-License-Identifier: Apache-2.0
// The references of this worker that have been given to other workers, as parents of the receivers'
// references (forks): each is kept until the receiver says that the owner knows the child.
//
// Owned by the agent's references. Usable from every thread; nothing here blocks.
#pragma once

#include <cstddef>
#include <functional>
#include <memory>
#include <unordered_map>

#include <weft/base/export.h>
#include <weft/base/mutex.h>
#include <weft/engine/call/numbers.h>
#include <weft/engine/rref/handle.h>

namespace weft::rref {

class WEFT_API Parents {
 public:
  void keep(ForkId child, std::shared_ptr<Handle> parent, const call::WorkerGeneration& receiver);
  // Called when the owner knows the child, or the child will never be.
  void child_accepted(ForkId child);
  bool keeps_parent_of(ForkId child) const;
  // True if that worker is to accept a child.
  bool await(int rank) const;
  // Drops the parents of children of lost workers; returns their number.
  std::size_t workers_lost(const std::function<bool(const call::WorkerGeneration&)>& is_lost);
  // Drops all.
  void close();

 private:
  struct Parent {
    std::shared_ptr<Handle> handle;
    call::WorkerGeneration receiver;
  };
  mutable Mutex mutex_;
  std::unordered_map<ForkId, Parent> parents_ WEFT_GUARDED_BY(mutex_);  // by child
};

}  // namespace weft::rref
