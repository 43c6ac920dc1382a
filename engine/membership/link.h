// SPDX-License-Identifier: Apache-2.0
// One of membership's connections: cuts frames out of the bytes that arrive, and keeps the bytes
// that the socket does not take yet. Used on the job's loop only, where its events happen too;
// nothing blocks. Ends when the last owner drops it.
#pragma once

#include <cstddef>
#include <functional>
#include <memory>
#include <optional>
#include <string>

#include <weft/base/descriptor.h>
#include <weft/base/end_of_process.h>
#include <weft/base/event_loop.h>
#include <weft/engine/membership/answers.h>
#include <weft/engine/membership/frame.h>
#include <weft/engine/membership/published.h>
#include <weft/transport/challenge.h>
#include <weft/transport/tls/socket.h>

namespace weft::group {

// Bytes that may wait for a slow peer. A thousand ranks that leave a dozen groups at once send
// about 30 MiB.
constexpr std::size_t kMostUnsent = std::size_t{64} << 20;

// Returns a socket that is connecting to the address. Throws Busy without descriptors, and PeerLost
// if the system refuses the connection at once. Thread-safe.
Descriptor dial_socket(const Published& address);
// Lets the kernel end the connection if the peer vanishes (cable, power) or reads nothing, after
// about 15 s.
void keep_alive(int socket);

// Why a link has ended.
struct LinkEnd {
  std::string how;  // "its process ended"
  // True if the peer's machine does not answer: the process there may live on. Otherwise the peer's
  // system has closed the connection or refused it.
  bool is_cut = false;
  // True if nothing at all has come from that machine for a while: no process there is reachable.
  bool is_silent = false;
  bool is_of_tls = false;  // the two ends do not agree on TLS
};

class Link : public std::enable_shared_from_this<Link> {
 public:
  struct Events {
    // A frame has arrived. The handler may end the link.
    std::function<void(Link&, const Frame&)> frame;
    // The peer sends nothing more: it has finished, or its process has ended. Returns true if the
    // link is to go on sending; otherwise the link ends.
    std::function<bool(Link&)> read_all;
    // Called once; the link sends and receives nothing afterwards.
    std::function<void(Link&, const LinkEnd&)> ended;
  };
  // `socket` is connected, or is being connected. The job has `ranks` ranks. `rank`: the peer's; -1
  // if it has connected to this rank and has to say first which it is. Speaks TLS if the
  // environment names a certificate.
  Link(std::shared_ptr<EventLoop> loop, Descriptor socket, int ranks, int rank, Events events);
  ~Link() { end(); }
  Link(const Link&) = delete;
  Link& operator=(const Link&) = delete;

  // Begins to watch the socket. If the peer has not greeted() in time, the link ends.
  void start(std::chrono::milliseconds patience);
  // The bytes leave at the end of the loop's present turn, together with others.
  void send(const std::string& bytes);
  // The same for a Completed frame, which leaves as one with others for the same rank.
  void answer(const Frame& completed);
  // Sends now what the socket takes.
  void flush();
  // Sends what waits, and then closes this rank's half of the connection: the peer reads its end.
  void finish();
  // True until finish().
  bool can_send() const { return !finishes_; }
  // True if the peer sends nothing more, and the link goes on.
  bool has_read_all() const { return has_read_all_; }
  // Ends the link without an event.
  void end() noexcept;
  bool has_ended() const { return ended_; }

  // The peer has said hello, as that rank.
  void greeted(int rank);
  bool has_greeted() const { return has_greeted_; }
  // Set if the peer has to prove first that it knows the group's secret.
  std::optional<transport::Challenge> challenge;
  int rank() const { return rank_; }

 private:
  void on_event(std::uint32_t events);
  bool shake_hands(std::uint32_t events);
  void read();
  LinkEnd end_by(int error) const;
  bool speaks_tls(std::byte first);
  void on_end_of_bytes();
  void fail(const LinkEnd& end);
  void fail_soon(const LinkEnd& end);
  void watch(std::uint32_t more);
  void flush_soon();

  const std::shared_ptr<EventLoop> loop_;
  transport::tls::Socket socket_;
  std::optional<EndOfProcess> end_of_process_;  // a death is seen by the connection's end
  const Events events_;
  int rank_;
  bool has_greeted_ = false;
  bool is_connected_ = false;
  bool has_shaken_hands_;  // or speaks plain text
  bool ended_ = false;
  bool flushes_soon_ = false;
  bool finishes_ = false;
  bool has_finished_ = false;
  bool has_read_all_ = false;
  FrameReader reader_;
  Answers answers_;
  std::string unsent_;
  EventLoop::Registration watch_;
  EventLoop::Registration patience_;  // until the peer's hello
  EventLoop::Registration failing_;
};

}  // namespace weft::group
