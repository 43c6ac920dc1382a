// The messages of a group, each with both its ends: the send, and the receive that it is for.
#pragma once

#include <cstdint>
#include <vector>

#include <weft/profiling/tools/dumps.h>

namespace weft::tools {

struct Message {
  int from = -1;  // rank of the group; -1: any, of a receive that no send is for
  int to = -1;
  int tag = 0;
  std::uint64_t number = 0;         // among those from there to there with that tag
  const Record* send = nullptr;     // null: not begun, or no longer in the recorder
  const Record* receive = nullptr;  // likewise
  bool is_passed = false;   // the end that is not here has begun a later one, and so this one: its
                            // recorder forgot it
  bool is_guessed = false;  // a receive from any rank that has no source yet, and a send that
                            // nobody else receives
};

// Those of one sender, receiver and tag stand together, in their order.
std::vector<Message> messages_of(const Group& group);

}  // namespace weft::tools
