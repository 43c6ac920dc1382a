// SPDX-License-Identifier: Apache-2.0
// An operation of this rank that has not ended, what waits.h knows of a group, and what it learns
// from the group's other ranks. Plain values.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include <weft/base/patience.h>

namespace weft::group {

// The name of a collective, after the user's call that it belongs to, if there is one:
// "all_reduce", "checkpoint::save: all_gather_into".
std::string called_as(const char* name, const char* called_by);

// An operation that this rank has begun and that has not ended.
struct Wait {
  const char* name = nullptr;       // a literal: "all_reduce", "recv from"
  const char* called_by = nullptr;  // CalledBy::name()
  Patience::Clock::time_point since;
  std::uint64_t collective = 0;  // its number, if all ranks of the group take part; else 0
  int peer = -1;                 // the other rank of a message, in the group; -1: any

  std::string operation() const;  // called_as(), or "recv from rank 2"
  std::string what() const;       // operation() with a collective's number: "all_reduce #7"
};
// How far a rank has come in a group.
struct Progress {
  std::uint64_t collectives = 0;  // begun
  std::string last;               // the operation that it began last: "#6 (all_reduce, 12 s ago)"
};
struct WaitSource {
  std::vector<int> members;                    // as ranks of the job, in the group's order
  int rank = 0;                                // this rank, in the group
  std::function<std::vector<Wait>()> pending;  // oldest first
  std::function<Progress()> progress;
  // The ranks of the group that are neither lost nor have left: nobody waits for the others.
  std::function<std::vector<int>()> living;
  // This rank's call as the collective of that number; nullopt if it has not made it yet or has
  // forgotten it.
  std::function<std::optional<std::string>(std::uint64_t number)> call;
  // Breaks the group on all ranks because their calls differ.
  std::function<void(const std::string& how)> differ;
  // The last collective for which this rank has told the others its call.
  std::uint64_t told = 0;
};
// The answers of a group's living members, by rank of the group.
struct WaitAnswers {
  std::map<int, Progress> progress;
  std::vector<int> silent;   // did not answer
  std::vector<int> unasked;  // run no Weft (Python's), or the ranks are not connected
  int lowest_waiting = -1;   // of those that wait too, as a rank of the job; -1: none
};

}  // namespace weft::group
