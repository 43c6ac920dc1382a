// Which machines take part in a job, as their weft-runs agree on it: one value in a store that all
// change by compare and set. A job goes in rounds: the nodes come, the round runs with those that
// are there, and a failure, a node that is lost or one that comes begins the next. Here are the
// changes, as functions of the value alone.
//
// The semantics are torchelastic's (docs of torch.distributed.elastic, "Rendezvous"), but for this:
// who was in the round before is waited for, as long as it lives, and a round that has them all
// does not wait for others.
#pragma once

#include <optional>
#include <string>
#include <vector>

namespace weft::launch {

// A weft-run on a machine.
struct Node {
  std::string id;        // drawn at random when it starts
  std::string address;   // by which the others reach it
  int port = 0;          // free there, for a round whose rank 0 it starts
  int ranks = 1;         // that it starts
  int wish = -1;         // its rank among the nodes, where it was told one
  bool is_done = false;  // all of them have ended well, in this round

  bool operator==(const Node&) const = default;
};

// No round follows.
struct JobEnd {
  int code = 0;     // of all weft-runs; 0: all ranks have ended well
  std::string why;  // in words, where they have not

  bool operator==(const JobEnd&) const = default;
};

struct RendezvousLimits {
  int least = 1;  // nodes of a round
  int most = 1;
  int restarts = 0;  // that failures may cause

  bool operator==(const RendezvousLimits&) const = default;
};

struct RendezvousState {
  int round = 0;
  bool is_running = false;  // its nodes are those that are there, else they are coming
  std::vector<Node> nodes;  // once it runs, in the order of their ranks
  std::vector<std::string>
      former;  // ids of the nodes of the round before, in that order, and of those that it takes in
  std::vector<std::string> waiting;        // ids of nodes that came while it ran
  std::string cause;                       // of the round, in words; "" for the first
  int restarts = 0;                        // rounds that failures have caused
  std::optional<RendezvousLimits> limits;  // of who came first, and so of all
  std::optional<JobEnd> end;

  bool operator==(const RendezvousState&) const = default;
};

// Who comes first says what the job's limits are. Throws Caller, with both, where they are others
// than this node's.
void agree(RendezvousState& state, const RendezvousLimits& limits);
// The node takes part in a round that has not begun to run and has room, else waits for the next.
void come(RendezvousState& state, const Node& node, const RendezvousLimits& limits);
// Whether all that are known of have come and are enough; more may still come to the first round.
bool is_enough(const RendezvousState& state, const RendezvousLimits& limits);
// Has the round run if it can: when it is full, or with `is_last_call_over` when the nodes are
// enough. Only the first waits for that. The nodes' ranks are as they wish, then as in the round
// before, then in the order of their coming.
void run_if_ready(RendezvousState& state, const RendezvousLimits& limits, bool is_last_call_over);
// Whether somebody waits for whom the next round has room.
bool has_room_for_more(const RendezvousState& state, const RendezvousLimits& limits);
// Of a round that runs. Those that wait have places in the next as far as there is room.
void begin_next(RendezvousState& state, const RendezvousLimits& limits, const std::string& cause);
// A rank of the node has failed: the next round, or the end.
void fail(RendezvousState& state, const RendezvousLimits& limits, const std::string& why, int code);
// All ranks of the node have ended well.
void finish(RendezvousState& state, const std::string& id);
// The node is gone; `how` in words ("is lost"). A round that it is missing in gives way to the
// next.
void remove(RendezvousState& state, const RendezvousLimits& limits, const std::string& id,
            const std::string& how);

// Null where the node is not in the round.
const Node* find(const RendezvousState& state, const std::string& id);
// The ids of all that have anything to do with the job.
std::vector<std::string> all_ids(const RendezvousState& state);

// As JSON. Decoding throws PeerLost for what is no such state; sizes are bounded.
std::string encode(const RendezvousState& state);
RendezvousState decode(const std::string& text);

}  // namespace weft::launch
