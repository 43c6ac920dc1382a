// SPDX-License-Identifier: Apache-2.0
// Training with inputs that run out sooner on some ranks than on others. Semantics of
// torch.distributed.algorithms.Join.
//
//   weft::join(ddp, [&] { for (auto& batch : my_batches) train_step(ddp, batch); });
//
// At the start of each step every active rank says so in one small all-reduce. A rank that has run
// out answers the others' collectives with zeros until all have run out. Then all take over the
// state of one of the ranks that were active last.
#pragma once

#include <exception>
#include <functional>
#include <initializer_list>
#include <string>
#include <vector>

#include <weft/base/export.h>
#include <weft/engine/group/process_group.h>

namespace weft {

// Options of weft::join(), the same on all ranks except `enable`.
struct JoinOptions {
  // Divide gradients by the number of ranks at the start, as if finished ranks contributed zeros;
  // otherwise by the number of ranks still active.
  bool divide_by_initial_world_size = true;
  // Throw Cancelled on all ranks as soon as one runs out, after each rank has made the steps that
  // all could make.
  bool throw_on_early_termination = false;
  // Off: only runs the steps; every rank must have equally many.
  bool enable = true;
};

namespace parallel::detail {

class JoinScope;

// One step of the active ranks.
struct JoinStep {
  std::vector<bool> active;   // by rank
  int first_rank = 0;         // the lowest active rank
  bool synchronizes = false;  // false inside no_sync
  bool trains = false;        // true if their joinable trains
};

}  // namespace parallel::detail

// An object that communicates in every step and can take part without contributing.
class Joinable {
 public:
  virtual ~Joinable() = default;

 protected:
  // For Weft's own use.
  friend class parallel::detail::JoinScope;
  // The group over which the object communicates.
  virtual ProcessGroup& join_group() = 0;
  // Throws Caller if the object cannot take part.
  virtual void check_join() const {}
  // True in training mode, if that changes the object's communication.
  virtual bool trains() const { return false; }
  // True if the object can be joined only without others.
  virtual bool joins_alone() const { return false; }
  // Around each step of this rank; `active`: by rank, whether it takes part in the step that
  // begins. end_step() is called before the next step, and before this rank runs out.
  virtual void begin_step(const std::vector<bool>& /*active*/) {}
  virtual void end_step() {}
  // Called when an exception leaves the join on this rank alone.
  virtual void fail(const std::string& /*why*/) {}
  // Runs the communication of one step of the other ranks.
  virtual void mirror_step(const parallel::detail::JoinStep& step) = 0;
  // Called when all ranks have run out: all take over the state of `last_rank`.
  virtual void take_over(int last_rank) = 0;
  // Set while this rank is inside weft::join.
  parallel::detail::JoinScope* join_scope_ = nullptr;
};

namespace parallel::detail {

class WEFT_API JoinScope {
 public:
  JoinScope(std::vector<Joinable*> joinables, JoinOptions options);
  ~JoinScope();
  JoinScope(const JoinScope&) = delete;
  JoinScope& operator=(const JoinScope&) = delete;

  // Called by a joinable at the start of its step; only the scope's first joinable announces the
  // step.
  void announce_step(const Joinable& joinable, bool synchronizes);
  // The number by which gradients are divided in this step.
  int divisor() const;
  int first_active_rank() const { return first_active_; }
  // True inside of a join of this thread.
  static bool is_on_this_thread() { return innermost() != nullptr; }
  // The same, if ranks had run out when this rank's step began.
  static bool is_without_some_ranks();
  // Called after this rank's last step: mirrors the others until all have run out.
  void run_out();
  // Called with the exception that ends the join. Tells the joinables, unless all ranks throw it.
  void fail(const std::exception_ptr& why);

 private:
  struct Round {
    int active = 0;
    int first = 0;
    bool synchronizes = false;
    std::vector<bool> trains;        // by joinable
    std::vector<bool> active_ranks;  // by rank
  };
  Round exchange(bool active, bool synchronizes);

  static JoinScope*& innermost();

  JoinScope* const outer_;
  std::vector<Joinable*> joinables_;
  JoinOptions options_;
  ProcessGroup group_;
  int active_;
  int first_active_ = 0;
  bool ends_on_all_ = false;  // all ranks throw
};

}  // namespace parallel::detail

// Collective. Runs the steps of this rank, then mirrors the others' collectives until every rank
// has run out. Exceptions of `steps` pass through; with a sharded model they abort its groups, so
// that no other rank waits for this one. `joinables` names each object once, in the order
// in which they communicate within a step; their groups have the same members. Throws Caller if
// that is not so or if an object is inside another join; and on all ranks if they give different
// numbers of objects or different options (`enable` apart).
WEFT_API void join(std::vector<Joinable*> joinables, const std::function<void()>& steps,
                   JoinOptions options = {});
// The same for one object.
inline void join(Joinable& joinable, const std::function<void()>& steps, JoinOptions options = {}) {
  join(std::vector<Joinable*>{&joinable}, steps, options);
}

}  // namespace weft
