// The implementation behind a ProcessGroup: communicators by device, the order of operations, and
// failures. Internal.
#pragma once

#include <array>
#include <atomic>
#include <functional>
#include <map>
#include <mutex>
#include <set>
#include <span>

#include <weft/base/inheritance.h>
#include <weft/engine/group/carriers.h>
#include <weft/engine/group/failure.h>
#include <weft/engine/group/job.h>
#include <weft/engine/group/joining.h>
#include <weft/engine/group/ledger.h>
#include <weft/engine/group/process_group.h>
#include <weft/engine/group/waits.h>
#include <weft/engine/store/store.h>
#include <weft/engine/tensor/cuda_devices.h>
#include <weft/profiling/trace/operation.h>
#include <weft/transport/transport.h>

namespace weft::group {

// The remedy if a rank does not come to a call.
constexpr const char* kAllCall = "all ranks of the group must call it, in the same order of calls";

struct Core : std::enable_shared_from_this<Core> {
  // Opens the backends. Call join() next, which meets the other ranks. The operations are recorded
  // as those of `as`.
  Core(CoreOptions options, trace::Member as);
  ~Core();

  // Begins to listen to the other ranks, and meets them: see Joining::join().
  void join(Core* parent);

  struct Operation {
    const char* name = "";  // "all_reduce"
    // Describes the arguments that must agree between ranks. Called only with WEFT_DEBUG=detail.
    std::function<std::string()> fingerprint;
    c10::Device device;
    // Pinned until the operation has passed. The first has one shape on all ranks, except in
    // all_to_all.
    std::vector<at::Tensor> tensors;
    // The tensors that change on this rank, as the user gave them. Read by issue() only.
    std::span<const at::Tensor> writes;
    std::optional<ReduceOp> reduction;
    int root = -1;
    transport::Training training = {};
    // Numbers of elements by rank, if the parts differ: a rank must take as many elements as the
    // other sends. Called only with WEFT_DEBUG=detail.
    struct Parts {
      std::vector<std::int64_t> sends, takes;
    };
    std::function<Parts()> parts;
    // Called when all checks have passed. Enqueues on the current stream, after which the operation
    // starts.
    std::function<void()> prepare;
    bool host_waits = false;  // Work::wait() blocks the host, on any device
    bool on_all = false;      // adds a barrier on every other communicator that exists
    // If all tensors are empty here, they are empty on all ranks, so backends that do not compare
    // calls send nothing.
    bool may_skip = true;
    // Host memory only: the operation begins when this fence has passed. Later operations queue
    // behind it.
    Fence begins_after;
  };
  // Orders and issues one collective whose arguments have been checked. `call` runs with
  // issue_mutex held and may append several Ops: the Work is done when all are.
  using Call = std::function<void(transport::Communicator&, const Pin&, const Fence& ready,
                                  std::vector<Op>&)>;
  Work issue(Operation operation, const Call& call);
  // The ranks compare `training`.
  Work all_reduce(const at::Tensor& tensor, ReduceOp op, transport::Training training = {});
  // `begins_after`: see Operation. It may depend on earlier operations, never on later ones.
  Work broadcast(const at::Tensor& tensor, int root, Fence begins_after = {},
                 transport::Training training = {});
  using MessageCall = std::function<Op(transport::PointToPoint&, const Pin&, const Fence& ready)>;
  // Issues one send to `peer`, or a recv from it (kAnySource: from any).
  Work issue_message(const at::Tensor& tensor, int peer, bool is_send, int tag,
                     const MessageCall& call);

  void monitored_barrier(std::chrono::milliseconds timeout);
  ProcessGroup new_group(const std::vector<int>& ranks, const ProcessGroupOptions& wanted);
  ProcessGroup split(int color, int key);
  std::vector<int> living_ranks() const { return ledger->living(); }
  std::vector<std::string> waiting_for() { return options.job->waits->waiting_for(options.name); }
  // Breaks the group unless the operation ends within that time.
  Work limited(Work work, std::chrono::milliseconds limit);
  // Implements ProcessGroup::leave().
  void leave(std::chrono::milliseconds limit);
  // True if that rank of the group has left it, and said so.
  bool has_left(int rank) const;
  // Counts the calls of one kind that all ranks make in the same order: 1, 2, …
  int next_number(const std::string& kind);

  // Throws if this rank has left the group, or like Failure::throw_if_failed().
  void throw_if_broken();
  // Makes a Core and joins. On failure, tells the other ranks why.
  static ProcessGroup make(const CoreOptions& options, Core* parent = nullptr);
  static Core& of(const ProcessGroup& group) { return group.core(); }

  // Throws Caller in a child that was forked after the group was made.
  void require_own() const {
    if (made_in_.is_inherited()) made_in_.throw_inherited(options.self());
  }

  const MadeIn made_in_;
  const CoreOptions options;
  const trace::Member member;
  const std::shared_ptr<StoreBootstrap> bootstrap;
  const std::shared_ptr<Ledger> ledger;
  Failure failure;
  Carriers carriers;
  Joining joining;

  std::mutex issue_mutex;  // held while an operation is issued: the order of operations

 private:
  struct LeaveOnDrop;
  StoreBootstrap meeting(const std::string& base, Waits::Meeting& wait);
  // Ranks that have not set the key base + their rank.
  std::vector<int> absent_from(const std::string& base);
  // For the job's Waits, on any thread. Leaves out an operation that is just being issued.
  std::vector<Waits::Wait> pending();
  Waits::Progress progress();
  std::optional<std::string> call(std::uint64_t number);
  void remember_call(const Operation& operation, std::uint64_t number);
  std::set<int> everybody_else() const;
  std::set<int> count_in(const std::string& base, Deadline deadline);
  void lead_monitored_barrier(const std::string& base, std::chrono::milliseconds timeout);
  void follow_monitored_barrier(const std::string& base, std::chrono::milliseconds timeout);
  void compare_across_ranks(const Operation& operation, std::uint64_t number);
  struct MessageCalled {
    std::string name;
    at::Tensor tensor;
    bool is_send = false;
    int peer = -1;  // kAnySource for a recv from any
    int tag = 0;
    // Counts the messages between the two ranks with that tag. For a recv from any, known only once
    // it has ended.
    std::shared_ptr<std::uint64_t> number;
  };
  // Returns an operation that ends as the message does, or with Caller if the other side called it
  // with another tensor.
  Op compare_message(const Op& op, const MessageCalled& called);
  void listen();
  // Leaves within the group's timeout, unless leave() was called. Logs the operations that did not
  // end in time.
  void leave_at_last();
  // Waits for this rank's operations, and until the others have completed them too. Returns an
  // error for those that were not done within `limit`.
  std::optional<Error> part(std::chrono::milliseconds limit);
  // Warns of messages from other ranks that this rank has not received.
  void warn_of_unreceived();
  // Returns the name of an operation that has not ended by the deadline; "" if all have.
  std::string wait_for_own_operations(Deadline deadline);
  void throw_if_left() const;
  void follow(const Waits::Wait& wait, const Op& op,
              std::function<void(const std::optional<Error>&)> done);
  std::uint64_t begin_collective(const char* name);
  // Counts the messages to or from a rank with a tag: 1, 2, …
  std::uint64_t next_message(bool is_send, int peer, int tag);
  // Makes the group of this rank's color in the `count`-th split() of this group.
  ProcessGroup divide(int count, int color, int key);
  ProcessGroup make_subgroup(const std::vector<int>& ranks, const std::string& prefix,
                             CoreOptions made);

  std::mutex monitored_mutex_;  // held through a monitored barrier: threads of this rank take turns
  // This rank's keys in the store: those of the monitored round that passed last and of later ones,
  // and those of earlier rounds. Guarded by monitored_mutex_.
  std::vector<std::string> monitored_keys_, monitored_stale_;
  // Messages by peer and tag; guarded by numbers_mutex_.
  std::map<std::pair<int, int>, std::uint64_t> sent_, received_;
  std::weak_ptr<Core> handle_;  // the Core as handles hold it, with its LeaveOnDrop
  std::mutex numbers_mutex_;
  std::map<std::string, int> numbers_;
  struct Issued {
    Waits::Wait wait;
    Op op;
    bool receives = false;  // leaving does not wait for it
  };
  std::atomic<bool> has_left_{false};
  void remember(Issued issued);
  std::vector<Issued> unfinished_;  // recent operations, oldest first; guarded by issue_mutex
  // Size of unfinished_ when ended operations were last removed from it; guarded by issue_mutex.
  std::size_t kept_unfinished_ = 0;
  Waits::Wait last_;  // the last operation that was issued; guarded by issue_mutex
  // A collective of this rank, in the terms in which other ranks compare theirs of the same number.
  struct Called {
    std::uint64_t number = 0;
    const char* name = "";
    std::optional<c10::ScalarType> dtype;  // of its first tensor
    c10::DeviceType device = c10::kCPU;
    std::optional<std::uint64_t> bytes;  // of its first tensor, if that has one size on all ranks
    std::optional<ReduceOp> reduction;
    int root = -1;
    transport::Training training = {};
    std::string text() const;
  };
  std::mutex called_mutex_;              // held for moments only
  std::array<Called, 128> called_ = {};  // the latest, at number % size; guarded by called_mutex_
};

// init_process_group() with the given GPUs.
ProcessGroup init(ProcessGroupOptions options, std::shared_ptr<tensor::CudaDevices> devices);

// Puts the operation's name in front of an error, once: a backend's text already begins with
// "all_reduce on group 'x' (shm, rank 0 of 2): ". `place`: keeps the place that such a text names.
Error named(const Error& error, const std::string& what, bool place = true);

struct WorkState {
  std::shared_ptr<Core> core;
  Waits::Wait wait;          // this operation
  std::string_view backend;  // of the communicator
  c10::Device device = c10::Device(c10::kCPU);
  bool host_waits = true;
  bool is_captured = false;  // captured into a CUDA graph
  std::vector<Op> ops;
  std::atomic<bool> seen{false};

  ~WorkState();
  std::optional<Error> error() const;
  Error told(const Error& error) const;
  bool done() const;
  // Makes the stream, which is on the tensors' device, wait. Throws if the operation has failed
  // already.
  void wait_on(const c10::Stream& stream);
};

}  // namespace weft::group
