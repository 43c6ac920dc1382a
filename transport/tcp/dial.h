// Makes one connection: tries the peer's addresses in turn, again and again with growing pauses, until one answers as the
// listener that is meant or the deadline passes. Runs on the loop; names are resolved on a thread of their own.
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
  // Called once, on the loop, unless cancel() comes first: a connected and greeted socket with its peer's address, or why
  // there is none: PeerLost (refused, unreachable, somebody else is there), Timeout (no answer), Busy (no descriptors).
  struct Made {
    Socket socket;
    std::string peer;
  };
  using Done = std::function<void(Result<Made>)>;

  // `refusal_ends`: where all addresses refuse, there is no other round.
  static std::shared_ptr<Dial> begin(const std::shared_ptr<EventLoop>& loop, const Address& address, Deadline deadline,
                                     bool refusal_ends, const Settings& settings, Done done);
  // Lets go of everything soon. From every thread.
  void cancel() noexcept;

 private:
  Dial(const std::shared_ptr<EventLoop>& loop, const Address& address, Deadline deadline, bool refusal_ends,
       const Settings& settings, Done done);
  void begin_round();
  void resolve_names();
  void resolved(const std::vector<SocketAddress>& found, const std::string& failures);
  void try_next();
  void connected();
  void read_greeting();
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
  Socket socket_;  // of the attempt under way
  Greeting greeting_;
  EventLoop::Registration watch_;
  EventLoop::Registration timer_;
  // Of this round: what each address said, the blame of the last, and whether one of them may say otherwise later.
  std::string failures_;
  Blame blame_ = Blame::Timeout;
  int number_ = 0;
  bool worth_another_ = false;
};

}  // namespace weft::transport::tcp
