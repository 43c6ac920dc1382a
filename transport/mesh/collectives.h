// SPDX-License-Identifier: Apache-2.0
// Runs the collectives of a communicator one after another, in the order of the calls. A message of
// a later collective is not accepted until that collective starts here, so a full connection holds
// up a faster peer.
#pragma once

#include <array>
#include <deque>
#include <memory>
#include <string>
#include <vector>

#include <weft/transport/mesh/events.h>

namespace weft::transport::mesh {

class Core;

class Collectives {
 public:
  explicit Collectives(Core& core) : core_(core) {}

  void call(std::shared_ptr<Operation> operation);
  void arrived(int peer, const Message& message, const std::byte* in_place);
  void step_ended(event::StepEnded& event);
  // Runs all steps that can run now.
  void advance();
  void lost(int peer);
  // Ends all operations with `why`. The operation into whose memory a connection still writes ends
  // when the connection has stopped, because its caller may reuse the memory then.
  void fail(const Error& why) noexcept;
  bool is_landing() const { return failing_ != nullptr; }
  // Ends that operation too, after the connections have been closed.
  void let_go() noexcept;

  // Sets the peers that the current operation still needs, and those whose message waits here.
  void mark_busy(std::vector<bool>& busy) const;
  // The deadline of the current operation.
  Deadline deadline() const { return current_ ? current_->deadline : Deadline::never(); }
  Error why_late() const;

 private:
  // A message that has not been accepted.
  struct Held {
    bool is_here = false;
    Header header;
    std::uint64_t payload = 0;
    const std::byte* in_place = nullptr;
  };

  bool start_next();
  void start(Operation& operation);
  // Starts the steps of its plan from this one on.
  void start_steps(Operation& operation, Plan::Index first);
  void run_released();
  void run(Plan::Index index);
  void send(Plan::Index index);
  void done(Plan::Step& step);
  void finish();
  // Accepts the peer's message if a step of the current operation waits for it.
  void consider(int peer);
  // True if the call is the current one, but only one of the two gathers equal parts.
  bool differs_in_gathering(const Call& call) const;
  // Gives up the current plan, which gathers equal parts, because another rank does not.
  void stop_gathering();
  bool fits(int peer, const Held& held) const;
  Error mismatch(int peer, const Held& held, const Call& here) const;
  void copy(const Plan::Step& step);
  void take(int peer, Plan::Step& step);
  // Lets a message whose bytes arrive there into the step's memory. `in_place`: null if the
  // connection does not show all of them.
  Op receive(int peer, const Plan::Step& step, const std::byte* in_place);
  void landed(const event::StepEnded& event) noexcept;
  void end(Operation& operation, const Error& why) noexcept;

  Core& core_;
  std::deque<std::shared_ptr<Operation>> waiting_;
  bool awaits_fence_ = false;  // the loop watches the fence of waiting_.front()
  std::shared_ptr<Operation> current_;
  std::shared_ptr<Operation> failing_;  // a failed operation that still receives parts
  std::size_t landing_ = 0;             // number of those parts
  std::uint64_t next_sequence_ = 0;
  std::uint64_t over_ = 0;             // number of finished operations
  std::array<Call, 16> last_ = {};     // the last finished calls, by sequence
  std::vector<Plan::Index> released_;  // steps of the current one that may start
  std::vector<Held> held_;             // by peer
};

}  // namespace weft::transport::mesh
