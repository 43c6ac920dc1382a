// SPDX-License-Identifier: Apache-2.0
// The description of an operation: its kind, the member that runs it and what it is about. The
// flight recorder, the timeline and the NVTX ranges keep and show it; operation.h records it.
// Everything may be used from any thread.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory_resource>
#include <span>
#include <string>
#include <vector>

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
struct MemberIdentity {
  std::string kind;  // "group" or "agent"
  std::string name;  // the group's or the worker's name
  int rank = -1;     // in that group or job
  // The members as ranks of the job, in the group's order; empty if they join and leave.
  std::vector<int> ranks;
  friend auto operator<=>(const MemberIdentity&, const MemberIdentity&) = default;
};

// A party and its generation: how many like it existed before. A group that is made again numbers
// its operations anew.
class Member {
 public:
  Member() = default;  // no party: its operations are not recorded
  static Member join(const MemberIdentity& party);
  // Undoes join(), because the group or agent was not made after all; the next member of this party
  // gets the same generation. Only for the newest member.
  void withdraw() const;
  static Member known(const MemberIdentity* party, std::uint32_t generation) {
    return {party, generation};
  }
  const MemberIdentity* party() const { return party_; }
  std::uint32_t generation() const { return generation_; }

 private:
  Member(const MemberIdentity* party, std::uint32_t generation)
      : party_(party), generation_(generation) {}
  const MemberIdentity* party_ = nullptr;
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

}  // namespace weft::trace
