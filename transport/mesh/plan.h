// SPDX-License-Identifier: Apache-2.0
// The steps of one rank in one collective: parts to send, parts to receive, and which step waits
// for which. An algorithm is a function that writes a plan (algorithms.h); one executor
// (collectives.h) runs all plans.
//
// The n-th part that a plan sends to a peer is the n-th that the peer's plan receives from this
// rank; the executor chooses the order in which parts are sent. So the plans of all ranks can be
// checked against each other without a connection.
//
// A receive must not wait for a send: a full connection makes progress only when its other end
// receives.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include <weft/base/slice.h>
#include <weft/transport/mesh/fold.h>

namespace weft::transport::mesh {

class Plan {
 public:
  using Index = std::uint32_t;
  static constexpr Index kNone = ~Index{0};

  enum class Action : std::uint8_t { Send, Receive, Fold, Copy };
  enum class State : std::uint8_t { Waiting, Started, Done };

  struct Step {
    Action action = Action::Copy;
    State state = State::Waiting;
    std::int32_t peer = -1;           // none for a copy
    std::uint32_t number = 0;         // of the part; counted per peer and direction
    std::uint32_t waits_for = 0;      // steps
    Index first_link = kNone;         // list of the steps that wait for this one
    Index fold = kNone;               // of a fold; of a copy that converts
    std::byte* data = nullptr;        // source of a send; destination of a receive or copy
    const std::byte* from = nullptr;  // of a copy
    std::size_t bytes = 0;
  };
  struct Link {
    Index step = kNone;
    Index next = kNone;
  };

  // A part of the plan in which some of the ranks take part, and which reads what an earlier part
  // has written. Receives never wait for it: what they write, peers send only after they have had
  // all that this rank sends of the same memory before.
  struct Stage {
    std::span<const int> members;  // the ranks; "peers" are then places among them; empty: all
    Index ready = kNone;           // sends, copies and reductions wait for it
    Index turn = kNone;            // sends wait for it too
  };

  // Empties the plan but keeps its allocated memory.
  void clear(int ranks);
  // Steps that follow belong to this stage. `members` must live until the next stage begins.
  void begin(const Stage& stage) { stage_ = stage; }
  const Stage& stage() const { return stage_; }
  // Returns a step that is done when `also` and all steps from `first` on are done, or all but the
  // sends; kNone if there are none.
  Index all_since(Index first, Index also, bool with_sends);
  // A step that is done when both are.
  Index both(Index one, Index other);
  Index next() const { return static_cast<Index>(steps_.size()); }

  Index send(int peer, const std::byte* data, std::size_t bytes);
  Index receive(int peer, std::byte* data, std::size_t bytes);
  Index copy(std::byte* to, const std::byte* from, std::size_t bytes);
  // Begins a reduction. Parts from peers are reduced in the order of the add() calls.
  Index fold(const Fold::Operands& place);
  Index add(Index fold, int peer);
  // Reduces this rank's numbers alone, which converts them.
  Index convert(const Fold::Operands& place);
  // Makes `later` wait until `earlier` is done. kNone as `earlier` adds no wait.
  void after(Index earlier, Index later);
  // Drops the steps that have not started, and lets nothing wait for the others; parts are counted
  // from 0 again. Returns the number of steps dropped.
  std::uint32_t abandon();
  // Takes memory from the pool and keeps it until release().
  std::byte* scratch(std::size_t bytes, Scratch& pool);
  void release(Scratch& pool);

  std::vector<Step>& steps() { return steps_; }
  std::vector<Fold>& folds() { return folds_; }
  const std::vector<Link>& links() const { return links_; }
  // The step that receives part `number` from `peer`; null if there is none.
  Step* expected(int peer, std::uint32_t number);
  Index index_of(const Step& step) const { return static_cast<Index>(&step - steps_.data()); }

  Arithmetic arithmetic;

 private:
  struct Parts {
    std::uint32_t sent = 0;
    std::vector<Index> received;
  };
  struct Borrowed {
    Scratch::Block block;
    std::size_t bytes;
  };
  Index push(const Step& step);
  int rank_of(int peer) const {
    return stage_.members.empty() ? peer : stage_.members[static_cast<std::size_t>(peer)];
  }

  Stage stage_;
  std::vector<Step> steps_;
  std::vector<Link> links_;
  std::vector<Fold> folds_;
  std::vector<Index> last_of_fold_;
  std::vector<Parts> parts_;  // by peer
  std::vector<Borrowed> borrowed_;
};

}  // namespace weft::transport::mesh
