// Who takes part in a job, told apart by the dumps: a process, or where several ranks are threads
// of one process, each of them. A number does not tell: groups and agents count each by themselves,
// and who is agent 0 need not be rank 0.
#pragma once

#include <map>
#include <set>
#include <string>
#include <vector>

#include <weft/profiling/tools/dumps.h>

namespace weft::tools {

// Refers to the dumps.
class Participants {
 public:
  explicit Participants(const Dumps& dumps);

  // One number for all views of one participant, which is no rank.
  int of(const View& view) const { return numbers_.at(&view); }
  // As a rank of the job; of one that is in no group as an agent.
  int rank(int who) const;
  // Each is the same rank of the job in all groups and as an agent, and no two are the same one.
  bool are_numbered_alike() const { return alike_; }

  // "rank 0"; where they are not numbered alike "rank 0 of group 'default' (agent 1)".
  std::string name(int who) const;
  // "rank 0"; where they are not numbered alike "agent 0 ('server')".
  std::string agent(int rank) const;
  // What agents are called beside their number.
  const char* agents() const { return alike_ ? "rank" : "agent"; }

 private:
  struct One {
    const Group* group = nullptr;  // the first that it is in
    const View* member = nullptr;  // there
    const View* agent = nullptr;
    std::set<int> ranks;
  };
  const std::map<int, View>& agents_;
  std::vector<One> all_;
  std::map<const View*, int> numbers_;
  bool alike_ = true;
};

}  // namespace weft::tools
