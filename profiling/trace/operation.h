// Records what a process communicates, one operation at a time: collectives, messages, meetings
// over the store, calls, references, backward passes. The code that runs an operation reports its
// beginning and its end here. The flight recorder (always), the timeline, the NVTX ranges of an
// attached tool and the metrics follow from these reports.
//
//   const trace::Member member = trace::Member::join(
//       {.kind = "group", .name = "default", .rank = 0, .ranks = {0, 1}});
//   trace::Operation traced = trace::Operation::begin(
//       member, trace::Kind::Collective, {.name = "all_reduce", .sequence = 7});
//   …
//   traced.end();  // or traced.fail(error), on any thread; only the first call counts.
//                  // Of several copies of an Operation, end only one.
//
// Everything may be used from any thread. begin, end and fail neither block nor throw, and allocate
// only for the timeline.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory_resource>
#include <span>
#include <string>
#include <vector>

#include <weft/base/error.h>

namespace weft::trace {

// The host's clock in nanoseconds: CLOCK_MONOTONIC, which all processes of a machine share.
std::int64_t now() noexcept;

enum class Kind : std::uint8_t {
  Collective,
  Send,
  Receive,
  Call,
  Served,
  Reference,
  Backward,
  Gradient,
  Meeting
};
constexpr std::size_t kKinds = 9;
const char* name(Kind kind) noexcept;  // "collective", "send", …

// One rank of a group, or one worker of a job. Each is kept once, until the process ends.
struct Party {
  std::string kind;  // "group" or "agent"
  std::string name;  // the group's or the worker's name
  int rank = -1;     // in that group or job
  // The members as ranks of the job, in the group's order; empty if they join and leave.
  std::vector<int> ranks;
  friend auto operator<=>(const Party&, const Party&) = default;
};

// A party and its generation: how many like it existed before. A group that is made again numbers
// its operations anew.
class Member {
 public:
  Member() = default;  // no party: its operations are not recorded
  static Member join(const Party& party);
  // Undoes join(), because the group or agent was not made after all; the next member of this party
  // gets the same generation. Only for the newest member.
  void withdraw() const;
  static Member known(const Party* party, std::uint32_t generation) { return {party, generation}; }
  const Party* party() const { return party_; }
  std::uint32_t generation() const { return generation_; }

 private:
  Member(const Party* party, std::uint32_t generation) : party_(party), generation_(generation) {}
  const Party* party_ = nullptr;
  std::uint32_t generation_ = 0;
};

// The newest member of each party, also if it has ended. Allocates only from `memory`.
std::pmr::vector<Member> members(
    std::pmr::memory_resource* memory = std::pmr::get_default_resource());

constexpr std::size_t kMostDims = 4;

// The description of an operation. Texts have static lifetime (see keep).
struct About {
  const char* name = "";  // "all_reduce"; a function's name
  // Of collectives, and of meetings of one name: the number in the group. Of messages: the number
  // among those of one sender, receiver and tag. Of calls: their id.
  std::uint64_t sequence = 0;
  int peer = -1;  // the other side of a message or call, or a collective's root
  int tag = 0;
  std::uint64_t bytes = 0;  // of all its tensors on this rank
  const char* dtype = "";
  std::span<const std::int64_t> shape;  // the first kMostDims dimensions are kept
  const char* reduction = "";           // of a collective that reduces: "Sum"
  int device = -1;                      // the GPU of its tensors; -1: none
};

// Returns a copy of the text that lives as long as the process. For texts of which there are few:
// groups, functions.
const char* keep(const std::string& text);

class Operation {
 public:
  Operation() = default;  // no operation; ending it does nothing
  static Operation begin(const Member& member, Kind kind, const About& about) noexcept;
  // Records that it succeeded. Pass `peer`, the sender, and `sequence`, the message's number, if
  // they became known only now.
  void end() noexcept { end(-1, 0); }
  void end(int peer, std::uint64_t sequence) noexcept;
  void fail(const Error& error) noexcept;
  // Adds bytes to those that it began with, such as the result of a call. Call it before the end.
  void add(std::uint64_t bytes) noexcept { more_ += bytes; }
  // Says that the thread's present range works for this operation: the timeline draws an arrow from
  // the operation to the range.
  void runs_here() const noexcept;
  // Records an operation that has no duration.
  static void note(const Member& member, Kind kind, const About& about) noexcept {
    begin(member, kind, about).end();
  }

 private:
  void finish(const Error* error, int peer, std::uint64_t sequence) noexcept;
  const char* name_ = "";
  std::uint64_t ticket_ = 0;  // its record in the flight recorder; 0: none
  std::uint64_t range_ = 0;   // of NVTX; 0: none
  std::uint64_t bytes_ = 0;
  std::uint64_t more_ = 0;
  std::int64_t begun_ = 0;
  Kind kind_ = Kind::Collective;
  bool open_ = false;
  bool watched_ = false;  // the observer was told that it began
};

// Receives the beginning and the end of each operation, on the thread where it happens: its
// functions must be fast and must not throw.
class Observer {
 public:
  Observer() = default;
  Observer(const Observer&) = delete;
  Observer& operator=(const Observer&) = delete;
  virtual ~Observer() = default;
  virtual void begun(Kind kind, const char* name, std::uint64_t bytes) noexcept = 0;
  // `more`: the bytes that were added to those it began with.
  virtual void ended(Kind kind, const char* name, double seconds, const Error* error,
                     std::uint64_t more) noexcept = 0;
};
// Sets the observer of this process, for operations that begin from now on; a forked process has
// none. A second call is a broken invariant.
void observe(Observer& observer) noexcept;

// Records that a training step begins on this thread: counts it (progress.h), and marks it for the
// timeline and tools. `rank` is -1 if it is not known.
void step(int rank) noexcept;

}  // namespace weft::trace
