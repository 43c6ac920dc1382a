// SPDX-License-Identifier: Apache-2.0
// The events of a communicator: calls of its user, arrivals from peers, and the ends of operations
// on connections. Core handles them one at a time.
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

// One collective, from its call to its end; then kept for reuse. Connections hold it as a Pin while
// they use its memory, so that the memory outlives an operation that failed.
struct Operation {
  Call call;
  std::uint64_t sequence = 0;
  Slice data;
  std::vector<Slice> inputs, outputs;
  Pin pin;
  Fence ready;
  // Empty while the calling thread handles the call itself; is_over and error then tell the result.
  std::optional<Completion> completion;
  bool is_over = false;
  std::optional<Error> error;
  Plan plan;
  std::uint32_t steps_left = 0;
  std::size_t received_bytes = 0;         // by all receives of the plan
  Deadline deadline = Deadline::never();  // set when the operation waits for peers
};

// One message to or from a peer. Connections hold it as a Pin too.
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

struct Adopted {  // a connection is established
  int peer;
  Traffic traffic;
  std::shared_ptr<Connection> connection;
};
struct Unreachable {  // a connection could not be opened
  int peer;
  Traffic traffic;
  Error why;
};
struct Arrived {
  int peer;
  Traffic traffic;
  Message message;
  const std::byte* in_place;  // null if the payload has not arrived in full or is empty
};
struct Closed {
  int peer;
  // The connection that ended. Empty: the peer is lost at once, without waiting for its other
  // connection.
  std::optional<Traffic> traffic;
  Error why;
};
struct Called {
  std::shared_ptr<Operation> operation;
};
struct Ready {};  // a collective may have become ready
struct StepEnded {
  std::shared_ptr<Operation> operation;
  Plan::Index step;
  Scratch::Block block;  // holds the part to be reduced
  std::optional<Error> error;
};
struct Posted {  // a send or a receive
  std::shared_ptr<Transfer> transfer;
  bool is_ready;  // if false, another event follows when it is
};
struct TransferEnded {
  std::shared_ptr<Transfer> transfer;
  int peer;
  std::uint64_t credit;  // to be returned to the peer
  std::optional<Error> error;
};
struct Landed {  // an unexpected message is in its buffer
  int peer;
  std::uint64_t unexpected;
  std::optional<Error> error;
};
struct Failed {
  Error why;
  bool destroyed;  // by the communicator's destructor; peers are not told
};
struct Told {  // our Failure has been sent to the peer
  int peer;
};
struct Tick {};
struct Look {};  // connections may have become idle, see Closings
struct Asked {   // a query for unreceived messages; the flag is raised when the answer is complete
  std::shared_ptr<std::vector<PointToPoint::Unreceived>> unreceived;
  std::shared_ptr<HostFlag> answered;
};

}  // namespace event

using Event =
    std::variant<event::Adopted, event::Unreachable, event::Arrived, event::Closed, event::Called,
                 event::Ready, event::StepEnded, event::Posted, event::TransferEnded, event::Landed,
                 event::Failed, event::Told, event::Tick, event::Look, event::Asked>;

}  // namespace weft::transport::mesh
