// What stands behind a ProcessGroup: the communicators by device, the order of operations, what
// went wrong. Internal.
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

// What to do where a rank does not come to a call.
constexpr const char* kAllCall = "all ranks of the group must call it, in the same order of calls";
// A connection may break before it is told whose loss was behind that: how long to wait for it.
constexpr auto kLossIsTold = std::chrono::seconds(1);

// One device type's way of travelling. The communicator is made at the first use on CUDA, at once
// on the host.
struct Carrier {
  std::string named;    // the backend that the program, or the default, names
  std::string backend;  // the one that carries; "" = none, for the reason in why_not
  std::string why_not;
  bool staged = false;  // CUDA tensors travel through host memory
  std::shared_ptr<transport::Transport> transport;
  std::shared_ptr<transport::Communicator> communicator;
  c10::Device device = c10::Device(c10::kCPU);  // whose tensors the communicator takes
};

// What the groups of one init_process_group share.
struct Job {
  std::shared_ptr<EventLoop> loop;
  std::shared_ptr<Membership> membership;
  std::shared_ptr<Waits> waits;
  std::atomic<bool> connected{false};  // set once the first communicator of the first group is made
  std::string local_address;
  bool hosts_store = false;  // of c10d's, to which the ranks connect
  std::shared_ptr<tensor::CudaDevices> devices;
  const std::shared_ptr<Continuations> continuations = std::make_shared<Continuations>();
  std::shared_ptr<const void> looked_into;  // while it lives (engine/instruments)

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
  c10::intrusive_ptr<c10d::Store> store;  // prefixed for this group; what the user gets
  c10::intrusive_ptr<c10d::Store>
      own_store;        // the same over the connection that all groups share (connection_of)
  std::string backend;  // as the user wrote it
  std::string said_by;  // where its rank and size are from, for messages; "" for a later group
  std::shared_ptr<Job> job;
};

struct Core : std::enable_shared_from_this<Core> {
  // Opens the backends; join() then meets the other ranks.
  explicit Core(CoreOptions options);
  ~Core();

  // Meets the other ranks. Throws Timeout saying who did not come, PeerLost saying who was lost
  // meanwhile. `parent`: the group of which all ranks make this one; aborting it ends this, and who
  // leaves it does not come.
  void join(Core* parent);

  struct Operation {
    const char* name = "";  // "all_reduce"
    std::function<std::string()>
        fingerprint;  // what must agree between ranks; asked for with WEFT_DEBUG=detail only
    c10::Device device;
    std::vector<at::Tensor> tensors;  // pinned until the operation has passed; but in all_to_all,
                                      // the first has one shape on all ranks
    std::span<const at::Tensor> writes;  // the tensors that change on this rank, as the user gave
                                         // them; read by issue() only
    std::optional<ReduceOp> reduction;
    int root = -1;
    transport::Training training = {};
    // By rank, of elements, where parts differ: what one rank sends another it must take. Asked for
    // with detail only.
    struct Parts {
      std::vector<std::int64_t> sends, takes;
    };
    std::function<Parts()> parts;
    std::function<void()>
        prepare;  // once nothing refuses it any more; on the current stream, which it starts behind
    bool host_waits = false;  // Work::wait() blocks the host, whatever the device
    bool on_all = false;      // communicators that there are: a barrier of what each has in flight
    bool may_skip = true;     // if all tensors are empty here they are empty on all ranks: backends
                              // that cannot tell send nothing
    Fence begins_after;  // host memory: it begins when this has passed; what comes behind it waits
                         // in line
  };
  // Orders and issues one collective, whose arguments have been checked. `call` runs under the
  // group's lock and may append several Ops: the Work is done when all are.
  using Call = std::function<void(transport::Communicator&, const Pin&, const Fence& ready,
                                  std::vector<Op>&)>;
  Work issue(Operation operation, const Call& call);
  // `training`: the ranks compare it.
  Work all_reduce(const at::Tensor& tensor, ReduceOp op, transport::Training training = {});
  // `begins_after`: see there. It may wait for operations before this one, never for later ones.
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
  // The operation breaks the group unless it has ended within that time.
  Work limited(Work work, std::chrono::milliseconds limit);
  // As the public one.
  void leave(std::chrono::milliseconds limit);
  // Whether that rank of the group has left it, and said so.
  bool has_left(int rank) const;
  // Where a barrier runs: the group's device if a backend carries it, else the host.
  c10::Device barrier_device() const;
  // Where values of the host travel (counts, orders, bytes): the host if a backend carries it, else
  // the group's device.
  c10::Device host_values_device() const;
  bool carries(c10::DeviceType type) const;
  // Counts what all ranks do in the same order, by kind: 1, 2, …
  int next_number(const std::string& kind);

  // The communicator for tensors of this device; makes it if need be. Throws Caller where there is
  // none.
  transport::Communicator& communicator(c10::Device device);
  const Carrier& carrier(c10::Device device) const;

  // Fails what is pending and all that comes. The first reason stays. From any thread.
  void fail(const Error& why);
  // A backend's error as the group understands it: where a connection broke, the rank that was
  // lost, if that is known or becomes known in a moment. May block for that moment.
  Error explain(const Error& error);
  // The same for threads that must not block: calls `done` with it, here and now or in that moment
  // on another thread.
  using Explained = std::function<void(const Error& why)>;
  void explain_later(const Error& error, Explained done);
  // A time-out, with the ranks that did not come to the operation. Asks them, and may block for a
  // second then.
  Error with_absent(const Error& timeout, const Waits::Wait& wait);
  // Whether that error of an operation breaks the group.
  static bool breaks_group(const Waits::Wait& operation, const Error& error);
  void throw_if_broken();
  // The same, but for the loss of a rank, which it gives: groups may be made of the others.
  std::optional<Error> loss();
  // An operation failed and nobody holds its Work any more.
  void note_unseen(const Error& error);
  std::string self() const;   // "group 'x' (rank 0 of 2)"
  std::string place() const;  // "on " and that
  void check_rank(int rank, const char* what) const;

  // Makes one and joins. On failure the other ranks are told why.
  static ProcessGroup make(const CoreOptions& options, Core* parent = nullptr);
  static Core& of(const ProcessGroup& group) { return group.core(); }

  // Throws Caller in a child that was forked after the group was made.
  void require_own() const {
    if (made_in_.is_inherited()) made_in_.throw_inherited(self());
  }

  const MadeIn made_in_;
  const CoreOptions options;
  std::shared_ptr<StoreBootstrap> bootstrap;

  std::mutex issue_mutex;  // the order of operations

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
  // Ranks that have not set base + their number.
  std::vector<int> absent_from(const std::string& base);
  // For the job's Waits, on any thread. An operation that is just being issued is not among them.
  std::vector<Waits::Wait> pending();
  Waits::Progress progress();
  std::optional<std::string> call(std::uint64_t number);
  void remember_call(const Operation& operation, std::uint64_t number);
  // Breaks the group on all ranks, whose calls differ.
  void differ(const std::string& how);
  bool agrees_with_first(c10::DeviceType type);
  std::string backends() const;
  // Now, or until that time is over.
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
  Error explained(const Error& error) const;  // by what is known now; under error_mutex_
  void explain_waiting();
  // Calls `tell`, whether it is the first failure or not, when this rank has its reason and before
  // connections break: what the others do then, as leaving the job, is no other reason here.
  void fail(const Error& why, const std::function<void()>& tell);
  // Members that have not said that they join.
  std::vector<int> missing_ranks();
  Error not_come(const std::vector<int>& ranks) const;
  std::string joining_what() const;
  std::string joining_hint() const;
  void compare_across_ranks(const Operation& operation, std::uint64_t number);
  struct MessageCalled {
    std::string name;
    at::Tensor tensor;
    bool is_send = false;
    int peer = -1;  // of a recv from any: transport::kAnySource
    int tag = 0;
    // Of the messages between the two with that tag; of a recv from any it is known once that has
    // ended.
    std::shared_ptr<std::uint64_t> number;
  };
  // Returns an operation that ends as the message does, or with Caller where the other side calls
  // it with another tensor.
  Op compare_message(const Op& op, const MessageCalled& called);
  void listen();
  // Leaves within the group's timeout, where leave() has not been called; logs what it could not
  // wait for.
  void leave_at_last();
  // Waits for this rank's operations, and until the others have completed them too. Gives what was
  // not done by the deadline, `limit` from now.
  std::optional<Error> part(std::chrono::milliseconds limit);
  void tell_leaving_broken();
  // Warns of messages of others that nobody here has received.
  void warn_of_unreceived();
  // Gives the name of one that has not ended by the deadline; "" where all have.
  std::string wait_for_own_operations(Deadline deadline);
  void throw_if_left() const;
  void follow(const Waits::Wait& wait, const Op& op,
              std::function<void(const std::optional<Error>&)> done);
  std::uint64_t begin_collective(const char* name);
  // Counts the messages to, or from, a rank with a tag: 1, 2, …
  std::uint64_t next_message(bool is_send, int peer, int tag);
  // What split() makes, the `count`-th of this group.
  ProcessGroup divide(int count, int color, int key);
  ProcessGroup make_subgroup(const std::vector<int>& ranks, const std::string& prefix,
                             CoreOptions made);

  const trace::Member member_;
  std::mutex monitored_mutex_;  // held through a monitored barrier: threads of this rank take turns
  // This rank's keys in the store: of the monitored round that passed last and of those since; and
  // of all before. Guarded by it.
  std::vector<std::string> monitored_keys_, monitored_stale_;
  std::map<std::pair<int, int>, std::uint64_t> sent_,
      received_;                // messages by peer and tag; guarded by numbers_mutex_
  Core* parent_ = nullptr;      // while join() runs, for the thread in it
  std::weak_ptr<Core> handle_;  // as handles hold it, with the LeaveOnDrop
  std::mutex making_mutex_;     // of communicators: one is made at a time
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
  std::size_t kept_unfinished_ =
      0;  // that had not ended when those that had were forgotten; guarded by issue_mutex
  Waits::Wait last_;  // the last operation that was issued; guarded by issue_mutex
  // A collective of this rank, as far as other ranks can compare theirs of the same number with it.
  struct Called {
    std::uint64_t number = 0;
    const char* name = "";
    std::optional<c10::ScalarType> dtype;  // of its first tensor
    c10::DeviceType device = c10::kCPU;
    std::optional<std::uint64_t> bytes;  // of its first tensor, where it has one size on all ranks
    std::optional<ReduceOp> reduction;
    int root = -1;
    transport::Training training = {};
    std::string text() const;
  };
  std::mutex called_mutex_;              // held for moments only
  std::array<Called, 128> called_ = {};  // the last ones, by number; guarded by called_mutex_
  std::optional<Waits::Absent>
      absent_;  // who did not come to the operation whose time-out broke the group; error_mutex_
  std::mutex error_mutex_;
  std::condition_variable broken_changed_;
  std::optional<Error> broken_;  // within self()
  std::string reason_;           // the same without it
  std::optional<Error> unseen_;
  std::vector<std::pair<Error, Explained>> unexplained_;  // guarded by error_mutex_
  EventLoop::Registration explaining_;  // the end of their moment; guarded by error_mutex_
  std::shared_ptr<HostFlag> joining_;   // raised to end meet(); guarded by error_mutex_
};

// init_process_group, with the GPUs to use.
ProcessGroup init(ProcessGroupOptions options, std::shared_ptr<tensor::CudaDevices> devices);

// The error of an operation, with the operation's name once: a backend's text begins with
// "all_reduce on group 'x' (shm, rank 0 of 2): ". `place`: whether the text says where, too.
Error named(const Error& error, const std::string& what, bool place = true);

struct WorkState {
  std::shared_ptr<Core> core;
  Waits::Wait wait;          // this operation
  std::string_view backend;  // the communicator's
  c10::Device device = c10::Device(c10::kCPU);
  bool host_waits = true;
  bool is_captured = false;  // into a CUDA graph
  std::vector<Op> ops;
  std::atomic<bool> seen{false};

  ~WorkState();
  std::optional<Error> error() const;
  Error told(const Error& error) const;
  bool done() const;
  // The stream, of the tensors' device, waits. Throws if the operation has failed already.
  void wait_on(const c10::Stream& stream);
};

}  // namespace weft::group
