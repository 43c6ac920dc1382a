// SPDX-License-Identifier: Apache-2.0
// Which machines take part in a job, as their weft-runs agree on it: one value in a store, which
// all of them change by compare and set. A job consists of rounds: the nodes join, the round runs
// with the nodes that have joined, and a failure, a lost node or a new node begins the next round.
// This file has the changes, as functions of the value alone.
//
// The semantics are torchelastic's (docs of torch.distributed.elastic, "Rendezvous"), with one
// difference: a round waits for the nodes of the round before, as long as they live, and a round
// that has them all does not wait for others.
#pragma once

#include <optional>
#include <string>
#include <vector>

namespace weft::launch {

// One weft-run on a machine.
struct Node {
  std::string id;       // drawn at random when it starts
  std::string address;  // by which other nodes reach it
  // A port that is free there, for MASTER_PORT if this node starts rank 0.
  int port = 0;
  int ranks = 1;  // how many ranks it starts
  int wish = -1;  // the node rank that it was told to ask for; -1: none
  // All its ranks have ended well in this round.
  bool is_done = false;

  bool operator==(const Node&) const = default;
};

// The end of the job: no round follows.
struct JobEnd {
  int code = 0;     // the exit code of all weft-runs; 0: all ranks have ended well
  std::string why;  // the failure in words, if `code` is not 0

  bool operator==(const JobEnd&) const = default;
};

struct RendezvousLimits {
  int least = 1;  // the fewest nodes of a round
  int most = 1;
  int restarts = 0;  // how many restarts failures may cause

  bool operator==(const RendezvousLimits&) const = default;
};

struct RendezvousState {
  int round = 0;
  // Whether the nodes of the round are final; otherwise nodes are still joining.
  bool is_running = false;
  std::vector<Node> nodes;  // once the round runs, in the order of their ranks
  // Ids of the nodes of the round before, in the order of their ranks, then of waiting nodes that
  // this round admits.
  std::vector<std::string> former;
  // Ids of nodes that asked to join while the round ran.
  std::vector<std::string> waiting;
  // Why the round began, in words; "" for the first.
  std::string cause;
  int restarts = 0;  // how many rounds failures have begun
  // Those of the first node, which all nodes must share.
  std::optional<RendezvousLimits> limits;
  std::optional<JobEnd> end;

  bool operator==(const RendezvousState&) const = default;
};

// The first node sets the job's limits. Throws Caller, with both limits, if this node's differ.
void agree(RendezvousState& state, const RendezvousLimits& limits);
// Adds the node to the round if that does not run yet and has room; otherwise the node waits for
// the next round.
void come(RendezvousState& state, const Node& node, const RendezvousLimits& limits);
// Whether all nodes of the round before have joined and the nodes are enough; more may still join
// the first round.
bool is_enough(const RendezvousState& state, const RendezvousLimits& limits);
// Starts the round if it is full, or if the nodes are enough and `is_last_call_over` is true. Only
// the first round waits for the last call. Orders the nodes by the rank that they asked for, then
// as in the round before, then in the order in which they joined.
void run_if_ready(RendezvousState& state, const RendezvousLimits& limits, bool is_last_call_over);
// Whether a node waits and the next round has room for it.
bool has_room_for_more(const RendezvousState& state, const RendezvousLimits& limits);
// Ends the running round and begins the next, which admits waiting nodes as far as there is room.
void begin_next(RendezvousState& state, const RendezvousLimits& limits, const std::string& cause);
// Records that a rank has failed: begins the next round, or ends the job.
void fail(RendezvousState& state, const RendezvousLimits& limits, const std::string& why, int code);
// Records that all ranks of the node have ended well.
void finish(RendezvousState& state, const std::string& id);
// Removes the node; `how` says why in words ("is lost"). If a running round needs the node, begins
// the next round.
void remove(RendezvousState& state, const RendezvousLimits& limits, const std::string& id,
            const std::string& how);

// Null if the node is not in the round.
const Node* find(const RendezvousState& state, const std::string& id);
// The ids of all nodes that are in the round, wait for the next or are awaited.
std::vector<std::string> all_ids(const RendezvousState& state);

// The state as JSON. decode() throws Protocol for text that is not a state; it bounds all sizes.
std::string encode(const RendezvousState& state);
RendezvousState decode(const std::string& text);

}  // namespace weft::launch
