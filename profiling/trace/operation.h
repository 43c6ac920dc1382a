// What a process communicates, one operation at a time: collectives, messages, meetings over the
// store, calls, references, backward passes. Whoever begins one says so here, and again when it has
// ended; from that come the flight recorder (always), the timeline, NVTX ranges of a tool that is
// attached, and the metrics.
//
//   const trace::Member member = trace::Member::join({.kind = "group", .name = "default", .rank =
//   0, .ranks = {0, 1}}); trace::Operation traced = trace::Operation::begin(member,
//   trace::Kind::Collective, {.name = "all_reduce", .sequence = 7}); …  traced.end();  // or
//   traced.fail(error), on any thread: the first of them counts, but of copies only one may be
//   ended
//
// Everything may be used from every thread; begin, end and fail neither block nor throw, and
// allocate only for the timeline.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory_resource>
#include <span>
#include <string>
#include <vector>

#include <weft/base/error.h>

namespace weft::trace {

// The host's clock, nanoseconds: CLOCK_MONOTONIC, which all processes of a machine share.
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

// One rank of a group, or one worker of a job. Kept until the process ends, each once.
struct Party {
  std::string kind;  // "group" or "agent"
  std::string name;  // of the group; of the worker
  int rank = -1;     // there
  std::vector<int>
      ranks;  // the members as ranks of the job, in the group's order; empty where they come and go
  friend auto operator<=>(const Party&, const Party&) = default;
};

// A party, and how many of it were there before: a group that is made anew counts its operations
// anew.
class Member {
 public:
  Member() = default;  // nobody: its operations are not recorded
  static Member join(const Party& party);
  // It has not come to be; the next of this party takes its place. The newest only.
  void withdraw() const;
  static Member known(const Party* party, std::uint32_t generation) { return {party, generation}; }
  const Party* party() const { return party_; }
  std::uint32_t generation() const { return generation_; }

 private:
  Member(const Party* party, std::uint32_t generation) : party_(party), generation_(generation) {}
  const Party* party_ = nullptr;
  std::uint32_t generation_ = 0;
};

// The newest of each party: who is here, or was. Allocates from `memory` only.
std::pmr::vector<Member> members(
    std::pmr::memory_resource* memory = std::pmr::get_default_resource());

constexpr std::size_t kMostDims = 4;

// What an operation is about. Texts have static lifetime (see keep).
struct About {
  const char* name = "";       // "all_reduce"; a function's name
  std::uint64_t sequence = 0;  // collectives, and meetings of one name: in the group; messages:
                               // among those of one sender, receiver and tag; calls: their id
  int peer = -1;               // who sends or receives, is called, or calls; a collective's root
  int tag = 0;
  std::uint64_t bytes = 0;  // of all its tensors, here
  const char* dtype = "";
  std::span<const std::int64_t> shape;  // the first kMostDims dimensions are kept
  const char* reduction = "";           // of a collective that reduces: "Sum"
  int device = -1;                      // the GPU of its tensors; -1: none
};

// The same text for as long as the process lives. For texts of which there are few: groups,
// functions.
const char* keep(const std::string& text);

class Operation {
 public:
  Operation() = default;  // none; ending it does nothing
  static Operation begin(const Member& member, Kind kind, const About& about) noexcept;
  // Well. `peer`, where it became known only now: who has sent, with the message's number.
  void end() noexcept { end(-1, 0); }
  void end(int peer, std::uint64_t sequence) noexcept;
  void fail(const Error& error) noexcept;
  // So many bytes more than it began with: the result of a call. Before it ends.
  void add(std::uint64_t bytes) noexcept { more_ += bytes; }
  // What the range that this thread is in does is this operation's: the timeline draws an arrow to
  // it.
  void runs_here() const noexcept;
  // Something that has no duration.
  static void note(const Member& member, Kind kind, const About& about) noexcept {
    begin(member, kind, about).end();
  }

 private:
  void finish(const Error* error, int peer, std::uint64_t sequence) noexcept;
  const char* name_ = "";
  std::uint64_t ticket_ = 0;  // in the flight recorder; 0 = none
  std::uint64_t range_ = 0;   // of NVTX
  std::uint64_t bytes_ = 0;
  std::uint64_t more_ = 0;
  std::int64_t begun_ = 0;
  Kind kind_ = Kind::Collective;
  bool open_ = false;
  bool watched_ = false;  // the observer has seen it begin
};

// Sees every operation begin and end, on the threads where that happens: fast, and without
// throwing.
class Observer {
 public:
  Observer() = default;
  Observer(const Observer&) = delete;
  Observer& operator=(const Observer&) = delete;
  virtual ~Observer() = default;
  virtual void begun(Kind kind, const char* name, std::uint64_t bytes) noexcept = 0;
  // `more`: the bytes that it has moved beyond those it began with.
  virtual void ended(Kind kind, const char* name, double seconds, const Error* error,
                     std::uint64_t more) noexcept = 0;
};
// One for a process, for what begins from now on; a forked one has none. A second call is a broken
// invariant.
void observe(Observer& observer) noexcept;

// A training step begins on this thread: counted (progress.h), and a mark for the timeline and
// tools. -1: of no known rank.
void step(int rank) noexcept;

}  // namespace weft::trace
