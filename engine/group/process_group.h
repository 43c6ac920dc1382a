// SPDX-License-Identifier: Apache-2.0
// ProcessGroup: ranks and the operations among them. Semantics of torch.distributed's process
// groups; differences are in docs/differences-from-pytorch.md. There is no default group: the
// object is passed to the code that needs it.
//
// Order: all ranks of a group issue the same collectives in the same order. A group may be used
// from every thread of its rank; calls are then ordered as they arrive. These block the host:
// init_process_group, new_group, split, monitored_barrier, leave, dropping the last handle,
// waiting_for, all_reduce of sparse tensors, and Work's waits.
//
// Arguments that are wrong on this rank (shape, dtype, device, contiguity, rank) throw Caller
// before anything is sent. With WEFT_DEBUG=detail, differences between ranks are found too.
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

// As the sender of a recv(): any rank.
constexpr int kAnySource = -1;

// Options of init_process_group(). Each member has an initializer, since compilers warn of members
// that a program does not name.
struct ProcessGroupOptions {
  // One backend for both devices ("gloo"), or one for each ("cpu:weft,cuda:nccl"). A backend that
  // is named must be usable: "cpu:weft,cuda:nccl" written out throws Unsupported if there is no
  // GPU. "" stands for the value of WEFT_BACKEND, and without that for "cpu:weft,cuda:nccl" as far
  // as each can be used here; if "weft" cannot, "gloo" replaces it and a warning says so
  // (docs/backends.md).
  std::string backend{};
  // env://  file:///path  tcp://host:port  tcp://[multicast address]:port; ?rank=&world_size=
  // override the environment.
  std::string init_method = "env://";
  // Override URL and environment. Without a rank, file:// and multicast assign one in the order of
  // arrival.
  std::optional<int> rank{}, world_size{};
  // Used instead of init_method; needs rank and world_size.
  c10::intrusive_ptr<c10d::Store> store{};
  // Isolates jobs that share an address.
  std::string group_name{};
  // Limit of joining, and of each operation.
  std::chrono::milliseconds timeout = std::chrono::minutes(30);
  // Default: cuda:LOCAL_RANK if there is a GPU, else cpu.
  std::optional<c10::Device> device{};
  // Writes one timeline of all ranks to this file (docs/looking-inside.md); overrides
  // WEFT_TIMELINE. A process makes one timeline.
  std::string timeline{};
  // The times after which a rank reports on stderr that it waits for others, and for which: when
  // joining, in an operation, when it makes or leaves a group. Ascending; empty: never. The lowest
  // rank that waits reports for the job.
  WaitReports wait_reports = default_wait_reports();
  // If set, processes that connect to each other prove that they know this text before they read
  // anything else; 16 bytes or more, made at random, the same on all ranks. Holds for all groups
  // that are made of this one, and ranks sign with it what they write into the job's store. It does
  // not protect the connections of gloo, nccl and mpi (SECURITY.md).
  std::string secret{};
  // Limit on the connections that this rank keeps open for the group's tensors. Above it, idle ones
  // are closed, and opened again when they are needed. Operations that need more at once have them.
  int max_connections = 256;
};

// A backend, and whether this machine can use it.
struct BackendInfo {
  // The name by which ProcessGroupOptions::backend chooses it.
  std::string name;
  // True if a group can be made with it here.
  bool usable = false;
  std::string why_not;  // "" when usable
};

// The backends of this build, and whether they can be used on this machine.
WEFT_API std::vector<BackendInfo> available_backends();

// Ranks that call collectives together. Copies are handles of the same group.
class WEFT_API ProcessGroup {
 public:
  // An empty group: false in a condition; everything else throws Caller.
  ProcessGroup() = default;

  // This process's rank in the group.
  int rank() const;
  // The number of ranks.
  int size() const;
  // The device of this rank, as given or chosen at init.
  c10::Device device() const;
  // The backend that carries tensors on such a device. Throws Caller if there is none.
  std::string backend(c10::Device device) const;
  // The transport that carries this group's tensors to a rank: "shm", "tcp", "verbs", … With
  // backend "weft" it may differ from rank to rank; a backend that makes no connections of its own,
  // and this rank itself, have the backend's name. Throws Caller for a rank that does not exist.
  std::string transport(int peer) const;
  // The ranks for which this one waits at this moment, and the operations, a line for each:
  // "all_reduce #7: rank 2 has not come; last seen in #6 (all_reduce, 12 s ago)". Call it on
  // another thread than the one that waits. Asks the other ranks, and so may block for up to 2 s
  // (and queries the store if a rank waits in a meeting there). Empty if nothing is pending, or all
  // have come.
  std::vector<std::string> waiting_for() const;

  // Copies root's tensor into the tensor of every other rank.
  Work broadcast(at::Tensor tensor, int root);
  // In place on root; the others' tensors are untouched.
  Work reduce(at::Tensor tensor, int root, ReduceOp op = ReduceOp::Sum);
  // In place; bitwise the same on all ranks. Sparse COO tensors (Sum only; the same shape and
  // sparse dimensions on every rank, any entries) become their coalesced sum; that call waits for
  // the others and throws its errors.
  Work all_reduce(at::Tensor tensor, ReduceOp op = ReduceOp::Sum);
  // outputs[r] receives rank r's input; all have its shape. In the calls that gather, ranks may
  // pass a complex tensor where others pass a real one of its view_as_real's shape and dtype.
  Work all_gather(std::vector<at::Tensor> outputs, at::Tensor input);
  // output has size() times the elements of input, rank by rank.
  Work all_gather_into(at::Tensor output, at::Tensor input);
  // outputs[r] receives rank r's input on root; the others pass no outputs.
  Work gather(std::vector<at::Tensor> outputs, at::Tensor input, int root);
  // output receives root's inputs[rank()]; the others pass no inputs.
  Work scatter(at::Tensor output, std::vector<at::Tensor> inputs, int root);
  // Rank r receives the reduction of all ranks' inputs[r]. Inputs may differ in size if every rank
  // names the same sizes.
  Work reduce_scatter(at::Tensor output, std::vector<at::Tensor> inputs,
                      ReduceOp op = ReduceOp::Sum);
  // Like reduce_scatter(), for an input of size() times the elements of output, rank by rank.
  Work reduce_scatter_into(at::Tensor output, at::Tensor input, ReduceOp op = ReduceOp::Sum);
  // inputs[r] to rank r; outputs[r] receives from rank r.
  Work all_to_all(std::vector<at::Tensor> outputs, std::vector<at::Tensor> inputs);
  // all_to_all over rows (dimension 0): the first input_splits[0] rows of input go to rank 0, the
  // next input_splits[1] to rank 1, and so on; likewise output_splits[r] rows of output come from
  // rank r. Splits may be 0, and add up to the tensor's rows; without splits each rank has an equal
  // part. Rows of output and of input have one shape. Both sides of a pair of ranks give the same
  // number of rows.
  Work all_to_all_single(at::Tensor output, at::Tensor input,
                         std::vector<std::int64_t> output_splits = {},
                         std::vector<std::int64_t> input_splits = {});
  // Sends the tensor to a rank, which receives it with recv() and the same tag.
  Work send(at::Tensor tensor, int to, int tag = 0);
  // Receives a tensor of the same shape and dtype. Work::source_rank() tells the sender afterwards.
  Work recv(at::Tensor tensor, int from = kAnySource, int tag = 0);
  // Done when every rank has entered it and every earlier collective of this group is done.
  Work barrier();
  // Blocks until every rank has called it. Throws Timeout: on rank 0 naming every rank that did not
  // come, on the others saying so; always if rank 0 passes a timeout of 0, unless it is alone.
  // Works with every backend (it uses the store). Threads of one rank take turns; each one's
  // timeout counts from its turn.
  void monitored_barrier(std::chrono::milliseconds timeout);

  // All members call it, with the same ranks (of this group, in the order of their new ranks), and
  // call it for groups of the same members in the same order. Other ranks may call it too, and get
  // an empty group. If the loss of a rank, whichever it is, has broken this group, groups can be
  // made of the ranks that live (living_ranks). If parts of the group have lost sight of each
  // other, only one of them can: the part with more than half of the ranks that have not ended, or
  // with half of them and the lowest. Of the options, backend, timeout and device count; "" and the
  // defaults keep this group's. Give a device of its own to each group of a rank that uses several
  // GPUs.
  ProcessGroup new_group(std::vector<int> ranks, ProcessGroupOptions options = {});
  // The ranks of this group, in order, except those that are known here to be lost or to have left
  // it: all others are taken to live. Once a PeerLost error has named a lost rank, that rank is not
  // among them. Does not block.
  std::vector<int> living_ranks() const;
  // Every rank calls it. Ranks of one color form a group, ordered by key and then by rank; a
  // negative color: no group.
  ProcessGroup split(int color, int key);

  // The rank of a member in the group that init_process_group made.
  int global_rank(int group_rank) const;
  // The same for all members, in the order of their ranks here.
  const std::vector<int>& ranks() const;
  // The store through which the ranks of this group have met.
  c10::intrusive_ptr<c10d::Store> store() const;
  // The reason why this group is broken, which the next operation would throw; nullopt if it is not
  // known to be broken. Issues nothing, does not block, and leaves the error for the next
  // operation.
  std::optional<Error> error() const;
  // A handle of this group whose collectives and messages have a time limit of their own, counted
  // from when they are issued. An operation that has not ended by then breaks the group with
  // Timeout, as the group's own limit does. Throws Caller for a limit that is not positive, or
  // above the group's, which holds in any case.
  ProcessGroup with_timeout(std::chrono::milliseconds limit) const;
  // Leaves now, as dropping the last handle does, but within a limit of its own: waits until this
  // rank's operations have ended, and the others have completed them too. Throws Timeout with the
  // ranks() that have not; this rank has left then too. If the group is broken, waits for nobody.
  // Afterwards every operation, by any handle of this rank, throws Caller; connections close when
  // the last handle is destroyed. Throws Caller for a limit that is not positive, and if this rank
  // has left before.
  void leave(std::chrono::milliseconds limit);
  // Fails all pending and later operations of this group, on all ranks, with Cancelled and the
  // reason.
  void abort(std::string reason);
  // The latest events of this process, in all its groups and agents, as JSON for weft-debug
  // analyze.
  std::string dump() const;
  // False for an empty group.
  explicit operator bool() const { return core_ != nullptr; }

 private:
  friend struct group::Core;
  explicit ProcessGroup(std::shared_ptr<group::Core> core) : core_(std::move(core)) {}
  group::Core& core() const;
  Work limited(Work work) const;  // by limit_, if that is set
  std::shared_ptr<group::Core> core_;
  std::chrono::milliseconds limit_{0};  // of with_timeout(); 0: only the group's
};

// Blocks until all ranks have joined. Throws Caller for options that contradict each other or a
// missing variable, Timeout naming the event that did not happen, Unsupported if the backend cannot
// be used here.
WEFT_API ProcessGroup init_process_group(ProcessGroupOptions options = {});

}  // namespace weft
