// The implementation behind a ProcessGroup: communicators by device, the order of operations, and
// failures. Internal.
#pragma once

#include <array>
#include <atomic>
#include <condition_variable>
#include <functional>
#include <map>
#include <mutex>
#include <set>
#include <span>

#include <weft/base/event_loop.h>
#include <weft/base/inheritance.h>
#include <weft/engine/group/continuations.h>
#include <weft/engine/group/ledger.h>
#include <weft/engine/group/process_group.h>
#include <weft/engine/group/waits.h>
#include <weft/engine/membership/membership.h>
#include <weft/engine/store/store.h>
#include <weft/engine/tensor/cuda_devices.h>
#include <weft/profiling/trace/operation.h>
#include <weft/transport/transport.h>

namespace weft::group {

// The remedy if a rank does not come to a call.
constexpr const char* kAllCall = "all ranks of the group must call it, in the same order of calls";
// How long to wait for the news of a lost rank: its connections may break before this rank hears of
// the loss.
constexpr auto kLossIsTold = std::chrono::seconds(1);

// How tensors of one device type travel. The communicator is made at once on the host, at the first
// use on CUDA.
struct Carrier {
  std::string named;    // the backend that the program or the default names
  std::string backend;  // the backend in use; "" = none, for the reason in why_not
  std::string why_not;
  bool staged = false;  // CUDA tensors travel through host memory
  std::shared_ptr<transport::Transport> transport;
  std::shared_ptr<transport::Communicator> communicator;
  c10::Device device = c10::Device(c10::kCPU);  // the device whose tensors the communicator takes
};

// State that all groups of one init_process_group share.
struct Job {
  std::shared_ptr<EventLoop> loop;
  std::shared_ptr<Membership> membership;
  std::shared_ptr<Waits> waits;
  std::atomic<bool> connected{false};  // set once the first communicator of the first group is made
  std::string local_address;
  bool hosts_store = false;  // this process hosts c10d's store, to which the ranks connect
  std::shared_ptr<tensor::CudaDevices> devices;
  const std::shared_ptr<Continuations> continuations = std::make_shared<Continuations>();
  std::shared_ptr<const void> looked_into;  // keeps engine/instruments running while it lives

  Job() = default;
  Job(const Job&) = delete;
  Job& operator=(const Job&) = delete;
  ~Job();
};

struct CoreOptions {
  int rank = 0;
  int size = 1;
  std::string name;
  c10::Device device = c10::Device(c10::kCPU);
  std::chrono::milliseconds timeout{};
  std::vector<int> global_ranks;
  c10::intrusive_ptr<c10d::Store> store;  // prefixed for this group; the one that the user gets
  // The same over the connection that all groups share (connection_of).
  c10::intrusive_ptr<c10d::Store> own_store;
  std::string backend;  // as the user wrote it
  std::string said_by;  // source of rank and size, for messages; "" for a later group
  std::shared_ptr<Job> job;
};

struct Core : std::enable_shared_from_this<Core> {
  // Opens the backends. Call join() next, which meets the other ranks.
  explicit Core(CoreOptions options);
  ~Core();

  // Meets the other ranks. Throws Timeout naming the ranks that did not come, PeerLost naming a
  // rank that was lost meanwhile. `parent` is the group whose ranks make this one: aborting it ends
  // the joining, and a rank that leaves it will not come.
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
  std::vector<int> living_ranks() const { return ledger_->living(); }
  std::vector<std::string> waiting_for() { return options.job->waits->waiting_for(options.name); }
  void abort(const std::string& reason);
  std::optional<Error> error();
  // Breaks the group unless the operation ends within that time.
  Work limited(Work work, std::chrono::milliseconds limit);
  // Implements ProcessGroup::leave().
  void leave(std::chrono::milliseconds limit);
  // True if that rank of the group has left it, and said so.
  bool has_left(int rank) const;
  // The device of barriers: the group's device if a backend carries it, else the host.
  c10::Device barrier_device() const;
  // The device on which host values travel (counts, orders, bytes): the host if a backend carries
  // it, else the group's device.
  c10::Device host_values_device() const;
  bool carries(c10::DeviceType type) const;
  // Counts the calls of one kind that all ranks make in the same order: 1, 2, …
  int next_number(const std::string& kind);

  // Returns the communicator for tensors of this device; makes it if need be. Throws Caller if no
  // backend carries them.
  transport::Communicator& communicator(c10::Device device);
  const Carrier& carrier(c10::Device device) const;

  // Fails all pending and later operations. The first reason stays. May be called on any thread.
  void fail(const Error& why);
  // Turns a backend's error into the group's. If a connection broke, names the rank that was lost,
  // if that is known or becomes known within kLossIsTold; may block that long.
  Error explain(const Error& error);
  // The same for threads that must not block: calls `done` with the error, at once on this thread,
  // or within kLossIsTold on another.
  using Explained = std::function<void(const Error& why)>;
  void explain_later(const Error& error, Explained done);
  // Adds to a time-out the ranks that did not come to the operation. Asks them, and may then block
  // for a second.
  Error with_absent(const Error& timeout, const Waits::Wait& wait);
  // True if this error of an operation breaks the group.
  static bool breaks_group(const Waits::Wait& operation, const Error& error);
  void throw_if_broken();
  // Throws like throw_if_broken(), but returns the loss of a rank: groups may be made of the
  // others.
  std::optional<Error> loss();
  // Keeps the error of an operation whose Work nobody holds any more.
  void note_unseen(const Error& error);
  std::string self() const;   // "group 'x' (rank 0 of 2)"
  std::string place() const;  // "on " + self()
  void check_rank(int rank, const char* what) const;

  // Makes a Core and joins. On failure, tells the other ranks why.
  static ProcessGroup make(const CoreOptions& options, Core* parent = nullptr);
  static Core& of(const ProcessGroup& group) { return group.core(); }

  // Throws Caller in a child that was forked after the group was made.
  void require_own() const {
    if (made_in_.is_inherited()) made_in_.throw_inherited(self());
  }

  const MadeIn made_in_;
  const CoreOptions options;
  std::shared_ptr<StoreBootstrap> bootstrap;

  std::mutex issue_mutex;  // held while an operation is issued: the order of operations

 private:
  struct LeaveOnDrop;
  std::shared_ptr<transport::Communicator> meet(const Carrier& carrier, c10::DeviceType type,
                                                const transport::JoinOptions& join);
  void meet_members();
  void await_members();
  void throw_if_hopeless();
  void throw_if_out_of_reach();
  void throw_if_left_without(const std::function<bool(int rank)>& came) const;
  StoreBootstrap meeting(const std::string& base, Waits::Meeting& wait);
  // Ranks that have not set the key base + their rank.
  std::vector<int> absent_from(const std::string& base);
  // For the job's Waits, on any thread. Leaves out an operation that is just being issued.
  std::vector<Waits::Wait> pending();
  Waits::Progress progress();
  std::optional<std::string> call(std::uint64_t number);
  void remember_call(const Operation& operation, std::uint64_t number);
  // Breaks the group on all ranks because their calls differ.
  void differ(const std::string& how);
  bool agrees_with_first(c10::DeviceType type);
  std::string backends() const;
  // True if the group is broken, now or within that time.
  bool is_broken(std::chrono::milliseconds within = {});
  void by_the_store(const std::function<void()>& meet);
  std::set<int> everybody_else() const;
  std::set<int> count_in(const std::string& base, Deadline deadline);
  void lead_monitored_barrier(const std::string& base, std::chrono::milliseconds timeout);
  void follow_monitored_barrier(const std::string& base, std::chrono::milliseconds timeout);
  void throw_broken();
  void make_communicator(Carrier& carrier, const c10::Device& device);
  void throw_if_aborted();
  Error with_hint(const Error& error) const;
  Error explained(const Error& error) const;  // by the present knowledge; requires error_mutex_
  void explain_waiting();
  // Also calls `tell`, for every failure and not only for the first: after this rank has stored its
  // reason and before connections break. So nothing that the others do upon it, such as leaving the
  // job, becomes the reason here.
  void fail(const Error& why, const std::function<void()>& tell);
  // Members that have not announced that they join.
  std::vector<int> missing_ranks();
  Error not_come(const std::vector<int>& ranks) const;
  std::string joining_what() const;
  std::string joining_hint() const;
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
  void tell_leaving_broken();
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

  const trace::Member member_;
  std::mutex monitored_mutex_;  // held through a monitored barrier: threads of this rank take turns
  // This rank's keys in the store: those of the monitored round that passed last and of later ones,
  // and those of earlier rounds. Guarded by monitored_mutex_.
  std::vector<std::string> monitored_keys_, monitored_stale_;
  // Messages by peer and tag; guarded by numbers_mutex_.
  std::map<std::pair<int, int>, std::uint64_t> sent_, received_;
  Core* parent_ = nullptr;      // set while join() runs, for the thread in it
  std::weak_ptr<Core> handle_;  // the Core as handles hold it, with its LeaveOnDrop
  std::mutex making_mutex_;     // held while a communicator is made: one at a time
  std::map<c10::DeviceType, Carrier> carriers_;  // their communicators change under error_mutex_
  std::mutex numbers_mutex_;
  std::map<std::string, int> numbers_;
  std::shared_ptr<Ledger> ledger_;
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
  // Ranks that did not come to the operation whose time-out broke the group; guarded by
  // error_mutex_.
  std::optional<Waits::Absent> absent_;
  std::mutex error_mutex_;
  std::condition_variable broken_changed_;
  std::optional<Error> broken_;  // the first failure, with self(); guarded by error_mutex_
  std::string reason_;           // its text without self(); guarded by error_mutex_
  std::optional<Error> unseen_;
  std::vector<std::pair<Error, Explained>> unexplained_;  // guarded by error_mutex_
  EventLoop::Registration explaining_;  // the timer for these; guarded by error_mutex_
  std::shared_ptr<HostFlag> joining_;   // raised to end meet(); guarded by error_mutex_
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
