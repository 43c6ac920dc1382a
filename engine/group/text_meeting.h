// SPDX-License-Identifier: Apache-2.0
// A meeting of all ranks of a group over its store, in which each rank gives a text and reads the
// texts of the others. Works with every backend. Internal.
//
//   TextMeeting meeting(group, "Mesh");
//   meeting.give(mine);
//   const std::vector<std::string> all = meeting.meet();
#pragma once

#include <string>
#include <vector>

#include <weft/engine/group/process_group.h>

namespace weft::group {

struct Core;

// Used by the thread that waits in it. The group outlives this object.
class TextMeeting {
 public:
  // The `number`-th meeting of this call in the group; texts lie under "call/number/".
  TextMeeting(Core& core, const char* call, int number);
  // The next meeting of this call (a literal): all ranks make their calls in the same order.
  // Throws if the group refuses operations.
  TextMeeting(const ProcessGroup& group, const char* call);

  int number() const { return number_; }
  // Gives this rank's text, once. Does not wait.
  void give(const std::string& text);
  // Blocks until all ranks have given theirs, at most for the group's timeout; returns them by
  // rank. Throws Timeout with the rank that did not come, and what breaks the group.
  std::vector<std::string> texts();
  // As texts(), but only rank 0 reads all of them from the store, and tells them. All ranks must
  // call this one. Costs each rank two small requests, and not one for as many values as there are
  // ranks.
  std::vector<std::string> texts_by_first();
  // As texts(), as an operation that the flight recorder shows.
  std::vector<std::string> meet();
  // Every rank that throws an error of which the texts have told it calls this. Blocks until all
  // ranks have called it, but only for a moment (2 s): a rank that throws may end the process, and
  // the store with it, before the others have read.
  void await_readers() noexcept;

 private:
  // Reads the keys, which are set once the ranks have given their texts.
  std::vector<std::string> read(const std::vector<std::string>& keys);

  Core& core_;
  const char* call_;
  int number_;
  std::string base_;
};

}  // namespace weft::group
