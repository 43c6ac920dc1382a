// SPDX-License-Identifier: Apache-2.0
// The messages of a group, each with both ends: the send and its receive.
#pragma once

#include <cstdint>
#include <vector>

#include <weft/profiling/tools/dumps.h>

namespace weft::tools {

struct Message {
  // Rank of the group; -1: a receive from any rank without a matching send.
  int from = -1;
  int to = -1;
  int tag = 0;
  std::uint64_t number = 0;         // its number among messages with these ends and this tag
  const Record* send = nullptr;     // null: not begun, or overwritten in the recorder
  const Record* receive = nullptr;  // the same
  // The end without a record has begun a later message, and so this one too: its recorder has
  // overwritten it.
  bool is_passed = false;
  // A receive from any rank that has no source yet, paired with a send that no other receive
  // matches.
  bool is_guessed = false;
};

// Returns the messages; those of one sender, receiver and tag are adjacent and in order.
std::vector<Message> messages_of(const Group& group);

}  // namespace weft::tools
