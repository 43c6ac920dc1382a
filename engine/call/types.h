// SPDX-License-Identifier: Apache-2.0
// Types that programs use with RPC: workers, destinations, options, errors. The calls are in
// agent.h. At the end are types of the engine's own, in namespace call.
#pragma once

#include <chrono>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <functional>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include <c10/core/Device.h>
#include <c10/util/intrusive_ptr.h>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include <weft/base/deadline.h>
#include <weft/base/error.h>
#include <weft/base/export.h>
#include <weft/base/patience.h>
#include <weft/engine/call/errors.h>
#include <weft/engine/codec/values.h>

namespace weft {

// As a call's time limit: the agent's own limit applies.
constexpr std::chrono::milliseconds kAgentTimeout{-1};

}  // namespace weft

namespace weft::rpc {

using namespace std::chrono_literals;

// A worker: its name and its rank. Can be compared, ordered and hashed.
struct WorkerInfo {
  // The name that the worker gave to init().
  std::string name;
  // The rank; -1 for no worker.
  int rank = -1;
  friend bool operator==(const WorkerInfo&, const WorkerInfo&) = default;
  friend auto operator<=>(const WorkerInfo&, const WorkerInfo&) = default;
  WEFT_FIELDS(name, rank)
};

// For Weft's own use: "worker1 (rank 1)", as errors and logs name a worker.
WEFT_API std::string describe(const WorkerInfo& worker);

// For Weft's own use: the outcome of an operation, in a form that can be sent. Its name is part of
// the identities of functions (docs/wire.md), as are those of MessageId and of Activity.
struct Outcome {
  Outcome() = default;
  Outcome(int what, std::string why) : blame(what), text(std::move(why)) {}
  explicit Outcome(const Error& error) : Outcome(static_cast<int>(error.blame()), error.text()) {
    ranks = error.ranks();
  }
  bool failed() const { return blame != -1; }
  WEFT_API Error error() const;
  int blame = -1;  // Blame of the failure; -1: none
  std::string text;
  std::vector<int> ranks{};  // as Error::ranks()
  WEFT_FIELDS(blame, text, ranks)
};

// The purpose of a message. Calls of users' functions are Call and Reply; Create if the result
// stays with the callee as an RRef.
enum class MessageKind {
  Call,            // calls a function
  Reply,           // carries its result or its error
  Create,          // calls a function whose result stays as an RRef
  Fetch,           // asks an RRef's owner for a copy of the value
  Fork,            // tells an RRef's owner of another user
  ChildAccept,     // tells the user that gave an RRef that the owner knows of the new user
  UserDelete,      // tells an RRef's owner that a user has dropped it
  ContextCleanup,  // releases an autograd context
  Backward,        // runs one worker's part of a backward pass
  Gradient,        // carries gradients
  Shutdown         // agrees on the end of all calls
};

// For Weft's own use: names one message of a call on both of its sides. A call's number is unique
// at its caller.
struct MessageId {
  int caller = -1;  // rank
  std::uint64_t call = 0;
  bool reply = false;
  friend auto operator<=>(const MessageId&, const MessageId&) = default;
  WEFT_FIELDS(caller, call, reply)
};

// For tests: faults in the messages that one agent sends.
struct Faults {
  // The first so many messages of a kind fail as if the connection had refused them.
  std::map<MessageKind, int> fail_first{};
  std::set<MessageKind> drop{};  // they never arrive
  // They arrive late; later messages may overtake them.
  std::map<MessageKind, std::chrono::milliseconds> delay{};
};

// For each peer, by name: a device here, and the peer's device on which its tensors arrive. Results
// come back by the inverse, so the map is one to one. Host memory without an entry goes to host
// memory; a GPU's tensor without an entry is refused.
using DeviceMaps = std::map<std::string, std::vector<std::pair<c10::Device, c10::Device>>>;

// Options of init(). Each member has an initializer, since compilers warn of members that a program
// does not name.
struct Options {
  // Without a world size workers may come and go, and one that gives no rank takes a free one above
  // 0. The highest rank is 65535.
  std::optional<int> rank{}, world_size{};
  std::string init_method = "env://";       // as ProcessGroupOptions::init_method
  c10::intrusive_ptr<c10d::Store> store{};  // instead of init_method
  std::string group_name{};                 // isolates jobs that share an address
  int worker_threads = 16;  // threads for called functions; those that wait for calls do not count
  std::chrono::milliseconds timeout = 60s;  // of each call, and of init; 0 = no limit
  // The transports that may be used; the best that both sides have is. Empty: all that work here.
  std::vector<std::string> transports{};
  // The GPUs on which tensors of calls arrive at each peer.
  DeviceMaps device_maps{};
  // If set, peers must prove that they know it before anything else is read; 16 bytes or more, made
  // at random.
  std::string secret{};
  // For tests: the faults that are injected into messages that this agent sends.
  Faults faults{};
  // The GPUs that calls use here. Empty: those in device_maps, and in the other workers' maps for
  // this one.
  std::vector<c10::Device> devices{};
  std::string timeline{};  // as ProcessGroupOptions::timeline
  // Limit on the calls of one worker to another that are unanswered. The next one fails with Busy,
  // both where it is made and where it arrives.
  int calls_in_flight = 65536;
  // Limit on the bytes of such calls' arguments; 0 = no limit. A call that does not fit waits where
  // the program issues it, until others have been answered or its time limit is over. See
  // docs/rpc.md, "Shutdown and limits", for the calls that never wait.
  std::int64_t bytes_in_flight = 256 << 20;
  // How long a worker waits before it reports on stderr for which workers, or for which call, it
  // waits: to join, in shutdown(), or for the result of a call. Ascending; empty: never. To join
  // and in shutdown(), the lowest rank that waits reports for the job. Of its calls, each worker
  // reports the one that a thread has waited for longest.
  WaitReports wait_reports = default_wait_reports();
};

// The worker to call: a name, a rank, or a WorkerInfo (which does not fit a worker of another name
// that has the rank by now). It may have a time limit of its own: to("worker1").timeout(2s).
class Destination {
 public:
  // `place` is the place of the call in which the destination is written.
  Destination(const char* name, Place place = Place::current())
      : target_(std::string(name)), place_(place) {}
  // The worker of this name.
  Destination(std::string name, Place place = Place::current())
      : target_(std::move(name)), place_(place) {}
  // The worker of this rank.
  template <std::integral T>
  Destination(T rank, Place place = Place::current()) : target_(target_of(rank)), place_(place) {}
  template <std::floating_point T>
  Destination(T rank) = delete;  // a rank is a whole number
  // This worker, and not another one that has its rank later.
  Destination(const WorkerInfo& worker, Place place = Place::current())
      : target_(worker), place_(place) {}

  // 0: none; kAgentTimeout: the agent's.
  Destination timeout(std::chrono::milliseconds limit) const {
    Destination copy = *this;
    copy.timeout_ = limit;
    return copy;
  }
  // A name, a rank or a worker.
  using Target = std::variant<std::string, int, WorkerInfo>;
  // The worker that the destination names.
  const Target& target() const { return target_; }
  // The time limit; nullopt for the agent's.
  std::optional<std::chrono::milliseconds> timeout() const { return timeout_; }
  // Where the program wrote the destination.
  Place place() const { return place_; }

 private:
  // An integer outside int becomes a name that cannot exist, so the lookup fails.
  template <class T>
  static Target target_of(T rank) {
    if constexpr (sizeof(T) < sizeof(int)) {
      return static_cast<int>(rank);
    } else {
      if (std::in_range<int>(rank)) return static_cast<int>(rank);
      return "rank " + std::to_string(rank);
    }
  }
  Target target_;
  std::optional<std::chrono::milliseconds> timeout_;
  Place place_;
};

// Makes a destination of a name, a rank or a worker, to give it a time limit:
// to("worker1").timeout(2s).
inline Destination to(Destination destination) { return destination; }

// Describes the call that a function is run for.
struct CallInfo {
  // The worker that made the call.
  WorkerInfo caller;
  // When the caller stops waiting for the result.
  Deadline deadline = Deadline::never();
  bool cancelled = false;  // nobody waits for the result any more
};

// The numbers of things that one agent holds. Leaving ends all of them, so then all but
// calls_served are zero. The three counts of references are of one moment, and so are the two of
// autograd; the others are read one after the other while calls go on.
struct DebugInfo {
  std::size_t owner_rrefs = 0;    // values owned here and shared
  std::size_t forks = 0;          // workers known to hold them
  std::size_t pending_users = 0;  // unconfirmed references here
  std::size_t contexts = 0;       // autograd contexts alive here
  // Backward passes that run here.
  std::size_t backward_passes = 0;
  // Calls made here and unanswered. Weft's own messages count from the first attempt to the last.
  std::size_t calls_waiting = 0;
  std::size_t calls_served = 0;   // incoming calls in all; stays when the agent leaves
  std::size_t handlers_busy = 0;  // functions that run now
  // Calls that the program has issued, but that Options::bytes_in_flight keeps from being sent.
  std::size_t calls_held_back = 0;
};

// Options of Agent::shutdown().
struct Graceful {
  std::chrono::milliseconds timeout = 10min;  // 0 = no limit
};

}  // namespace weft::rpc

template <>
struct std::hash<weft::rpc::WorkerInfo> {
  std::size_t operator()(const weft::rpc::WorkerInfo& worker) const noexcept {
    return std::hash<std::string>()(worker.name) * 31 + std::hash<int>()(worker.rank);
  }
};

namespace weft::call {

using namespace std::chrono_literals;

// What programs use as well, and what is named on the wire.
using rpc::CallInfo;
using rpc::CreationError;
using rpc::DebugInfo;
using rpc::Destination;
using rpc::DeviceMaps;
using rpc::Faults;
using rpc::Graceful;
using rpc::MessageId;
using rpc::MessageKind;
using rpc::Options;
using rpc::Outcome;
using rpc::RemoteError;
using rpc::WorkerInfo;

// Where workers come and go: tells the workers apart that had one rank after each other. All other
// ranks have one generation.
using Generation = std::int32_t;
constexpr Generation kAnyGeneration = -1;  // any worker that has the rank

struct Member {
  WorkerInfo worker;
  Generation generation = 0;
};

// The worker that a message goes to.
struct Recipient {
  Recipient(int its_rank, Generation its_generation = kAnyGeneration)
      : rank(its_rank), generation(its_generation) {}
  bool fits(Generation other) const { return generation == kAnyGeneration || generation == other; }
  int rank;
  Generation generation;
};

// A failure with the error, whose blame is kept; an Outcome that has not failed for null.
WEFT_API Outcome outcome_of(const std::exception_ptr& error);

// How one call is routed and limited.
struct CallOptions {
  Recipient to;
  std::chrono::milliseconds limit{0};  // 0 = none
  MessageKind kind = MessageKind::Call;
  bool on_loop = false;  // the function is short and does not block: it runs in a turn of the loop
  Place place = {};      // the call's place in the user's program, if it is known
  // The call's tensors go to the devices that the tensors of the receiver's own calls came from, by
  // the inverse of the receiver's device map.
  bool back = false;

  Deadline deadline() const { return limit.count() == 0 ? Deadline::never() : Deadline::in(limit); }
};

}  // namespace weft::call
