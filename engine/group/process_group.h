// A group of ranks and the operations among them. Semantics of torch.distributed's process groups;
// differences are in docs/api-changes.md. No default group: the object is passed to who needs it.
//
// Order: all ranks of a group issue the same collectives in the same order. A group may be used
// from every thread of its rank; calls are then ordered as they come. Nothing here blocks the host
// but init_process_group, new_group, split, monitored_barrier, and Work's waits.
//
// Arguments that are wrong on this rank (shape, dtype, device, contiguity, rank) throw Caller
// before anything is sent. With WEFT_DEBUG=detail what differs between ranks is found too.
#pragma once

#include <chrono>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include <weft/base/export.h>
#include <weft/base/patience.h>
#include <weft/engine/group/work.h>
#include <weft/kernels/reduce_op.h>

namespace weft {

constexpr int kAnySource = -1;

// Each member has an initializer, for programs that name some of them, as compilers warn of others.
struct ProcessGroupOptions {
  // One backend for both devices ("gloo"), or one for each ("cpu:weft,cuda:nccl"). A backend that
  // is named must be usable: "cpu:weft,cuda:nccl" written out throws Unsupported where there is no
  // GPU. "" stands for the value of WEFT_BACKEND, and without that for "cpu:weft,cuda:nccl" as far
  // as each can be used here; where "weft" cannot, "gloo" takes its place and a warning says so
  // (docs/backends.md).
  std::string backend{};
  // env://  file:///path  tcp://host:port  tcp://[multicast address]:port; ?rank=&world_size=
  // override the environment.
  std::string init_method = "env://";
  // Override URL and environment. Without a rank, file:// and multicast give one by arrival.
  std::optional<int> rank{}, world_size{};
  // Instead of init_method; needs rank and world_size.
  c10::intrusive_ptr<c10d::Store> store{};
  // Isolates jobs that share an address.
  std::string group_name{};
  // Of joining, and of each operation.
  std::chrono::milliseconds timeout = std::chrono::minutes(30);
  // Default: cuda:LOCAL_RANK if there is a GPU, else cpu.
  std::optional<c10::Device> device{};
  // One timeline of all ranks goes there (docs/looking-inside.md); overrides WEFT_TIMELINE. A
  // process makes one timeline.
  std::string timeline{};
  // After how long a rank says on stderr that it waits for others, and for which: when joining, in
  // an operation, when it makes a group or leaves one. Ascending; empty: never. The lowest rank
  // that waits speaks for the job.
  WaitReports wait_reports = default_wait_reports();
};

struct BackendInfo {
  std::string name;
  bool usable = false;
  std::string why_not;  // "" when usable
};

// The backends of this build, and whether they can be used on this machine.
WEFT_API std::vector<BackendInfo> available_backends();

class WEFT_API ProcessGroup {
 public:
  // An empty group: false in a condition, everything else throws Caller.
  ProcessGroup() = default;

  int rank() const;
  int size() const;
  // The device of this rank, as given or chosen at init.
  c10::Device device() const;
  // The backend that carries tensors of such a device. Throws Caller if there is none.
  std::string backend(c10::Device device) const;
  // Which ranks this one waits for at this moment, and in which operations, a line for each:
  // "all_reduce #7: rank 2 has not come; last seen in #6 (all_reduce, 12 s ago)". For a thread
  // beside the one that waits. Asks the other ranks, and so blocks for a second at most; empty
  // where nothing is pending, or all have come.
  std::vector<std::string> waiting_for() const;

  Work broadcast(at::Tensor tensor, int root);
  // In place on root; the others' tensors are untouched.
  Work reduce(at::Tensor tensor, int root, ReduceOp op = ReduceOp::Sum);
  // In place; bitwise the same on all ranks. Sparse COO tensors (Sum only; every rank: the same
  // shape and sparse dimensions, any entries) become their coalesced sum; the call waits for the
  // others then, and throws what goes wrong.
  Work all_reduce(at::Tensor tensor, ReduceOp op = ReduceOp::Sum);
  // outputs[r] receives rank r's input; all have its shape. In the calls that gather, a complex
  // tensor may stand beside real ones of its view_as_real's shape and dtype.
  Work all_gather(std::vector<at::Tensor> outputs, at::Tensor input);
  // output: size() times the elements of input, rank by rank.
  Work all_gather_into(at::Tensor output, at::Tensor input);
  Work gather(std::vector<at::Tensor> outputs, at::Tensor input, int root);
  Work scatter(at::Tensor output, std::vector<at::Tensor> inputs, int root);
  // Rank r receives the reduction of all ranks' inputs[r]. Inputs may differ in size when every
  // rank names the same sizes.
  Work reduce_scatter(at::Tensor output, std::vector<at::Tensor> inputs,
                      ReduceOp op = ReduceOp::Sum);
  Work reduce_scatter_into(at::Tensor output, at::Tensor input, ReduceOp op = ReduceOp::Sum);
  Work all_to_all(std::vector<at::Tensor> outputs, std::vector<at::Tensor> inputs);
  Work send(at::Tensor tensor, int to, int tag = 0);
  Work recv(at::Tensor tensor, int from = kAnySource, int tag = 0);
  // Done when every rank has entered it and every earlier collective of this group is done.
  Work barrier();
  // Blocks until every rank has called it. Throws Timeout: on rank 0 naming every rank that did not
  // come, on the others saying so; where rank 0 gives no time (0) always, unless it is alone. Works
  // with every backend (it goes through the store). Threads of one rank take turns; each one's
  // timeout counts from its turn.
  void monitored_barrier(std::chrono::milliseconds timeout);

  // The members call it, with the same ranks (of this group, in the order of their new ranks), and
  // groups of the same members in the same order. The other ranks may call it as well, and get an
  // empty group. When the loss of a rank has broken this group, groups can be made of those that
  // live (living_ranks), rank 0 of the job among them. Of the options, backend, timeout and device
  // count; "" and the defaults keep this group's. A device of its own: for a rank that uses several
  // GPUs, each of which takes a group.
  ProcessGroup new_group(std::vector<int> ranks, ProcessGroupOptions options = {});
  // The ranks of this group, in order, but for those of which is known here that they are lost or
  // have left it: all others are thought to live. Once an error PeerLost has named a lost rank,
  // that one is not among them. Does not block.
  std::vector<int> living_ranks() const;
  // Every rank calls it; ranks of one color form a group, ordered by key and then by rank. A
  // negative color: no group.
  ProcessGroup split(int color, int key);

  // The rank in the group that init_process_group made.
  int global_rank(int group_rank) const;
  // Of all members, in the order of their ranks here.
  const std::vector<int>& ranks() const;
  c10::intrusive_ptr<c10d::Store> store() const;
  // Why this group is broken: the next operation would throw it. Nothing where it is not known to
  // be. Issues nothing, does not block, and leaves what it gives for the next operation to throw.
  std::optional<Error> error() const;
  // This group by a handle whose collectives and messages have a time limit of their own, counted
  // from when they are issued; one that has not ended then breaks the group with Timeout, as the
  // group's own limit does. Throws Caller for a limit that is not positive, and for one above that
  // of the group, which holds in any case.
  ProcessGroup with_timeout(std::chrono::milliseconds limit) const;
  // Leaves now, as dropping the last handle does, but within a limit of its own: waits until this
  // rank's operations have ended, and the others have completed them too. Throws Timeout, whose
  // ranks() have not; the rank has left then as well. Where the group is broken it waits for
  // nobody. Afterwards every operation, by whichever handle of this rank, throws Caller;
  // connections close when the last handle goes. Throws Caller for a limit that is not positive,
  // and where this rank has left before.
  void leave(std::chrono::milliseconds limit);
  // Fails every pending and later operation of this group, on all ranks, with Cancelled and the
  // reason.
  void abort(std::string reason);
  // What this process did last, in all its groups and agents, as JSON for weft-debug analyze.
  std::string dump() const;
  explicit operator bool() const { return core_ != nullptr; }

 private:
  friend struct group::Core;
  explicit ProcessGroup(std::shared_ptr<group::Core> core) : core_(std::move(core)) {}
  group::Core& core() const;
  Work limited(Work work) const;  // by limit_, if there is one
  std::shared_ptr<group::Core> core_;
  std::chrono::milliseconds limit_{0};  // of with_timeout(); 0: the group's
};

// Blocks until all ranks have joined. Throws: Caller for options that do not fit together or a
// variable that is missing, Timeout naming what was waited for, Unsupported where the backend
// cannot be used here.
WEFT_API ProcessGroup init_process_group(ProcessGroupOptions options = {});

}  // namespace weft
