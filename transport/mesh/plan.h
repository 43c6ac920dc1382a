// What one rank does in one collective: parts to send, parts to receive, and which waits for which.
// An algorithm is a function that writes a plan (algorithms.h); one executor (collectives.h)
// carries out all of them.
//
// The n-th part that a plan sends to a peer is the n-th that the peer's plan receives from this
// rank; which of them go first is left to the execution. So the plans of all ranks can be checked
// against each other without a connection.
//
// Nothing that is received may wait for something that is sent: a lane that is full moves on when
// its other end receives.
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
    std::int32_t peer = -1;       // none for a copy
    std::uint32_t number = 0;     // of the part, counted for the pair and direction
    std::uint32_t waits_for = 0;  // steps
    Index first_link = kNone;     // of those that wait for this one
    Index fold = kNone;
    std::byte* data = nullptr;        // to send; to fill
    const std::byte* from = nullptr;  // of a copy
    std::size_t bytes = 0;
  };
  struct Link {
    Index step = kNone;
    Index next = kNone;
  };

  // Forgets all but the memory that it has.
  void clear(int ranks);

  Index send(int peer, const std::byte* data, std::size_t bytes);
  Index receive(int peer, std::byte* data, std::size_t bytes);
  Index copy(std::byte* to, const std::byte* from, std::size_t bytes);
  // A reduction, whose parts come by add(), in the order in which they are added here.
  Index fold(const Fold::Place& place);
  Index add(Index fold, int peer);
  // `later` starts when `earlier` is done. kNone waits for nothing.
  void after(Index earlier, Index later);
  // Memory that lives as long as the plan.
  std::byte* scratch(std::size_t bytes, Scratch& pool);
  void release(Scratch& pool);

  std::vector<Step>& steps() { return steps_; }
  std::vector<Fold>& folds() { return folds_; }
  const std::vector<Link>& links() const { return links_; }
  // The step that receives that part of that peer; null when there is none.
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

  std::vector<Step> steps_;
  std::vector<Link> links_;
  std::vector<Fold> folds_;
  std::vector<Index> last_of_fold_;
  std::vector<Parts> parts_;  // by peer
  std::vector<Borrowed> borrowed_;
};

}  // namespace weft::transport::mesh
