// Training with inputs that run out sooner on some ranks than on others. Semantics of
// torch.distributed.algorithms.Join.
//
//   weft::join(ddp, [&] { for (auto& batch : my_batches) train_step(ddp, batch); });
//
// At the start of each step every active rank says so in one small all-reduce. A rank that has run
// out answers the others' collectives with zeros until all have; then all take over the state of
// one that was active last.
#pragma once

#include <functional>
#include <initializer_list>
#include <vector>

#include <weft/base/export.h>
#include <weft/engine/group/process_group.h>

namespace weft {

struct JoinOptions {
  // Divide gradients by the number of ranks at the start, as if finished ranks contributed zeros;
  // else by those still active.
  bool divide_by_initial_world_size = true;
  // Throw Cancelled on all ranks, once each has made the steps that all could make, as soon as one
  // runs out.
  bool throw_on_early_termination = false;
  // Off: only runs the steps; every rank must have as many.
  bool enable = true;
};

namespace parallel {
class JoinScope;
}

// What the active ranks do in a step.
struct JoinStep {
  int first_rank = 0;         // the lowest of them
  bool synchronizes = false;  // false inside no_sync
  bool trains = false;        // as their object says
};

// An object that communicates in every step and can do so without contributing.
class Joinable {
 public:
  virtual ~Joinable() = default;

 protected:
  friend class parallel::JoinScope;
  virtual ProcessGroup& join_group() = 0;
  // Throws Caller where it cannot take part.
  virtual void check_join() const {}
  // Whether it is in training mode, where that changes what it communicates.
  virtual bool trains() const { return false; }
  // The communication of one step of the others.
  virtual void mirror_step(const JoinStep& step) = 0;
  // All ranks have run out; all take over what `last_rank` holds.
  virtual void take_over(int last_rank) = 0;

  // Set while this rank is inside weft::join.
  parallel::JoinScope* join_scope_ = nullptr;
};

namespace parallel {

class WEFT_API JoinScope {
 public:
  JoinScope(std::vector<Joinable*> joinables, JoinOptions options);
  ~JoinScope();
  JoinScope(const JoinScope&) = delete;
  JoinScope& operator=(const JoinScope&) = delete;

  // Called by a joinable at the start of its step; only the first of the scope speaks for the rank.
  void announce_step(const Joinable& joinable, bool synchronizes);
  // What gradients are divided by in this step.
  int divisor() const;
  int first_active_rank() const { return first_active_; }
  // After this rank's last step: mirrors the others until all have run out.
  void run_out();

 private:
  struct Round {
    int active = 0;
    int first = 0;
    bool synchronizes = false;
    std::vector<bool> trains;  // by joinable
  };
  Round exchange(bool active, bool synchronizes);

  std::vector<Joinable*> joinables_;
  JoinOptions options_;
  ProcessGroup group_;
  int active_;
  int first_active_ = 0;
};

}  // namespace parallel

// Runs the steps of this rank, then mirrors the others' collectives until every rank has run out.
// Collective. What `steps` throws passes through. The joinables are named in the order in which
// they communicate within a step, each once; their groups have the same members. Throws Caller
// where that is not so, and for one that is inside of another join; on all ranks where these give
// other numbers of objects, or other options (but for `enable`).
WEFT_API void join(std::vector<Joinable*> joinables, const std::function<void()>& steps,
                   JoinOptions options = {});
inline void join(Joinable& joinable, const std::function<void()>& steps, JoinOptions options = {}) {
  join(std::vector<Joinable*>{&joinable}, steps, options);
}

}  // namespace weft
