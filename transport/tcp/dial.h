// SPDX-License-Identifier: Apache-2.0
// Makes the sockets of one connection, Settings::sockets of them. Tries the peer's addresses in
// turn, in rounds with growing pauses, until the intended listener answers at one of them on all
// sockets, or the deadline passes. If one socket fails, all are made anew, so that the listener
// never combines sockets of two attempts. Runs on the loop; a separate thread resolves names.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include <weft/base/event_loop.h>
#include <weft/transport/tcp/greeting.h>
#include <weft/transport/tcp/settings.h>
#include <weft/transport/tcp/socket.h>
#include <weft/transport/tls/socket.h>

namespace weft::transport::tcp {

class Dial : public std::enable_shared_from_this<Dial> {
 public:
  // Done is called once, on the loop, unless cancel() comes first. It receives connected and
  // greeted sockets and their peer's address, or the error: PeerLost (refused, unreachable, another
  // program answers, TLS fails), Timeout (no answer), Busy (no descriptors).
  struct Made {
    std::vector<tls::Socket> sockets;  // by their index
    std::string peer;
  };
  using Done = std::function<void(Result<Made>)>;

  // If `refusal_ends` and all addresses refuse, or have no route from here beside one that refuses,
  // no further round is tried.
  static std::shared_ptr<Dial> make(const std::shared_ptr<EventLoop>& loop, const Address& address,
                                    Deadline deadline, bool refusal_ends, const Settings& settings,
                                    Done done);
  void begin();
  // Releases everything soon. Thread-safe.
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
  void shake_hands(std::size_t index);
  void greet(std::size_t index);
  void read_greeting(std::size_t index);
  void watch(std::size_t index, std::uint32_t events, void (Dial::*next)(std::size_t));
  std::string why_late() const;
  void attempt_failed(Blame blame, const std::string& why, int number);
  void end_round();
  void finish(Result<Made> result);
  std::string text() const;

  // Weak, because the loop's handlers own this.
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
    tls::Socket socket;
    Greeting greeting = {};
    EventLoop::Registration watch = {};
    bool shakes_hands = false;
  };
  std::vector<Call> calls_;
  std::uint64_t connection_key_ = 0;
  std::size_t answered_ = 0;
  EventLoop::Registration timer_;
  // This round's failures: the reason for each address, the blame and errno of the last, and
  // whether another round may succeed.
  std::string failures_;
  Blame blame_ = Blame::Timeout;
  int number_ = 0;
  bool worth_another_ = false;
  bool was_refused_ = false;  // these two only if `refusal_ends`
  bool lacks_route_ = false;
};

}  // namespace weft::transport::tcp
