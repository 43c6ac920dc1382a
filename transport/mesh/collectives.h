// Carries the collectives of a communicator out, one after another in the order of the calls. A
// message of a later one waits in its lane, unaccepted, until that one has started here; so a
// faster peer is held up by the lane being full.
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
  // Goes on as far as it goes.
  void advance();
  void lost(int peer);
  // What a lane writes to fails when that has ended: whoever hears of it may use the memory again.
  void fail(const Error& why) noexcept;
  bool is_landing() const { return failing_ != nullptr; }
  // The lanes are closed.
  void let_go() noexcept;

  // Of what is under way.
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
  void run_released();
  void run(Plan::Index index);
  void send(Plan::Index index);
  void done(Plan::Step& step);
  void finish();
  // Accepts what the peer has sent, if it is its turn.
  void consider(int peer);
  bool fits(int peer, const Held& held) const;
  Error mismatch(int peer, const Held& held, const Call& here) const;
  void take(int peer, Plan::Step& step);
  void landed(const event::StepEnded& event) noexcept;
  void end(Operation& operation, const Error& why) noexcept;

  Core& core_;
  std::deque<std::shared_ptr<Operation>> waiting_;
  bool awaits_fence_ = false;  // of the first that waits
  std::shared_ptr<Operation> current_;
  std::shared_ptr<Operation> failing_;  // for whose memory parts are still on their way
  std::size_t landing_ = 0;             // so many
  std::uint64_t next_sequence_ = 0;
  std::uint64_t over_ = 0;             // operations
  std::array<Call, 16> last_ = {};     // of them, by their sequence
  std::vector<Plan::Index> released_;  // steps of the current one that may start
  std::vector<Held> held_;             // by peer
};

}  // namespace weft::transport::mesh
