// SPDX-License-Identifier: Apache-2.0
// The state of one agent: its event loop and threads, the workers that it knows, its connections,
// its outgoing and its incoming calls. Usable from every thread.
#pragma once

#include <atomic>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <string>

#include <weft/base/event_loop.h>
#include <weft/base/inheritance.h>
#include <weft/engine/call/announcements.h>
#include <weft/engine/call/directory.h>
#include <weft/engine/call/extension.h>
#include <weft/engine/call/in_flight.h>
#include <weft/engine/call/incoming_call.h>
#include <weft/engine/call/pending.h>
#include <weft/engine/call/present.h>
#include <weft/engine/call/thread_pool.h>
#include <weft/engine/call/types.h>
#include <weft/engine/call/wire.h>
#include <weft/engine/tensor/cuda_devices.h>
#include <weft/engine/tensor/receive_pool.h>
#include <weft/transport/routes.h>

namespace weft::rpc {

class Peer;
class Inbound;
struct Message;
struct Outgoing;

namespace internal {
// A liveness probe: returns at once.
void alive();
}  // namespace internal

// Counts that show whether an agent is idle.
struct Activity {
  std::uint64_t issued = 0;   // calls made so far
  std::uint64_t waiting = 0;  // calls without a reply
  std::uint64_t running = 0;  // functions and continuations
  friend bool operator==(const Activity&, const Activity&) = default;
  WEFT_FIELDS(issued, waiting, running)
};

// Converts a time limit that a caller gave: none (0) for kNoTimeout, and at most as long as a clock
// can hold. Throws Caller for a negative one; `what` names the limit in the error.
std::chrono::milliseconds usable_limit(std::chrono::milliseconds given, const std::string& what);

// The direction in which a device map is used.
enum class Way {
  Call,   // calls go by the caller's own map
  Reply,  // results go by the inverse of the caller's map
  Back,   // gradients go by the inverse of the map that the receiver's calls went by
};

class AgentCore : public std::enable_shared_from_this<AgentCore> {
 public:
  struct Parts {
    WorkerInfo self;
    std::optional<int> world_size;
    Options options;
    std::shared_ptr<tensor::CudaDevices> devices;
    std::shared_ptr<transport::Bootstrap> store;
    // The same store over a connection of its own, where workers come and go: a thread waits there
    // for announcements.
    std::shared_ptr<transport::Bootstrap> announcements;
    // Kept alive as long as the agent, such as the objects that host the store.
    std::vector<std::shared_ptr<const void>> kept;
    // Make the agent's extensions.
    std::function<std::unique_ptr<ReferenceExtension>(AgentCore&)> make_references;
    std::function<std::unique_ptr<ContextExtension>(AgentCore&)> make_contexts;
  };
  // Joins the job: listens, publishes this worker, waits for the others. A rank of -1 stands for
  // any free rank.
  static std::shared_ptr<AgentCore> make(Parts parts, const std::string& local_address,
                                         Deadline deadline);
  ~AgentCore();

  const WorkerInfo& self() const { return parts_.self; }
  Generation generation() const { return generation_; }
  std::optional<int> world_size() const { return parts_.world_size; }
  const trace::Member& member() const { return member_; }
  const std::shared_ptr<EventLoop>& loop() const { return loop_; }
  const std::shared_ptr<ThreadPool>& thread_pool() const { return thread_pool_; }
  Directory& directory() { return directory_; }
  ReceivePool& receive_pool() { return *receive_pool_; }
  tensor::CudaDevices& devices() { return *parts_.devices; }
  // The GPUs that calls use here.
  const std::vector<int>& gpus() const { return gpus_; }
  const DeviceMaps& device_maps() const { return parts_.options.device_maps; }
  const std::string& token() const { return token_; }
  const std::string& secret() const { return parts_.options.secret; }

  // The ids that this worker assigns begin above it. So a worker that takes over a rank assigns no
  // id of its predecessor's again.
  std::uint64_t first_id() const { return static_cast<std::uint64_t>(generation_) << 32; }

  // --- outgoing calls
  // Throws NotThere if the destination is not in the job, and Caller after shutdown.
  Recipient recipient(const Destination& destination);
  std::chrono::milliseconds limit_of(const Destination& destination) const;
  void set_timeout(std::chrono::milliseconds limit);
  std::chrono::milliseconds timeout() const { return std::chrono::milliseconds(timeout_.load()); }
  // Sends a call to another worker, and returns that worker. Throws the errors of packing; later
  // errors fail `pending`.
  std::shared_ptr<const Member> send_call(const Function& function, const CallOptions& options,
                                          const std::function<void(codec::Packer&)>& pack,
                                          std::unique_ptr<PendingCall> pending);
  // Makes a call to this worker itself. `make` returns the task that runs the function and then
  // completes `pending` by the call's id. If `first` is set, the task runs once that is done.
  void call_here(const Function& function, const CallOptions& options,
                 const std::optional<Future<void>>& first, std::unique_ptr<PendingCall> pending,
                 const std::function<Task(std::uint64_t id)>& make);
  ReferenceExtension& references() { return *references_; }
  ContextExtension& contexts() { return *contexts_; }
  // Completes a call that is still waited for; with Timeout if its deadline has passed.
  void complete_here(std::uint64_t id, const std::function<void(PendingCall&)>& how);

  // --- called by connections
  void reply_came(const WorkerInfo& worker, std::uint64_t lane, Message message,
                  const Error* lacking);
  void lane_ended(Peer& peer, std::uint64_t lane, const Error& why);
  // Numbers all connections to other workers in one series, so that connections to two workers of
  // one rank differ.
  std::uint64_t next_lane() { return ++lanes_; }
  void inbound_ended(Inbound& inbound, const Error& why);
  void knock_ended(const WorkerInfo& worker, std::uint64_t lane, const Error& why);
  // Sends the worker a liveness probe, if anything here depends on it and no probe is under way. A
  // worker that answers too late counts as lost only if it is asked because a connection has ended.
  enum class Asked { ConnectionEnded, ByTheWay };
  void look_after(int rank, Asked why = Asked::ConnectionEnded);
  // Counts failed messages to that worker that will be sent again. As long as there are any, this
  // worker depends on that one.
  void depend_on(int rank, int change);
  // Whether the worker did not answer the last liveness probe, and has sent nothing since.
  bool is_lost(int rank) const;
  void heard_from(int rank);
  // --- workers that come and go (come_and_go.cc)
  // Throws Caller for an empty function, and after the agent has left.
  void on_worker_lost(LostCallback callback);
  void on_worker_joined(JoinedCallback callback);
  bool alive(const Destination& destination);
  // `worker` has its rank in this generation: everything that its predecessors held ends. False if
  // a later generation is known, so that `worker` is outdated.
  bool meets(const WorkerInfo& worker, Generation generation);
  // Whether a later worker of that rank is known.
  bool has_successor(const WorkerGeneration& worker) const;
  // The caller could not read its reply: the references in it end.
  void take_back_reply(int caller, std::uint64_t call);

  // Adds the receiver's devices to the message, by the map, and has it wait for the work on this
  // thread's current streams. Throws Caller for a GPU's tensor that the map has no entry for.
  Outgoing address(codec::Encoded message, const DeviceMap& map, const WorkerInfo& to,
                   Way way) const;
  // Runs `send`, or drops or delays it if Options::faults say so. False if a fault refuses the
  // message, as a connection would.
  bool send_frame(MessageKind kind, std::function<void()> send);

  // Runs the task on the loop after the pause. It is dropped if the agent leaves before, or if
  // drop_pause() is called with the number that this returns.
  std::uint64_t after(std::chrono::milliseconds pause, Task task);
  void drop_pause(std::uint64_t number);
  std::size_t pauses() const;  // pauses that are not over
  // Runs a task that sends to that worker. If its address must be looked up in the store, which may
  // not answer, the task does not run in a turn of the loop but on the thread pool.
  void off_loop(const Recipient& to, Task task);

  // --- incoming calls
  Callers& callers() { return callers_; }
  int calls_in_flight() const { return parts_.options.calls_in_flight; }
  std::uint64_t bytes_in_flight() const {
    return static_cast<std::uint64_t>(parts_.options.bytes_in_flight);
  }
  void count_served() { ++served_; }
  void count_replies(int change) { replies_ += change; }  // replies on their way
  // Watches a call that waits for a thread: tells its caller if it still waits when half of the
  // time left to it is over.
  void watch_for_thread(std::shared_ptr<const CallState> state, std::uint64_t call);
  // Notes the callee's reason why that call waits.
  void note_wait(int callee, std::uint64_t call, const std::string& why);
  // Describes the state here of a call from that caller, as the end of "which …". Empty if this
  // worker does not know the call.
  std::string progress_of(int caller, std::uint64_t call, bool is_fetch) const;
  // The call that a thread here has waited for longest, if that is at least so long.
  std::optional<AwaitedCall> longest_awaited(std::chrono::milliseconds at_least) const;
  // Describes the work that keeps this worker from shutdown(), as far as it is known: "runs f for
  // worker1 (rank 1)", "waits for g on …".
  std::string doing() const;
  void function_started() { ++running_; }
  void function_ended() { --running_; }

  // --- the end
  Activity activity() const;
  void shutdown(const Graceful& options);
  // Another worker calls shutdown() as well. The future is done when nothing is active on any
  // worker, or fails with the reason why that will not be.
  Future<Outcome> join_shutdown(int rank, Deadline limit);
  // Whether this worker waits for rank 0's decision about the shutdown.
  bool awaits_verdict() const { return awaits_verdict_; }
  // Logs, each time a report is due, which workers wait in shutdown() while this one has not called
  // it. On the loop.
  void report_awaited();
  // The workers that have not called shutdown() yet.
  std::vector<int> missing_from_shutdown() const;
  std::string names_of(const std::vector<int>& ranks) const;
  void leave() noexcept;
  // Keeps an object until the agent has left, and then drops it. leave() waits for its destructor.
  void keep_until_left(std::shared_ptr<const void> kept);
  // Throws Caller if the agent has shut down or left; PeerLost if others have taken it for lost.
  void require_open() const;
  bool closed() const { return closed_; }
  // Whether the agent was made in another process, from which this one was forked.
  bool is_inherited() const { return made_in_.is_inherited(); }
  // Throws Caller if it was.
  void require_own() const;
  // Counts a message that is to be sent again as a call that waits, for graceful shutdown.
  void hold_activity(int change) { waiting_ += static_cast<std::uint64_t>(change); }

  // "worker2 (rank 2)" if the name is known without asking the store, else "rank 2".
  std::string name_of(int rank) const;
  DebugInfo debug_info() const;
  // Empty if there is no connection to that worker.
  std::string transport_to(int rank) const;

 private:
  explicit AgentCore(Parts parts);
  void listen(const std::string& local_address, Deadline deadline);
  std::shared_ptr<Peer> peer(const Recipient& to);
  // Null if there is none. Asks no store and makes no connection.
  std::shared_ptr<Peer> known_peer(int rank) const;
  Directory::Entry found(const Recipient& to);
  bool depends_on(int rank) const;
  void ask_whether_alive(int rank);
  void ask_again(int rank);
  void asked_whether_alive(const Recipient& asked, const std::exception_ptr& error, bool was_sent);
  // The Claims::Ask of this agent.
  std::optional<Error> knock(const Directory::Entry& worker, Deadline deadline);
  // Follows the announcements behind the first so many, which were made before this worker read the
  // list of workers.
  void follow_others(long announcements);
  void heard(const Announcement& announcement);
  void came(int rank);
  void watch_neighbours();
  void declare_lost(const Member& worker, const Error& why);
  // The worker has been declared lost: everything that it held, owned and was asked for ends here.
  // Does nothing the second time.
  void worker_gone(const Member& worker, const Error& why);
  // Ends everything that workers of that rank and of earlier generations held, and closes their
  // connections.
  void end_predecessors(int rank, Generation generation, const Error& why);
  void store_lost(const Error& why);
  void taken_for_lost(const std::string& why);
  void tell_news();
  struct Leaving {
    std::uint64_t lane = 0;   // number of the connection; 0 for a call to this worker itself
    std::uint64_t bytes = 0;  // of the message
    trace::Depth& in_flight;  // calls to that worker
    Slot slot = {};           // one place among them, if calls are limited
    HeldBytes held = {};      // its bytes, if bytes are limited
  };
  // Takes room for the call's bytes. The program's own threads wait for room, at most as long as is
  // `left` of the call's time limit (0: none); the time that they waited is subtracted from `left`.
  // Throws Timeout.
  HeldBytes hold_back(const CallOptions& options, const Peer& worker, std::uint64_t bytes,
                      std::chrono::nanoseconds& left);
  void add_waiting(std::uint64_t id, const Function& function, const CallOptions& options,
                   Deadline deadline, std::unique_ptr<PendingCall> pending, Leaving leaving,
                   std::shared_ptr<CallContext> context,
                   std::shared_ptr<SentReferences> references = nullptr,
                   std::shared_ptr<CallState> here = nullptr);
  std::uint64_t next_call();
  std::shared_ptr<CallContext> context_of(const CallOptions& options) const;
  void forget_recorded(std::uint64_t id, const WaitingCall& call) const;
  // Completes the call and returns it.
  WaitingCall complete(WaitingCall call, const std::function<void(PendingCall&)>& how);
  void fail_here(std::uint64_t id, const Error& why);
  // The error of a failed connection to a worker, as the callers see it.
  Error gone(const Error& why, int rank) const;
  // Fails the call if its arguments were changed while they were being sent.
  void check_unchanged(std::uint64_t call, const Function& function, const Peer& to,
                       const codec::SentBytes& sent);
  std::vector<PendingCalls::Taken> fail(std::vector<PendingCalls::Taken> calls,
                                        const std::function<Error(const WaitingCall&)>& why);
  // Names the call in errors.
  std::string in_words(const Function* function, const std::string& to) const;
  Error not_in_time(const WaitingCall& call, const std::string& to) const;
  std::string why_late(const WaitingCall& call) const;
  void tell_of_wait(const CallState& state, std::uint64_t call);
  // Reports on calls that threads here wait for long (awaited.cc). On the loop.
  void look_for_waits();
  void report_wait();
  void ask_about(const AwaitedCall& call);
  void say_awaited(const AwaitedCall& call, const std::string& what_callee_does) const;
  std::string progress(const CallState& call, bool is_fetch) const;
  Error left(const WaitingCall& call, const std::string& to) const;
  Error why_gone() const;
  void arm(Deadline deadline);
  void expire();
  void late_reply_came(const WaitingCall& call, const WorkerInfo& worker, Message message,
                       const Error* lacking);
  void accept(std::shared_ptr<transport::Connection> connection, bool carries_devices);
  void serve(std::shared_ptr<transport::Connection> connection, bool carries_devices);
  void shut_down(std::chrono::milliseconds limit, const std::string& what);
  void wait_for_shutdown(std::chrono::milliseconds limit, const std::string& what) const;
  // Asks another worker for its doing(); says so if it does not answer.
  std::string doing_of(int rank);
  Outcome await_verdict(const Future<Outcome>& verdict);
  template <class Body>
  bool answers(const std::vector<int>& ranks);
  void wait_until_idle_everywhere(Deadline deadline);
  void wait_for_own_calls(Deadline deadline);
  void report_held() const;
  // Why a worker is gone whose shutdown() this one decides on. Call it without mutex_.
  Error why_gone(int rank) const;
  void tell_verdict(const Outcome& verdict, Deadline deadline);

  // Frees the memory that connections have retired. That must wait for the end of the loop, which
  // keeps the connections alive.
  struct Reclaiming {
    tensor::CudaDevices& devices;
    bool may_block = true;
    ~Reclaiming();
  };

  const MadeIn made_in_;
  Parts parts_;
  Reclaiming reclaiming_{*parts_.devices};
  trace::Member member_;  // set when the rank is known
  const std::shared_ptr<EventLoop> loop_;
  // Declared before the thread pool: making it may throw, and the pool's threads begin at once.
  transport::Routes routes_;
  const std::shared_ptr<ThreadPool> thread_pool_;
  Directory directory_;
  trace::Depth& own_calls_;  // calls in flight to this worker itself
  const std::shared_ptr<ReceivePool> receive_pool_ = std::make_shared<ReceivePool>();
  std::vector<int> gpus_;      // set when it has joined; fixed from then on
  Generation generation_ = 0;  // set when it has joined
  std::string token_;
  std::atomic<std::chrono::milliseconds::rep> timeout_;

  const std::unique_ptr<ReferenceExtension> references_;
  const std::unique_ptr<ContextExtension> contexts_;
  PresentWorkers present_;  // where workers come and go
  News news_;
  PendingCalls calls_;
  Callers callers_;
  std::atomic<std::uint64_t> next_call_{1};
  std::atomic<std::uint64_t> issued_{0};  // calls except those of a shutdown; so is waiting_
  std::atomic<std::uint64_t> waiting_{0};
  std::atomic<std::size_t> held_back_{0};
  std::atomic<std::uint64_t> served_{0};
  std::atomic<std::uint64_t> lanes_{0};
  std::atomic<int> replies_{0};
  std::atomic<int> watched_{0};  // calls watched by watch_for_thread()
  std::atomic<std::uint64_t> running_{0};

  std::atomic<bool> closed_{false};
  // Set if the program did not ask it to leave; written before taken_for_lost_ is set.
  std::string why_left_;
  std::atomic<bool> taken_for_lost_{false};

  mutable std::mutex mutex_;  // guards the members below
  std::map<int, std::shared_ptr<Peer>> peers_;
  std::map<const Inbound*, std::shared_ptr<Inbound>> inbound_;
  struct Early {
    std::shared_ptr<transport::Connection> connection;
    bool carries_devices = false;
  };
  std::vector<Early> early_;  // connections accepted before this worker had joined
  // On rank 0: the other workers, by rank, that wait for it to decide that all are idle.
  struct ShuttingDown {
    Promise<Outcome> verdict;
    Deadline limit = Deadline::never();  // limit of its shutdown()
  };
  std::map<int, ShuttingDown> shutting_down_;
  // On rank 0: the times at which to report that others wait in shutdown(), which it has not
  // called. On the loop.
  std::optional<Patience> awaited_here_;
  EventLoop::Registration reports_awaited_;
  // Reports on threads that wait for calls. On the loop, except asks_for_report_.
  std::atomic<bool> asks_for_report_{false};  // the callee of a call to report is being asked
  std::size_t said_level_ = 0;                // the level of the last report, and its time
  Deadline::Clock::time_point said_at_{};
  EventLoop::Registration looks_for_waits_;
  // When the timer fires.
  std::atomic<Deadline::Clock::time_point> armed_{Deadline::Clock::time_point::max()};
  EventLoop::Registration timer_;
  struct Pause {
    Task task;  // it may refer to the agent; a timer's own task would live as long as the loop
    EventLoop::Registration timer;
  };
  std::map<std::uint64_t, Pause> pauses_;  // those of after()
  std::uint64_t next_pause_ = 1;
  std::map<MessageKind, int> refused_;  // messages refused so far, for Faults::fail_first
  bool joined_ = false;                 // from then on connections are read
  bool shutdown_began_ = false;
  std::atomic<bool> awaits_verdict_{false};
  const Promise<void> shutdown_ended_{nullptr};  // done when the first shutdown() is
  std::shared_ptr<const void> kept_until_left_;
  std::unique_ptr<Follower> follower_;  // where workers come and go
  // The latest generation that is known of each rank, where workers come and go.
  std::map<int, Generation> generations_;
  std::set<int> lost_;  // ranks of workers that cannot be reached any more
  // Number of failed messages that will be sent again, by the rank that they go to.
  std::map<int, int> dependent_;
  struct Inquiry {
    Asked why = Asked::ByTheWay;
    int failed = 0;  // attempts to ask that failed
  };
  std::map<int, Inquiry> inquiries_;  // those under way, by rank
  // Calls to others, by id, whose time is over and whose replies have not come: the references in
  // them must end, too. Weft's own messages hold no references and are not kept.
  std::map<std::uint64_t, WaitingCall> late_;
  // Number of such calls that were dropped for lack of room, by the callee's rank and the
  // connection.
  std::map<std::pair<int, std::uint64_t>, std::size_t> forgotten_;
};

}  // namespace weft::rpc
