// SPDX-License-Identifier: Apache-2.0
// The participants of a job, as the dumps distinguish them: a process, or each rank if several
// ranks are threads of one process. A rank number does not identify a participant: groups and
// agents each have their own, and agent 0 need not be rank 0.
#pragma once

#include <map>
#include <set>
#include <string>
#include <vector>

#include <weft/profiling/tools/dumps.h>

namespace weft::tools {

// Keeps a reference to the dumps.
class Participants {
 public:
  explicit Participants(const Dumps& dumps);

  // A number that is equal for all views of one participant; it is not a rank.
  int of(const View& view) const { return numbers_.at(&view); }
  // The participant's rank of the job, or its agent's rank if it is in no group.
  int rank(int who) const;
  // Whether each participant has one rank in all groups and as an agent, and no two share a rank.
  bool are_numbered_alike() const { return alike_; }

  // "rank 0"; if participants are not numbered alike, "rank 0 of group 'default' (agent 1)".
  std::string name(int who) const;
  // "rank 0"; if participants are not numbered alike, "agent 0 ('server')".
  std::string agent(int rank) const;
  // The word before an agent's number: "rank" or "agent".
  const char* agents() const { return alike_ ? "rank" : "agent"; }

 private:
  struct One {
    const Group* group = nullptr;  // the first group that contains it
    const View* member = nullptr;  // its view in that group
    const View* agent = nullptr;
    std::set<int> ranks;
  };
  const std::map<int, View>& agents_;
  std::vector<One> all_;
  std::map<const View*, int> numbers_;
  bool alike_ = true;
};

}  // namespace weft::tools
