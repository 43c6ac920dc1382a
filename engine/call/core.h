// The state of one agent: its loop and threads, the workers it knows, its connections, the calls
// that wait here and those that run here. Usable from every thread.
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

// What tells whether an agent is idle.
struct Activity {
  std::uint64_t issued = 0;   // calls, ever
  std::uint64_t waiting = 0;  // calls without a reply
  std::uint64_t running = 0;  // functions and continuations
  friend bool operator==(const Activity&, const Activity&) = default;
  WEFT_FIELDS(issued, waiting, running)
};

// A time limit as a caller gives it, without kNoTimeout and what no clock can hold: 0 for none.
// Throws Caller for a negative one; `what` is whose it is.
std::chrono::milliseconds usable_limit(std::chrono::milliseconds given, const std::string& what);

// Which of a worker's tensors a device map is for.
enum class Way {
  Call,   // by this worker's own map
  Reply,  // by the inverse of the caller's
  Back,   // gradients, by the inverse of the map that the receiver's calls went by
};

class AgentCore : public std::enable_shared_from_this<AgentCore> {
 public:
  struct Parts {
    WorkerInfo self;
    std::optional<int> world_size;
    Options options;
    std::shared_ptr<tensor::CudaDevices> devices;
    std::shared_ptr<transport::Bootstrap> store;
    // The same over a connection of its own, where workers come and go: a thread waits there for
    // what they announce.
    std::shared_ptr<transport::Bootstrap> announcements;
    std::vector<std::shared_ptr<const void>> kept;  // while the agent lives: what hosts the store
    // Make the agent's extensions.
    std::function<std::unique_ptr<ReferenceExtension>(AgentCore&)> make_references;
    std::function<std::unique_ptr<ContextExtension>(AgentCore&)> make_contexts;
  };
  // Joins the job: listens, publishes, waits for the others. A rank of -1 stands for one that is
  // free.
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

  // What this worker numbers begins above it: where a rank comes again, nobody takes its things for
  // its predecessor's.
  std::uint64_t first_id() const { return static_cast<std::uint64_t>(generation_) << 32; }

  // --- calls from here
  // Throws Caller for a destination that is not there, and after shutdown.
  Recipient recipient(const Destination& destination);
  std::chrono::milliseconds limit_of(const Destination& destination) const;
  void set_timeout(std::chrono::milliseconds limit);
  std::chrono::milliseconds timeout() const { return std::chrono::milliseconds(timeout_.load()); }
  // Sends a call to another worker, and gives whom it goes to. Throws what packing throws; what
  // fails later fails `pending`.
  std::shared_ptr<const Member> send_call(const Function& function, const CallOptions& options,
                                          const std::function<void(codec::Packer&)>& pack,
                                          std::unique_ptr<PendingCall> pending);
  // A call to this worker itself: `task` runs the function, then takes `pending` back by the number
  // and completes it. `first` is waited for.
  void call_here(const Function& function, const CallOptions& options,
                 const std::optional<Future<void>>& first, std::unique_ptr<PendingCall> pending,
                 const std::function<Task(std::uint64_t id)>& make);
  ReferenceExtension& references() { return *references_; }
  ContextExtension& contexts() { return *contexts_; }
  // Completes a call that is still waited for.
  void complete_here(std::uint64_t id, const std::function<void(PendingCall&)>& how);

  // --- what connections tell
  void reply_came(const WorkerInfo& worker, std::uint64_t lane, Message message,
                  const Error* lacking);
  void lane_ended(Peer& peer, std::uint64_t lane, const Error& why);
  // Of all connections to others, one after the other: those of a rank that comes again are others.
  std::uint64_t next_lane() { return ++lanes_; }
  void inbound_ended(Inbound& inbound, const Error& why);
  void knock_ended(const WorkerInfo& worker, std::uint64_t lane, const Error& why);
  // Asks the worker for a sign of life, if anything here depends on it, and unless it is being
  // asked already. Who is slow keeps what it holds, unless it is asked because a connection has
  // ended.
  enum class Asked { ConnectionEnded, ByTheWay };
  void look_after(int rank, Asked why = Asked::ConnectionEnded);
  // While a message to it failed, and will be sent again, this worker depends on it.
  void depend_on(int rank, int change);
  // Whether it gave no sign of life when it was last asked, and none since.
  bool is_lost(int rank) const;
  void heard_from(int rank);
  // --- workers that come and go (come_and_go.cc)
  // Throws Caller for an empty function, and where the agent has left.
  void on_worker_lost(LostCallback callback);
  void on_worker_joined(JoinedCallback callback);
  bool alive(const Destination& destination);
  // Somebody of that rank is there: whoever had it before has left, and what that held ends. False:
  // this one has left.
  bool meets(const WorkerInfo& worker, Generation generation);
  // Whether a later one of that rank was met.
  bool has_successor(const WorkerGeneration& worker) const;
  // A caller could not read its reply.
  void take_back_reply(int caller, std::uint64_t call);

  // The message with the devices that its storages go to, behind what this thread's current streams
  // hold. Throws Caller for a GPU's tensor that has no place in the map.
  Outgoing address(codec::Encoded message, const DeviceMap& map, const WorkerInfo& to,
                   Way way) const;
  // Runs `send`, or does with it what the faults say. False: refused, as if by the connection.
  bool send_frame(MessageKind kind, std::function<void()> send);

  // Runs the task on the loop, unless the agent leaves before, or drop_pause() is called with the
  // number that this returns: then it is dropped.
  std::uint64_t after(std::chrono::milliseconds pause, Task task);
  void drop_pause(std::uint64_t number);
  std::size_t pauses() const;  // that last
  // For a task that sends to the worker: not in a turn of the loop where the address has yet to be
  // looked up in the store, which may not answer.
  void off_loop(const Recipient& to, Task task);

  // --- calls served here
  Callers& callers() { return callers_; }
  int calls_in_flight() const { return parts_.options.calls_in_flight; }
  std::uint64_t bytes_in_flight() const {
    return static_cast<std::uint64_t>(parts_.options.bytes_in_flight);
  }
  void count_served() { ++served_; }
  void count_replies(int change) { replies_ += change; }  // on their way
  // Tells the caller of a call that waits for a thread for half of the time that is left to it.
  void watch_for_thread(std::shared_ptr<const CallState> state, std::uint64_t call);
  // The callee says why that call waits.
  void note_wait(int callee, std::uint64_t call, const std::string& why);
  // What this worker does with a call of that caller's, as the end of "which …"; empty where it
  // does not know the call.
  std::string progress_of(int caller, std::uint64_t call, bool is_fetch) const;
  // The call that a thread here has waited for longest, and as long as that at least.
  std::optional<AwaitedCall> longest_awaited(std::chrono::milliseconds at_least) const;
  // What keeps this worker from shutdown(), as far as it is known: "runs f for worker1 (rank 1)",
  // "waits for g on …".
  std::string doing() const;
  void function_started() { ++running_; }
  void function_ended() { --running_; }

  // --- the end
  Activity activity() const;
  void shutdown(const Graceful& options);
  // Another worker shuts down as well: done when nothing is active anywhere, or with why that will
  // not be.
  Future<Outcome> join_shutdown(int rank, Deadline limit);
  // Whether this worker waits for what rank 0 decides about the shutdown.
  bool awaits_verdict() const { return awaits_verdict_; }
  // Says, each time that it is due, which workers wait in shutdown() while this one has not called
  // it. On the loop.
  void report_awaited();
  // The workers that have not called shutdown() yet.
  std::vector<int> missing_from_shutdown() const;
  std::string names_of(const std::vector<int>& ranks) const;
  void leave() noexcept;
  // Dropped when the agent has left, which may wait for what that does.
  void keep_until_left(std::shared_ptr<const void> kept);
  // Throws Caller where the agent has shut down or left.
  void require_open() const;
  bool closed() const { return closed_; }
  // Whether another process has made it, from which this one was forked.
  bool is_inherited() const { return made_in_.is_inherited(); }
  // Throws Caller where it is.
  void require_own() const;
  // Counts as a call that waits, for graceful shutdown: a message that is to be sent again.
  void hold_activity(int change) { waiting_ += static_cast<std::uint64_t>(change); }

  // "worker2 (rank 2)" as far as it is known without asking the store, else "rank 2".
  std::string name_of(int rank) const;
  DebugInfo debug_info() const;
  // Empty where there is no lane to that worker.
  std::string transport_to(int rank) const;

 private:
  explicit AgentCore(Parts parts);
  void listen(const std::string& local_address, Deadline deadline);
  std::shared_ptr<Peer> peer(const Recipient& to);
  std::shared_ptr<Peer> known_peer(
      int rank) const;  // null where there is none yet: asks no store, makes no connection
  Directory::Entry found(const Recipient& to);
  bool depends_on(int rank) const;
  void ask_whether_alive(int rank);
  void ask_again(int rank);
  void asked_whether_alive(const Recipient& asked, const std::exception_ptr& error, bool was_sent);
  // As Claims::Ask.
  std::optional<Error> knock(const Directory::Entry& worker, Deadline deadline);
  // Behind the first so many announcements, which were made before this worker read who is there.
  void follow_others(long announcements);
  void heard(const Announcement& announcement);
  void came(int rank);
  void watch_neighbours();
  void declare_lost(const Member& worker, const Error& why);
  // It has been declared lost: all that it held, owned and was asked for ends here. Does nothing
  // the second time.
  void worker_gone(const Member& worker, const Error& why);
  // What workers of that rank and earlier lives held, and what comes from them, ends.
  void end_predecessors(int rank, Generation generation, const Error& why);
  void store_lost(const Error& why);
  void taken_for_lost(const std::string& why);
  void tell_news();
  struct Leaving {
    std::uint64_t lane = 0;   // 0: to this worker itself
    std::uint64_t bytes = 0;  // of the message
    trace::Depth& in_flight;  // calls to that worker
    Slot slot = {};           // among them, where they are limited
    HeldBytes held = {};      // its bytes, where they are
  };
  // Takes room for the call's bytes. The program's own threads wait for it as long as is `left` of
  // the call's time limit (0: none), which becomes less by that. Throws Timeout.
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
  // Gives the call back, ended.
  WaitingCall complete(WaitingCall call, const std::function<void(PendingCall&)>& how);
  void fail_here(std::uint64_t id, const Error& why);
  // Why the connection to a worker fails, as its callers read it.
  Error gone(const Error& why, int rank) const;
  // Fails the call where somebody has changed its arguments while they were being sent.
  void check_unchanged(std::uint64_t call, const Function& function, const Peer& to,
                       const codec::SentBytes& sent);
  std::vector<PendingCalls::Taken> fail(std::vector<PendingCalls::Taken> calls,
                                        const std::function<Error(const WaitingCall&)>& why);
  // The call, as errors name it.
  std::string in_words(const Function* function, const std::string& to) const;
  Error not_in_time(const WaitingCall& call, const std::string& to) const;
  std::string why_late(const WaitingCall& call) const;
  void tell_of_wait(const CallState& state, std::uint64_t call);
  // Calls that threads here wait for long (awaited.cc). On the loop.
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
  // The same of another worker, which is asked; that it does not answer.
  std::string doing_of(int rank);
  Outcome await_verdict(const Future<Outcome>& verdict);
  template <class Body>
  bool answers(const std::vector<int>& ranks);
  void wait_until_idle_everywhere(Deadline deadline);
  void wait_for_own_calls(Deadline deadline);
  void report_held() const;
  // Why a worker is not there any more whose shutdown() this one decides on. Not under the mutex.
  Error why_gone(int rank) const;
  void tell_verdict(const Outcome& verdict, Deadline deadline);

  // Frees what lanes have retired, once the loop has ended, which keeps them alive.
  struct Reclaiming {
    tensor::CudaDevices& devices;
    bool may_block = true;
    ~Reclaiming();
  };

  const MadeIn made_in_;
  Parts parts_;
  Reclaiming reclaiming_{*parts_.devices};
  trace::Member member_;  // once the rank is known
  const std::shared_ptr<EventLoop> loop_;
  transport::Routes
      routes_;  // before the thread pool, whose threads begin at once: making it may throw
  const std::shared_ptr<ThreadPool> thread_pool_;
  Directory directory_;
  trace::Depth& own_calls_;  // in flight, to this worker itself
  const std::shared_ptr<ReceivePool> receive_pool_ = std::make_shared<ReceivePool>();
  std::vector<int> gpus_;      // known, and the same, once it has joined
  Generation generation_ = 0;  // known once it has joined
  std::string token_;
  std::atomic<std::chrono::milliseconds::rep> timeout_;

  const std::unique_ptr<ReferenceExtension> references_;
  const std::unique_ptr<ContextExtension> contexts_;
  PresentWorkers present_;  // where workers come and go
  News news_;
  PendingCalls calls_;
  Callers callers_;
  std::atomic<std::uint64_t> next_call_{1};
  std::atomic<std::uint64_t> issued_{0};  // calls of users, as is the next
  std::atomic<std::uint64_t> waiting_{0};
  std::atomic<std::size_t> held_back_{0};
  std::atomic<std::uint64_t> served_{0};
  std::atomic<std::uint64_t> lanes_{0};
  std::atomic<int> replies_{0};
  std::atomic<int> watched_{0};  // calls by watch_for_thread()
  std::atomic<std::uint64_t> running_{0};

  std::atomic<bool> closed_{false};
  std::string why_left_;  // where the program did not ask for it; written before the next is set
  std::atomic<bool> taken_for_lost_{false};

  mutable std::mutex mutex_;  // of the rest
  std::map<int, std::shared_ptr<Peer>> peers_;
  std::map<const Inbound*, std::shared_ptr<Inbound>> inbound_;
  struct Early {
    std::shared_ptr<transport::Connection> connection;
    bool carries_devices = false;
  };
  std::vector<Early> early_;  // connections that came before this worker had joined
  // The other workers by rank, where this one decides when all is idle.
  struct ShuttingDown {
    Promise<Outcome> verdict;
    Deadline limit = Deadline::never();  // of its shutdown()
  };
  std::map<int, ShuttingDown> shutting_down_;
  // Of the first rank: for those that wait in shutdown(), which it has not called. On the loop.
  std::optional<Patience> awaited_here_;
  EventLoop::Registration reports_awaited_;
  // Of threads that wait for calls. On the loop, but for the first.
  std::atomic<bool> asks_for_report_{false};  // the callee of a call that is to be reported
  std::size_t said_level_ = 0;                // which of the times was reported last, and when
  Deadline::Clock::time_point said_at_{};
  EventLoop::Registration looks_for_waits_;
  std::atomic<Deadline::Clock::time_point> armed_{
      Deadline::Clock::time_point::max()};  // when the timer comes
  EventLoop::Registration timer_;
  struct Pause {
    Task task;  // may refer to this: a timer's own would live as long as the loop
    EventLoop::Registration timer;
  };
  std::map<std::uint64_t, Pause> pauses_;  // of after()
  std::uint64_t next_pause_ = 1;
  std::map<MessageKind, int> refused_;  // so far, for Faults::fail_first
  bool joined_ = false;                 // connections are read from then on
  bool shutdown_began_ = false;
  std::atomic<bool> awaits_verdict_{false};
  const Promise<void> shutdown_ended_{nullptr};  // of the call that began it
  std::shared_ptr<const void> kept_until_left_;
  std::unique_ptr<Follower> follower_;  // where workers come and go
  std::map<int, Generation>
      generations_;     // the latest that was met, by rank; where workers come and go
  std::set<int> lost_;  // workers that could not be reached any more
  std::map<int, int>
      dependent_;  // messages that have failed and will be sent again, by the rank they go to
  struct Inquiry {
    Asked why = Asked::ByTheWay;
    int failed = 0;  // times that it has been asked in vain
  };
  std::map<int, Inquiry> inquiries_;  // that go on, by rank
  // Calls to others whose time is over and whose replies have not come: what they refer to must
  // end, too. By id. Messages of Weft's own refer to nothing.
  std::map<std::uint64_t, WaitingCall> late_;
  // How many of them there was no place for, by whom and by which lane they went to.
  std::map<std::pair<int, std::uint64_t>, std::size_t> forgotten_;
};

}  // namespace weft::rpc
