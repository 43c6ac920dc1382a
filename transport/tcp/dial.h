// Makes the connections of one lane, Settings::sockets of them: tries the peer's addresses in turn,
// again and again with growing pauses, until one answers as the listener that is meant, on all of
// them, or the deadline passes. Where one fails all are made anew, so that the listener never takes
// sockets of two attempts for one lane. Runs on the loop; names are resolved on a thread of their
// own.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include <weft/base/event_loop.h>
#include <weft/transport/tcp/greeting.h>
#include <weft/transport/tcp/settings.h>
#include <weft/transport/tcp/socket.h>

namespace weft::transport::tcp {

class Dial : public std::enable_shared_from_this<Dial> {
 public:
  // Called once, on the loop, unless cancel() comes first: connected and greeted sockets with their
  // peer's address, or why there are none: PeerLost (refused, unreachable, somebody else is there),
  // Timeout (no answer), Busy (no descriptors).
  struct Made {
    std::vector<Descriptor> sockets;  // by their index
    std::string peer;
  };
  using Done = std::function<void(Result<Made>)>;

  // `refusal_ends`: where all addresses refuse, there is no other round.
  static std::shared_ptr<Dial> make(const std::shared_ptr<EventLoop>& loop, const Address& address,
                                    Deadline deadline, bool refusal_ends, const Settings& settings,
                                    Done done);
  void begin();
  // Lets go of everything soon. From every thread.
  void cancel() noexcept;

 private:
  Dial(const std::shared_ptr<EventLoop>& loop, const Address& address, Deadline deadline,
       bool refusal_ends, const Settings& settings, Done done);
  void begin_round();
  void resolve_names();
  void resolved(const std::vector<SocketAddress>& found, const std::string& failures);
  void try_next();
  void start_over();
  Descriptor connect(const SocketAddress& address);
  void connected(std::size_t index);
  void read_greeting(std::size_t index);
  void attempt_failed(Blame blame, const std::string& why, int number);
  void end_round();
  void finish(Result<Made> result);
  std::string text() const;

  // Weak: the loop's tables own this.
  const std::weak_ptr<EventLoop> loop_;
  const Address address_;
  const Deadline deadline_;
  const bool refusal_ends_;
  const Settings settings_;
  Done done_;

  std::vector<SocketAddress> candidates_;  // of this round
  std::size_t next_ = 0;
  std::chrono::milliseconds pause_;
  // The attempt under way.
  struct Call {
    Descriptor socket;
    Greeting greeting = {};
    EventLoop::Registration watch = {};
  };
  std::vector<Call> calls_;
  std::uint64_t lane_ = 0;
  std::size_t answered_ = 0;
  EventLoop::Registration timer_;
  // Of this round: what each address said, the blame of the last, and whether one of them may say
  // otherwise later.
  std::string failures_;
  Blame blame_ = Blame::Timeout;
  int number_ = 0;
  bool worth_another_ = false;
};

}  // namespace weft::transport::tcp
