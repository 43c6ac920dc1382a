// What happens to a communicator: calls of its user, what comes from the peers, ends of what was
// handed to connections. Core handles them one at a time.
#pragma once

#include <memory>
#include <optional>
#include <variant>
#include <vector>

#include <weft/base/op.h>
#include <weft/transport/communicator.h>
#include <weft/transport/connection.h>
#include <weft/transport/mesh/plan.h>
#include <weft/transport/mesh/wire.h>

namespace weft::transport::mesh {

// One collective, from its call to its end; kept for later ones. The connections' Pin while it is
// under way, so that what they still touch outlives an operation that failed.
struct Operation {
  Call call;
  std::uint64_t sequence = 0;
  Slice data;
  std::vector<Slice> inputs, outputs;
  Pin pin;
  Fence ready;
  std::optional<Completion> completion;  // none until its call returns, where that handles it
                                         // itself: then the next two tell
  bool is_over = false;
  std::optional<Error> error;
  Plan plan;
  std::uint32_t steps_left = 0;
  Deadline deadline = Deadline::never();  // from its start on
};

// One message to or from a peer; the connections' Pin as well.
struct Transfer {
  bool is_send = false;
  int peer = 0;  // or kAnySource
  int tag = 0;
  Slice data;
  Dtype dtype = Dtype::UInt8;
  Pin pin;
  Completion completion;
  Deadline deadline = Deadline::never();
  std::uint64_t number = 0;  // of a send whose bytes wait for a Clear
};

namespace event {

struct Adopted {  // a lane stands
  int peer;
  Lane lane;
  std::shared_ptr<Connection> connection;
};
struct Arrived {
  int peer;
  Lane lane;
  Message message;
  const std::byte* in_place;  // null where the payload has not come, or there is none
};
struct Closed {
  int peer;
  std::optional<Lane>
      lane;  // that ended; none where the peer is to be given up whatever else it has said
  Error why;
};
struct Called {
  std::shared_ptr<Operation> operation;
};
struct Ready {};  // a collective may have become ready
struct StepEnded {
  std::shared_ptr<Operation> operation;
  Plan::Index step;
  Scratch::Block block;  // where the part lies that is to be reduced
  std::optional<Error> error;
};
struct Posted {  // a send or a receive
  std::shared_ptr<Transfer> transfer;
  bool is_ready;  // another one follows when it is
};
struct TransferEnded {
  std::shared_ptr<Transfer> transfer;
  int peer;
  std::uint64_t credit;  // to be given back to the peer
  std::optional<Error> error;
};
struct Landed {  // an unexpected message is in its buffer
  int peer;
  std::uint64_t unexpected;
  std::optional<Error> error;
};
struct Failed {
  Error why;
  bool destroyed;  // nobody is told
};
struct Told {  // a peer has our Failure
  int peer;
};
struct Tick {};
struct Asked {  // what nobody has received; the flag is raised when the answer is there
  std::shared_ptr<std::vector<PointToPoint::Unreceived>> unreceived;
  std::shared_ptr<HostFlag> answered;
};

}  // namespace event

using Event = std::variant<event::Adopted, event::Arrived, event::Closed, event::Called,
                           event::Ready, event::StepEnded, event::Posted, event::TransferEnded,
                           event::Landed, event::Failed, event::Told, event::Tick, event::Asked>;

}  // namespace weft::transport::mesh
